"""The encode hop between vLLM's own servers: an engine that prefills asks two that encode.

One encoder shares the engine's daemon. The other one has a daemon of its own, of which the engine's
daemon knows by hints alone.
"""

from __future__ import annotations

import http.client
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.engines import installed
from e2e.servers import Server, api_server, describes, picture_url
from e2e.test_reuse import KEY, MIDDLEWARE, OTHER, READY, answer, encoded, preprocessed, shown
from support.daemon import Daemon, close_all, eventually

pytestmark = pytest.mark.timeout(900)
CALLER = {"Authorization": f"Bearer {KEY}"}
SLOW_S = 4.0
numbers = itertools.count(5000)


@pytest.fixture(scope="session")
def version() -> str:
    """vLLM 0.28 takes no metadata as JSON."""
    return installed("0.32.0")


class Row:
    """Two encoders, an engine that sends them what is missing, and one without ecd."""

    def __init__(
        self, daemons: Sequence[Daemon], start: Callable[..., Server], directory: Path
    ) -> None:
        self._slowed_by = [directory / "slow-0", directory / "slow-1"]
        self.encoders = []
        for file, daemon in zip(self._slowed_by, daemons, strict=True):
            file.write_text("0")
            slowed = {"SLOWED_BY": str(file)}
            self.encoders.append(
                start("ec_producer", [*MIDDLEWARE, "--api-key", KEY], slowed, daemon)
            )
        urls = f" {self.encoders[0].url}/, {self.encoders[1].url},"
        self.server = start(
            *(
                "ec_both",
                [*OTHER, *MIDDLEWARE, "--api-key", KEY],
                {"ECD_ENCODERS": urls},
                daemons[1],
            )
        )
        self.plain = start(None)

    def slow(self, *seconds: float) -> None:
        for file, each in zip(self._slowed_by, seconds, strict=True):
            file.write_text(str(each))

    def right(self, *contents: list[dict], headers: dict[str, str] | None = None) -> None:
        """The answers to requests that are made at one time are the plain engine's."""
        headers = {**CALLER, **(headers or {})}
        with ThreadPoolExecutor(4) as side:
            answers = list(side.map(lambda each: self.server.chat(each, headers), contents))
        for content, (status, body) in zip(contents, answers, strict=True):
            assert status == 200, f"{body}\n{self.server.text()[-3000:]}"
            assert answer(body) == answer(self.plain.chat(content)[1])

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

    def seen(self) -> tuple[int, float]:
        """The media that were preprocessed and the items that were encoded by the server itself."""
        return preprocessed(self.server), encoded(self.server)


@pytest.fixture(scope="module")
def row(
    version: str,
    model_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Row]:
    directory = tmp_path_factory.mktemp("servers")
    started: list[Server] = []

    def start(
        role: str | None,
        flags: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        daemon: Daemon | None = None,
    ) -> Server:
        log = directory / f"{len(started)}-{role}.log"
        # A picture may take long on a busy machine.
        told = {"ecd_load_timeout_s": 40}
        extra = {} if daemon is None else {"ecd_address": daemon.address, **told}
        started.append(
            api_server(version, log, model_of("qwen2_5_vl"), role, flags, True, environ, **extra)
        )
        return started[-1]

    daemons = []
    for number in range(2):
        settings = {
            "ECD_PEER_ADDRESS": f"127.0.87.{number + 1}:9465",
            "ECD_PEER_TOKEN": "a secret of the test",
            "ECD_HINT_NETWORKS": "127.0.0.0/8",
            "ECD_ENGINE_PORTS": f"{18900 + 16 * number}-{18915 + 16 * number}",
        }
        place = tmp_path_factory.mktemp("daemon")
        daemons.append(Daemon(place, **settings).start())
    try:
        row = Row(daemons, start, directory)
        for server in started:
            server.wait_ready()
        for server in (*row.encoders, row.server):
            eventually(lambda server=server: READY in server.text(), 30)
        for daemon, sessions in zip(daemons, (3, 6), strict=True):
            daemon.wait_for_clients(sessions)
        for encoder in row.encoders:  # a daemon's first put goes by calls, and may be seen late
            is_told = lambda e=encoder: describes(e.chat(shown(*new(1)), CALLER)[1])  # noqa: E731
            eventually(is_told, 30)
        yield row
    finally:
        with ThreadPoolExecutor() as side:
            list(side.map(Server.close, started))
        close_all(daemons)


def new(count: int) -> list[str]:
    return [picture_url(next(numbers)) for _ in range(count)]


def test_what_is_missing_is_encoded_elsewhere_and_what_is_held_is_not(row: Row) -> None:
    before, [held, *missing] = row.seen(), new(3)
    row.right(shown(held))
    row.right([*shown(held)[:1], *shown(missing[0])[:1], *shown(missing[1])])
    twice = [*shown(held)[:1], *shown(held, "are these the same?")]
    row.right(twice)
    assert sum(row.calls("encoded")) == 3
    assert all(row.calls("encoded")), "on this node and on the other"
    assert row.seen() == before


def test_the_encoder_with_the_fewest_active_tokens_is_asked(row: Row) -> None:
    before, was = row.seen(), row.calls("encoded")
    row.slow(SLOW_S, 0)
    row.right(*map(shown, new(24)))
    slowed, other = (now - then for now, then in zip(row.calls("encoded"), was, strict=True))
    assert slowed + other == 24
    assert other >= 2 * slowed > 0
    assert row.seen() == before


def test_a_picture_that_several_ask_for_at_one_time_is_encoded_once(row: Row) -> None:
    before, was, [url] = row.seen(), sum(map(preprocessed, row.encoders)), new(1)
    row.slow(2.0, 2.0)
    row.right(*(shown(url, f"what is this? {number}") for number in range(4)))
    assert sum(map(preprocessed, row.encoders)) == was + 1
    assert row.seen() == before


def test_what_another_engine_asks_for_is_asked_of_nobody(row: Row) -> None:
    was, before = row.calls("encoded"), row.seen()[0]
    row.right(shown(*new(1)), headers={"X-Ecd-Hop": "1"})
    assert row.calls("encoded") == was
    assert row.seen()[0] == before + 1


def test_a_client_that_goes_ends_the_calls_for_it(row: Row) -> None:
    before = row.seen()
    row.slow(SLOW_S, SLOW_S)
    message = {"role": "user", "content": shown(*new(1))}
    host, _, port = row.server.url.removeprefix("http://").partition(":")
    caller = http.client.HTTPConnection(host, int(port))
    body = json.dumps({"model": "tiny", "messages": [message]})
    headers = {"Content-Type": "application/json", **CALLER}
    caller.request("POST", "/v1/chat/completions", body, headers)
    eventually(lambda: sum(row.active()) > 0)
    caller.close()
    eventually(lambda: sum(row.active()) == 0)
    assert sum(row.calls("cancelled")) == 1
    assert row.seen() == before
    row.slow(0, 0)
    row.right(shown(*new(1)))


def test_encoders_that_end_cost_no_request(row: Row) -> None:
    before, failed = row.seen(), row.calls("failed")
    row.slow(SLOW_S, SLOW_S)
    with ThreadPoolExecutor(1) as side:
        asked = side.submit(row.right, *map(shown, new(2)))
        eventually(lambda: all(row.active()))
        row.encoders[0].kill()
        asked.result()
    assert row.calls("failed") == [failed[0] + 1, failed[1]]
    assert row.seen() == before
    row.encoders[1].kill()
    for url in new(2):
        row.right(shown(url))
    assert row.seen() == (before[0] + 2, before[1] + 2)
