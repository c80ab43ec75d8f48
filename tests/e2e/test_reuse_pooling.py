"""The middleware at a server of a pooling model, which takes messages at doors of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.engines import VERSIONS
from e2e.servers import Server, picture_url
from e2e.shared import Engines
from e2e.test_reuse_media import NOTHING, Fleet, Work
from support.waiting import eventually

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.parametrize("version", VERSIONS[:1], indirect=True, scope="session"),
]
DOORS = "/v1/embeddings", "/pooling"


@pytest.fixture
def fleet(
    version: str, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    directory, flags = tmp_path_factory.mktemp("pooling"), ["--runner", "pooling"]
    limits = {"image": 2, "video": 0}
    fleet = Fleet(
        version, engines.model(version), directory, limits, [*flags, "--convert", "embed"]
    )
    try:
        yield fleet
    finally:
        fleet.close()


def test_a_picture_that_is_stored_is_not_preprocessed_again(fleet: Fleet) -> None:
    for number, door in enumerate(DOORS):

        def ask(server: Server, seed: int, door: str = door) -> list[float]:
            part = {"type": "image_url", "image_url": {"url": picture_url(seed)}}
            content = [part, {"type": "text", "text": "what is it?"}]
            status, body = server.ask(door, messages=[{"role": "user", "content": content}])
            assert status == 200, body
            [made] = body["data"]
            return made.get("embedding") or made["data"]

        before, puts = Work.of(fleet.server), fleet.daemon.status().counters.puts
        right = ask(fleet.plain, number)
        assert right != ask(fleet.plain, number + 10)
        assert ask(fleet.server, number) == pytest.approx(right, abs=1e-4)
        assert Work.of(fleet.server).since(before) == Work(0, 1, 1)
        eventually(lambda puts=puts: fleet.daemon.status().counters.puts > puts)
        before = Work.of(fleet.server)
        assert ask(fleet.server, number) == pytest.approx(right, abs=1e-4)
        assert Work.of(fleet.server).since(before) == NOTHING
