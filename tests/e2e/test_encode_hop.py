"""The encode hop between vLLM's own servers: an engine that prefills asks two that encode.

One encoder shares the engine's daemon. The other one has a daemon of its own, of which the engine's
daemon knows by hints alone.
"""

from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    OTHER,
    READY,
    answer,
    encoded,
    preprocessed,
    shown,
)
from support.daemon import Daemon, close_all
from support.pairs import PATIENT
from support.waiting import HANG_S, eventually

pytestmark = [pytest.mark.timeout(600), AND_NEXT]
WORDS = [{"type": "text", "text": "what is what?"}]


class Row:
    """Two encoders, each with a gate before its preprocessing, and an engine that asks them."""

    def __init__(
        self, daemons: Sequence[Daemon], start: Callable[..., Server], directory: Path
    ) -> None:
        self.daemons = daemons
        self.gates = [Gate(directory / f"gate-{number}") for number in range(2)]
        key = [*MIDDLEWARE, "--api-key", KEY]
        self.encoders = [
            start("ec_producer", key, {"GATE": str(gate.path)}, daemon)
            for gate, daemon in zip(self.gates, daemons, strict=True)
        ]
        urls = {"ECD_ENCODERS": f" {self.encoders[0].url}/, {self.encoders[1].url},"}
        self.server = start("ec_both", [*OTHER, *key], urls, daemons[1])
        self.plain: PlainServer
        self.side = ThreadPoolExecutor(8)

    def ask(self, content: list[dict], headers: dict[str, str] | None = None) -> Future:
        return self.side.submit(self.server.chat, content, {**CALLER, **(headers or {})})

    def is_right(self, content: list[dict], asked: Future) -> None:
        """The answer is the plain engine's."""
        status, body = asked.result(HANG_S)
        assert status == 200, f"{body}\n{self.server.text()[-3000:]}"
        assert answer(body) == answer(self.plain.chat(content))

    def right(self, *contents: list[dict], headers: dict[str, str] | None = None) -> None:
        """The answers to requests that are made at one time are the plain engine's."""
        asked = [self.ask(content, headers) for content in contents]
        for content, each in zip(contents, asked, strict=True):
            self.is_right(content, each)

    def came(self) -> int:
        """The requests that ecd's middleware in the server has had."""
        return self.server.text().count("ecd has a request /v1/chat/completions")

    def calls(self, outcome: str) -> list[float]:
        """The calls of each encoder that have ended so."""
        counted = self.server.all_metrics()
        name = 'encoder_calls_total{{encoder="{}",outcome="{}"}}'
        return [counted.get(name.format(each.url, outcome), 0) for each in self.encoders]

    def active(self) -> list[float]:
        """The tokens that each encoder has."""
        counted = self.server.all_metrics()
        name = 'encoder_active_tokens{{encoder="{}"}}'
        return [counted.get(name.format(each.url), 0) for each in self.encoders]

    def counted(self) -> Counter[str]:
        """The lookups that the daemons have counted."""
        counted = [daemon.status().counters for daemon in self.daemons]
        names = "hits", "misses", "handed_over"
        return Counter({name: sum(getattr(each, name) for each in counted) for name in names})

    def seen(self) -> tuple[int, float]:
        """The media that were preprocessed and the items that were encoded by the server itself."""
        return preprocessed(self.server), encoded(self.server)


@pytest.fixture(scope="module")
def running(
    version: str, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Row]:
    directory = tmp_path_factory.mktemp("servers")
    started: list[Server] = []

    def start(role: str, flags: Sequence[str], environ: dict[str, str], daemon: Daemon) -> Server:
        log = directory / f"{len(started)}-{role}.log"
        extra = {"ecd_address": daemon.address, "ecd_load_timeout_s": 10 * HANG_S}
        how = {"counting": True, "environ": {**CALM, **environ}, **extra}
        flags = [*flags, *EXACT]
        started.append(api_server(version, log, engines.model(version), role, flags, **how))
        return started[-1]

    daemons = []
    for number in range(2):
        settings = {
            "ECD_PEER_ADDRESS": f"127.0.87.{number + 1}:9465",
            "ECD_PEER_TOKEN": "a secret of the test",
            "ECD_HINT_NETWORKS": "127.0.0.0/8",
            "ECD_ENGINE_PORTS": f"{18900 + 16 * number}-{18915 + 16 * number}",
            "ECD_FETCH_TIMEOUT_S": f"{HANG_S}",
        }
        daemons.append(Daemon(tmp_path_factory.mktemp("daemon"), **settings))
        daemons[-1].command = PATIENT
        daemons[-1].start()
    row = None
    try:
        row = Row(daemons, start, directory)
        for server in started:
            server.wait_ready()
            eventually(lambda server=server: READY in server.text())
        for daemon, sessions in zip(daemons, (3, 6), strict=True):
            daemon.wait_for_clients(sessions)
        yield row
    finally:
        with ThreadPoolExecutor() as side:
            list(side.map(Server.close, started))
        if row is not None:
            row.side.shutdown()
        close_all(daemons)


