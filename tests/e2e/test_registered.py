"""Encoders that register themselves: vLLM's own servers that start and are killed under requests.

One shares the daemon of the engine that asks, which has no list of them. Two are on another node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.gates import Gate
from e2e.servers import Server, api_server
from e2e.shared import AND_NEXT, EXACT, Engines, Pictures, PlainServer
from e2e.test_reuse import (
    CALLER,
    CALM,
    KEY,
    MIDDLEWARE,
    READY,
    answer,
    encoded,
    preprocessed,
    shown,
)
from support.cli import as_json
from support.daemon import Daemon, close_all
from support.pairs import PATIENT, start_all
from support.waiting import HANG_S, eventually

pytestmark = [pytest.mark.timeout(600), AND_NEXT]
NODES = "127.0.89.1:9465", "127.0.89.2:9465"
CALLERS = 6
TOKENS = 96
"""The estimate of a picture's tokens, by which an encoder is chosen."""


class Encoder:
    """A server that encodes, with a gate before its preprocessing."""

    def __init__(self, server: Server, gate: Gate, url: str) -> None:
        self.server, self.gate, self.url = server, gate, url

    def served(self) -> int:
        """The pictures that it has preprocessed for others, by its log, which outlives it."""
        return self.server.text().partition(READY)[2].count("media are preprocessed")


class Cluster:
    """Two nodes, an engine on the first, and the encoders that a test starts on either."""

    def __init__(self, version: str, engines: Engines, directory: Path, new: Pictures) -> None:
        self._version, self._model, self._directory = version, engines.model(version), directory
        self._started: list[Server] = []
        self._new = new
        self.daemons = [
            Daemon(
                directory,
                ECD_PEER_ADDRESS=node,
                ECD_PEERS=",".join(NODES),
                ECD_PEER_TOKEN="a secret of the test",
                ECD_ENGINE_PORTS=f"{18956 + 16 * number}-{18971 + 16 * number}",
                ECD_FETCH_TIMEOUT_S=f"{HANG_S}",
            )
            for number, node in enumerate(NODES)
        ]
        for daemon in self.daemons:
            daemon.command = PATIENT
        self._side = ThreadPoolExecutor(CALLERS)
        self.asked = 0

    def start(self) -> Server:
        start_all(*self.daemons)
        self.server = self._start("ec_consumer", 0, {"ECD_ENCODERS": "directory"})
        return self.server

    def encoder(self, node: int) -> Encoder:
        """A server that starts on all addresses, as vLLM does by itself."""
        gate = Gate(self._directory / f"gate-{len(self._started)}")
        server = self._start("ec_producer", node, {"GATE": str(gate.path)}, "0.0.0.0")
        return Encoder(server, gate, f"http://{NODES[node].partition(':')[0]}:{server.port}")

    def _start(
        self, role: str, node: int, environ: dict[str, str], host: str = "127.0.0.1"
    ) -> Server:
        log = self._directory / f"{len(self._started)}-{role}.log"
        extra = {"ecd_address": self.daemons[node].address, "ecd_load_timeout_s": 10 * HANG_S}
        how = {"counting": True, "environ": {**CALM, **environ}, "host": host, **extra}
        flags = [*MIDDLEWARE, "--api-key", KEY, *EXACT]
        self._started.append(api_server(self._version, log, self._model, role, flags, **how))
        return self._started[-1]

    def close(self) -> None:
        with ThreadPoolExecutor() as side:
            list(side.map(Server.close, self._started))
        self._side.shutdown()
        close_all(self.daemons)

    def registered(self) -> list[str]:
        """The encoders that the engine's daemon knows, this node's first."""
        return [each["url"] for each in as_json(self.daemons[0], "encoders")["encoders"]]

    def active(self, encoder: Encoder) -> int:
        """The requests that an encoder serves, as the engine's daemon knows."""
        found = as_json(self.daemons[0], "encoders")["encoders"]
        return sum(each["active"] for each in found if each["url"] == encoder.url)

    def ask(self, pictures: int) -> list[Future]:
        """Ask for new pictures over HTTP, CALLERS at one time."""
        self.asked += pictures
        urls = [self._new.url() for _ in range(pictures)]
        chat = self.server.chat
        return [self._side.submit(chat, shown(url), CALLER, max_tokens=1) for url in urls]

    def are_right(self, asked: Sequence[Future]) -> None:
        """Every request is answered."""
        for each in asked:
            status, body = each.result(HANG_S)
            assert status == 200, f"{body}\n{self.server.text()[-3000:]}"

    def shares(self, encoders: Sequence[Encoder], pictures: int) -> list[int]:
        """How many of new pictures each of the encoders has served.

        CALLERS at one time are at the encoders together, so that no share follows their speed.
        """
        before = [each.served() for each in encoders]
        even = [CALLERS * TOKENS / len(encoders)] * len(encoders)
        for _ in range(0, pictures, CALLERS):
            for encoder in encoders:
                encoder.gate.shut()
            asked = self.ask(CALLERS)
            eventually(lambda: self._sent(encoders) == even)
            for encoder in encoders:
                encoder.gate.open()
            self.are_right(asked)
        return [each.served() - was for each, was in zip(encoders, before, strict=True)]

    def _sent(self, encoders: Sequence[Encoder]) -> list[float]:
        """The tokens of the pictures that the engine has sent to each and has no answer for."""
        found = self.server.all_metrics()
        name = 'encoder_active_tokens{{encoder="{}"}}'
        return [found.get(name.format(each.url), 0) for each in encoders]


@pytest.fixture
def cluster(version: str, engines: Engines, tmp_path: Path, new: Pictures) -> Iterator[Cluster]:
    cluster = Cluster(version, engines, tmp_path, new)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def test_encoders_start_and_are_killed_while_pictures_are_asked_for(
    cluster: Cluster, plain_server: PlainServer, new: Pictures
) -> None:
    """No setting changes, every request is answered, and the engine itself encodes nothing."""
    compared = [new.url() for _ in range(3)]
    encoders = [cluster.encoder(0)]
    for server in (cluster.server, encoders[0].server):
        server.wait_ready()
    while not encoders[0].served():
        cluster.are_right(cluster.ask(1))
    before = preprocessed(cluster.server), encoded(cluster.server)

    def serve_evenly(pictures: int) -> None:
        eventually(lambda: set(cluster.registered()) == {each.url for each in encoders})
        shares = cluster.shares(encoders, pictures)
        assert shares == [pictures / len(encoders)] * len(encoders)
        content = shown(compared.pop())
        status, body = cluster.server.chat(content, CALLER)
        assert status == 200
        assert answer(body) == answer(plain_server.chat(content))

    def kill(encoder: Encoder) -> None:
        encoder.gate.shut()
        asked = cluster.ask(24)
        eventually(encoder.gate.here)
        eventually(lambda: cluster.active(encoder) > 0, "its load is known")
        encoder.server.kill()
        cluster.are_right(asked)

    encoders += [cluster.encoder(1), cluster.encoder(1)]
    while cluster.asked < 44 or not all(each.served() for each in encoders):
        cluster.are_right(cluster.ask(2))
    serve_evenly(60)
    while len(encoders) > 1:
        kill(encoders.pop(0))
        serve_evenly(24)
    assert cluster.asked >= 200
    assert (preprocessed(cluster.server), encoded(cluster.server)) == before
