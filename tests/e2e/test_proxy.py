"""Real engines over HTTP behind the proxy of vLLM's examples, which sends on metadata for media."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.engines import installed
from e2e.servers import Server, api_server, picture_url, proxy
from support.daemon import Daemon, eventually
from support.squeeze import being_written

pytestmark = pytest.mark.timeout(900)
seeds = itertools.count(1)
ENTRY_BYTES = 96 * 256
WAIT_S = 3.0


@pytest.fixture(scope="session")
def version() -> str:
    """The server of vLLM 0.28 takes no metadata as JSON: nothing is rewritten for it."""
    return installed("0.32.0")


class Row:
    """An encoder, a consumer and a proxy; and an engine that has never heard of ecd."""

    def __init__(self, daemon: Daemon, start: Callable[..., Server], log: Path) -> None:
        self.daemon, self.start = daemon, start
        extra = {"ecd_address": daemon.address, "ecd_load_timeout_s": WAIT_S}
        self.encoder = start("ec_producer", **extra)
        self.consumer = start("ec_consumer", **extra)
        self.plain = start(None)
        for server in (self.encoder, self.consumer, self.plain):
            server.wait_ready()
        self.proxy = proxy(log, [self.encoder], [self.consumer])

    def anew(self, pool: str = "64MiB") -> None:
        self.daemon.pool = pool
        self.daemon.close()
        self.daemon.start()
        self.daemon.wait_for_clients(4)  # two of each engine

    def check(self, content: list[dict], status: int = 200) -> None:
        """The answer through the proxy is the plain engine's, or this request alone has failed."""
        got, body = self.proxy.chat(content)
        assert got == status, f"{body}\n{self.consumer.text()[-3000:]}"
        if got == 200:
            assert answer(body) == answer(self.plain.chat(content)[1])
        words = [{"type": "text", "text": "what is what?"}]
        assert answer(self.consumer.chat(words)[1]) == answer(self.plain.chat(words)[1])


def answer(body: dict) -> list[tuple[str, float]]:
    tokens = body["choices"][0]["logprobs"]["content"]
    return [(token["token"], pytest.approx(token["logprob"], abs=1e-3)) for token in tokens]


def pictures(*numbers: int) -> list[dict]:
    shown = [{"type": "image_url", "image_url": {"url": picture_url(n)}} for n in numbers]
    return [*shown, {"type": "text", "text": "what is in this picture?"}]


def fresh(count: int) -> list[dict]:
    return pictures(*(next(seeds) for _ in range(count)))


def metadata_of(name: str) -> list[dict]:
    grid = {"image_grid_thw": [1, 16, 24]}
    item = {"type": "image_embeds", "image_embeds": grid, "uuid": name}
    return [item, {"type": "text", "text": "what is in this picture?"}]


@pytest.fixture(scope="module")
def row(
    version: str,
    model_of: Callable[[str], Path],
    shared_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Row]:
    logs = tmp_path_factory.mktemp("servers")
    servers: list[Server] = []

    def start(role: str | None, flags: Sequence[str] = (), **extra: object) -> Server:
        model = model_of("qwen2_5_vl")
        servers.append(api_server(version, logs / f"{role}.log", model, role, flags, **extra))
        return servers[-1]

    shared_daemon.start()
    try:
        row = Row(shared_daemon, start, logs / "proxy.log")
        servers.append(row.proxy)
        row.proxy.wait_ready()
        yield row
    finally:
        with ThreadPoolExecutor() as side:
            list(side.map(Server.close, servers))


def test_metadata_travels_in_place_of_the_media(row: Row) -> None:
    row.anew()
    before = row.consumer.metrics()
    row.check(fresh(1))
    row.check(fresh(3))
    twice = fresh(1)
    row.check(twice)
    row.check(twice)
    counted = row.consumer.metrics()
    assert counted.get("misses", 0) == before.get("misses", 0), "the consumer has encoded nothing"
    assert counted["loads"] - before.get("loads", 0) == 5
    assert row.encoder.metrics()["saves"] >= 5
    assert "Rewrote 3 media item(s)" in row.proxy.text()


def test_metadata_of_what_nobody_has_ends_no_engine(row: Row) -> None:
    row.anew()
    status, body = row.consumer.chat(metadata_of("nobody"))
    assert status == 500, body
    assert "nobody has stored it" in row.consumer.text()
    row.check(fresh(1))


def test_what_is_lost_between_encoder_and_consumer_is_encoded_again(row: Row) -> None:
    """The proxy asks both once more when the consumer fails a request."""
    row.anew()
    shown = fresh(2)
    row.check(shown)
    name = row.daemon.entries()[0].key.mm_hash
    row.daemon.evict_all()
    assert row.consumer.chat(metadata_of(name))[0] == 500
    row.check(shown)
    row.daemon.kill()
    # Until the consumer has seen that its daemon ended, it may still read what the daemon left.
    eventually(lambda: row.consumer.chat(metadata_of(name))[0] == 500)
    row.check(shown)
    row.check(fresh(2))
    row.anew()
    row.check(shown)
    row.check(fresh(2))


def test_a_pool_too_small_for_what_is_asked(row: Row) -> None:
    row.anew("1MiB")
    for left_bytes in (ENTRY_BYTES - 4096, 2 * ENTRY_BYTES):
        with being_written(row.daemon.address, (1 << 20) - left_bytes):
            row.check(fresh(1))
            row.check(fresh(3))
        row.daemon.evict_all()


def test_a_counter_is_nobodys_name_whatever_media_settings_make_of_it(row: Row) -> None:
    """The server's own --media-io-kwargs have vLLM hash its counter, for plain requests too."""
    row.anew()
    media = '{"image": {"rgba_background_color": [0, 0, 0]}}'
    flags = ["--mm-processor-cache-gb", "0", "--no-enable-prefix-caching"]
    flags += ["--media-io-kwargs", media]
    for shown in (fresh(1), fresh(1)):
        engine = row.start("ec_both", flags, ecd_address=row.daemon.address).wait_ready()
        assert answer(engine.chat(shown)[1]) == answer(row.plain.chat(shown)[1])
        assert "nothing is shared" in engine.text()
        engine.close()
    assert row.daemon.status().entries == 0