@pytest.fixture
def row(running: Row, plain_server: PlainServer) -> Iterator[Row]:
    running.plain = plain_server
    yield running
    for gate in running.gates:
        gate.open()


def test_what_is_missing_is_encoded_elsewhere_and_what_is_held_is_not(
    row: Row, new: Pictures
) -> None:
    before, was, counted = row.seen(), row.calls("encoded"), row.counted()
    held, *missing = (new.url() for _ in range(3))
    row.right(shown(held))
    row.right([*shown(held)[:1], *shown(missing[0])[:1], *shown(missing[1])])
    twice = [*shown(held)[:1], *shown(held, "are these the same?")]
    row.right(twice)
    calls = [now - then for now, then in zip(row.calls("encoded"), was, strict=True)]
    assert sum(calls) == 3
    assert all(calls), "on this node and on the other"
    assert row.seen() == before
    new_ones = Counter(misses=3, hits=3, handed_over=3)
    assert row.counted() - counted == new_ones, "encoded there, loaded here, and then held by vLLM"


def test_the_encoder_with_the_fewest_active_tokens_is_asked(row: Row, new: Pictures) -> None:
    before, was = row.seen(), row.calls("encoded")
    row.gates[0].shut()
    waits = []
    while not row.active()[0]:
        content = shown(new.url())
        waits.append((content, row.ask(content)))
        eventually(lambda: row.active()[0] or waits[-1][1].done(), "it is sent to either")
    for _ in range(4):
        row.right(shown(new.url()))
    row.gates[0].open()
    for content, asked in waits:
        row.is_right(content, asked)
    calls = [now - then for now, then in zip(row.calls("encoded"), was, strict=True)]
    assert calls == [1, len(waits) - 1 + 4]
    assert row.seen() == before


def test_a_picture_that_several_ask_for_at_one_time_is_encoded_once(
    row: Row, new: Pictures
) -> None:
    before, was, url = row.seen(), sum(map(preprocessed, row.encoders)), new.url()
    for gate in row.gates:
        gate.shut()
    contents = [shown(url, f"what is this? {number}") for number in range(4)]
    came = row.came()
    answers = [(content, row.ask(content)) for content in contents]
    eventually(lambda: row.came() == came + len(contents))
    row.right(WORDS)
    eventually(lambda: sum(row.active()) > 0)
    for gate in row.gates:
        gate.open()
    for content, each in answers:
        row.is_right(content, each)
    assert sum(map(preprocessed, row.encoders)) == was + 1
    assert row.seen() == before


def test_what_another_engine_asks_for_is_asked_of_nobody(row: Row, new: Pictures) -> None:
    was, before = row.calls("encoded"), row.seen()[0]
    row.right(shown(new.url()), headers={"X-Ecd-Hop": "1"})
    assert row.calls("encoded") == was
    assert row.seen()[0] == before + 1


def test_a_client_that_goes_ends_the_calls_for_it(row: Row, new: Pictures) -> None:
    before, was = row.seen(), sum(row.calls("cancelled"))
    for gate in row.gates:
        gate.shut()
    message = {"role": "user", "content": shown(new.url())}
    host, _, port = row.server.url.removeprefix("http://").partition(":")
    caller = http.client.HTTPConnection(host, int(port))
    body = json.dumps({"model": "tiny", "messages": [message]})
    headers = {"Content-Type": "application/json", **CALLER}
    caller.request("POST", "/v1/chat/completions", body, headers)
    eventually(lambda: sum(row.active()) > 0)
    caller.close()
    eventually(lambda: sum(row.active()) == 0)
    assert sum(row.calls("cancelled")) == was + 1
    assert row.seen() == before
    for gate in row.gates:
        gate.open()
    row.right(shown(new.url()))


def test_encoders_that_end_cost_no_request(row: Row, new: Pictures) -> None:
    """The last test: it ends both."""
    before, failed = row.seen(), row.calls("failed")
    for gate in row.gates:
        gate.shut()
    asked = [(content, row.ask(content)) for content in (shown(new.url()), shown(new.url()))]
    eventually(lambda: all(row.active()))
    row.encoders[0].kill()
    row.gates[1].open()
    for content, each in asked:
        row.is_right(content, each)
    assert row.calls("failed") == [failed[0] + 1, failed[1]]
    assert row.seen() == before
    row.encoders[1].kill()
    for _ in range(2):
        row.right(shown(new.url()))
    assert row.seen() == (before[0] + 2, before[1] + 2)
