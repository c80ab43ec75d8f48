"""Servers of several processes: each answers as one without ecd, loads and stores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.engines import VERSIONS, Engine, last_words
from e2e.servers import api_server
from e2e.shared import EXACT, TRUST, Engines, Pictures, PlainServer
from e2e.test_reuse import answer, shown
from support.daemon import Daemon
from support.waiting import eventually

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.parametrize("version", VERSIONS[:1], indirect=True, scope="session"),
]

COUNTS = ["--worker-extension-cls", "counting_worker.Counting"]
REUSES = ["--middleware", "ecd_client.vllm.ReuseMiddleware"]
READY = "that are stored are not preprocessed"
PICTURES = 8
BARE = {
    "type": "image_embeds",
    "uuid": "nobody has it",
    "image_embeds": {"image_grid_thw": [1, 16, 24]},
}


@dataclass(frozen=True)
class Serves:
    flags: list[str]
    processes: int
    engines: int = 1
    servers: int = 1


ONE = ["--api-server-count", "1"]
QUICK = {"several engines and API servers": Serves(["--data-parallel-size", "2"], 5, 2, 2)}
SLOW = {
    "several API servers": Serves(["--api-server-count", "2"], 3, servers=2),
    "several engines": Serves(["--data-parallel-size", "2", *ONE], 3, 2),
}
WAYS = {**QUICK, **SLOW}


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.night) for name in SLOW)]
)
def test_a_way_of_serving(
    name: str,
    version: str,
    daemon: Daemon,
    engines: Engines,
    shared: Callable[..., Engine],
    plain_server: PlainServer,
    new: Pictures,
    tmp_path: Path,
) -> None:
    way = WAYS[name]
    stored, fresh = ([shown(new.url()) for _ in range(PICTURES)] for _ in range(2))
    right = [[answer(plain_server.chat(each)) for each in asked] for asked in (stored, fresh)]
    encoder = shared("ec_producer")
    encoder.generate([{"messages": [{"role": "user", "content": each}]} for each in stored])
    eventually(lambda: daemon.status().entries == PICTURES, "every picture stored")
    daemon.wait_idle()
    stand = daemon.status()
    before_all, puts, sessions = stand.counters, stand.counters.puts, stand.sessions
    server = api_server(
        version,
        tmp_path / "server.log",
        engines.model(version),
        "ec_both",
        [*way.flags, *COUNTS, *REUSES, *EXACT, TRUST],
        processes=way.processes,
        ecd_address=daemon.address,
    )
    try:
        server.wait_ready()
        eventually(lambda: server.text().count(READY) == way.servers, "the middleware's word")
        clients = 2 * way.engines + way.servers
        eventually(lambda: daemon.status().sessions == sessions + clients, "sessions")

        def ask(content: list[dict]) -> tuple:
            status, body = server.chat(content)
            return status, answer(body) if status == 200 else body

        def forwards() -> int:
            return server.text().count("pictures are encoded")

        before, processed = forwards(), server.sample("vllm:mm_cache_queries_total")
        with ThreadPoolExecutor(PICTURES) as users:
            assert list(users.map(ask, stored)) == [(200, each) for each in right[0]]
            assert forwards() == before
            assert server.sample("vllm:mm_cache_queries_total") == processed, "by names alone"
            assert server.sample("vllm:ecd_loads_total") == PICTURES
            assert server.sample("vllm:ecd_hits_total") == PICTURES
            assert server.sample("vllm:ecd_misses_total") == 0
            eventually(lambda: daemon.status().leases == 0, "leases of finished requests")
            twice = [*fresh, *fresh]
            assert list(users.map(ask, twice)) == [(200, each) for each in right[1]] * 2
            eventually(lambda: daemon.status().counters.puts == puts + PICTURES, "all stored")
            assert server.sample("vllm:ecd_misses_total") == PICTURES, "encoded once"
            counted = daemon.status().counters
            for name in ("hits", "misses"):
                grown = getattr(counted, name) - getattr(before_all, name)
                assert grown == server.sample(f"vllm:ecd_{name}_total"), name
            broken = list(users.map(ask, [[BARE, *shown("")[1:]]] * PICTURES))
        assert [status for status, _ in broken] == [500] * PICTURES, broken
        assert ask(stored[0]) == (200, right[0][0]), last_words(server.text())
        eventually(lambda: daemon.status().leases == 0, "leases of finished requests")
    finally:
        server.close()
