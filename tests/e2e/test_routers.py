"""Routers before real engines: encoders, prefill and decode in several arrangements.

They send on metadata in place of media, by the rules of each. vLLM's example proxy and vllm-router
run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.gates import Gate
from e2e.routers import ROUTERS, Replay, VllmRouter
from e2e.servers import Server, api_server, proxy
from e2e.shared import EXACT, POOL, Engines, Pictures, PlainServer
from e2e.test_reuse import CALM, MIDDLEWARE, READY, answer
from support.daemon import Daemon
from support.squeeze import being_written
from support.waiting import HANG_S, eventually

pytestmark = pytest.mark.timeout(600)
WORDS = [{"type": "text", "text": "what is what?"}]
ENTRY_BYTES = Pictures.EMBEDDINGS * 128 * 4


class Row:
    """Two that encode, two that prefill, decode or both, and one that consumes what a proxy sends.

    One of each two has the middleware.
    """

    def __init__(self, start: Callable[..., Server], kv: Path, daemon: Daemon) -> None:
        self.daemon = daemon
        self.steps = Gate(kv.with_name("steps"))
        """Of the first worker."""
        self.encoders = [start("ec_producer", flags) for flags in (MIDDLEWARE, [])]
        roles = (("ec_both", MIDDLEWARE), ("ec_consumer", []))
        gated = {"STEP_GATE": str(self.steps.path)}
        self.workers = [
            start(role, flags, kv, environ)
            for (role, flags), environ in zip(roles, (gated, {}), strict=True)
        ]
        self.consumer = start("ec_consumer", ecd_load_timeout_s=6.0)
        self.plain: PlainServer
        self.proxy: Server

    def anew(self, pool: str = POOL) -> None:
        self.daemon.pool = pool
        self.daemon.close()
        self.daemon.start()
        self.await_clients()

    def await_clients(self) -> None:
        """Each engine has two sessions, and each middleware one."""
        engines = len([*self.encoders, *self.workers, self.consumer])
        self.daemon.wait_for_clients(2 * engines + 2)

    def encoded(self) -> float:
        """How many pictures the workers have encoded themselves."""
        return sum(worker.metrics().get("misses", 0) for worker in self.workers)

    def is_right(self, content: list[dict], body: dict) -> None:
        """Its first tokens are the plain engine's."""
        expected = answer(self.plain.chat(content))
        assert answer(body)[: len(expected)] == expected

    def check(self, content: list[dict]) -> None:
        """The answer through the proxy is the plain engine's, and the consumer goes on."""
        status, body = self.proxy.chat(content)
        assert status == 200, f"{body}\n{self.consumer.text()[-3000:]}"
        assert answer(body) == answer(self.plain.chat(content))
        assert answer(self.consumer.chat(WORDS)[1]) == answer(self.plain.chat(WORDS))


@pytest.fixture(scope="module")
def running(
    version: str, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Row]:
    directory = tmp_path_factory.mktemp("servers")
    daemon = Daemon(directory, POOL).start()
    servers: list[Server] = []

    def start(
        role: str,
        flags: Sequence[str] = (),
        kv: Path | None = None,
        environ: dict[str, str] | None = None,
        **extra: object,
    ) -> Server:
        log, model = directory / f"{role}-{len(servers)}.log", engines.model(version)
        extra = {"ecd_address": daemon.address, "ecd_load_timeout_s": 10 * HANG_S, **extra}
        how = {"counting": True, "environ": {**CALM, **(environ or {})}, "kv": kv}
        servers.append(api_server(version, log, model, role, [*flags, *EXACT], **how, **extra))
        return servers[-1]

    try:
        row = Row(start, directory / "kv", daemon)
        for server in servers:
            server.wait_ready()
        for server in (row.encoders[0], row.workers[0]):
            eventually(lambda server=server: READY in server.text())
        row.await_clients()
        row.proxy = proxy(directory / "proxy.log", row.encoders[1:], [row.consumer])
        servers.append(row.proxy)
        row.proxy.wait_ready()
        yield row
    finally:
        with ThreadPoolExecutor() as side:
            list(side.map(Server.close, servers))
        daemon.close()


@pytest.fixture
def row(running: Row, plain_server: PlainServer) -> Row:
    running.plain = plain_server
    return running


@pytest.fixture
def fresh(new: Pictures) -> Callable[[int], list[dict]]:
    """A question about so many new pictures."""

    def fresh(count: int) -> list[dict]:
        shown = [{"type": "image_url", "image_url": {"url": new.url()}} for _ in range(count)]
        return [*shown, {"type": "text", "text": "what is in this picture?"}]

    return fresh


@pytest.fixture
def requests(fresh: Callable[[int], list[dict]]) -> list[list[dict]]:
    """One new picture, three of which one stands there twice, and words alone."""
    three = fresh(3)
    return [fresh(1), [*three[:3], *three[:1], *three[3:]], WORDS]


@pytest.fixture
def started() -> Iterator[list[Server]]:
    """Routers of a test, which end with it."""
    routers: list[Server] = []
    yield routers
    for each in routers:
        each.close()


def metadata_of(name: str) -> list[dict]:
    item = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 16, 24]}, "uuid": name}
    return [item, {"type": "text", "text": "what is in this picture?"}]


def test_metadata_travels_in_place_of_the_media(
    row: Row, fresh: Callable[[int], list[dict]]
) -> None:
    before, saves = row.consumer.metrics(), row.encoders[1].metrics().get("saves", 0)
    row.check(fresh(1))
    row.check(fresh(3))
    twice = fresh(1)
    row.check(twice)
    row.check(twice)
    counted = row.consumer.metrics()
    assert counted.get("misses", 0) == before.get("misses", 0), "the consumer has encoded nothing"
    assert counted["loads"] - before.get("loads", 0) == 5
    assert row.encoders[1].metrics()["saves"] >= saves + 5
    assert "Rewrote 3 media item(s)" in row.proxy.text()


def test_metadata_of_what_nobody_has_ends_no_engine(
    row: Row, fresh: Callable[[int], list[dict]]
) -> None:
    status, body = row.consumer.chat(metadata_of("nobody"))
    assert status == 500, body
    assert "nobody has stored it" in row.consumer.text()
    row.check(fresh(1))


def test_what_is_lost_between_encoder_and_consumer_is_encoded_again(
    row: Row, fresh: Callable[[int], list[dict]]
) -> None:
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


def test_a_pool_too_small_for_what_is_asked(row: Row, fresh: Callable[[int], list[dict]]) -> None:
    row.anew("1MiB")
    try:
        for left_bytes in (ENTRY_BYTES - 4096, 2 * ENTRY_BYTES):
            with being_written(row.daemon.address, (1 << 20) - left_bytes):
                row.check(fresh(1))
                row.check(fresh(3))
            row.daemon.evict_all()
    finally:
        row.anew()


def test_a_counter_is_nobodys_name_whatever_media_settings_make_of_it(
    version: str,
    engines: Engines,
    make_daemon: Callable[..., Daemon],
    plain_server: PlainServer,
    fresh: Callable[[int], list[dict]],
    started: list[Server],
    tmp_path: Path,
) -> None:
    """The server's own --media-io-kwargs have vLLM hash its counter, for plain requests too.

    That two engines count alike is test_identity's.
    """
    media = '{"image": {"rgba_background_color": [0, 0, 0]}}'
    flags = ["--mm-processor-cache-gb", "0", "--no-enable-prefix-caching"]
    flags += ["--media-io-kwargs", media, *EXACT]
    daemon, model = make_daemon().start(), engines.model(version)
    extra = {"ecd_address": daemon.address}
    started.append(api_server(version, tmp_path / "log", model, "ec_both", flags, **extra))
    [server] = started
    server.wait_ready()
    daemon.wait_for_clients(2)
    for _ in range(2):
        shown = fresh(1)
        assert answer(server.chat(shown)[1]) == answer(plain_server.chat(shown))
    assert "nothing is shared" in server.text()
    assert daemon.status().counters.puts == 0


@pytest.mark.parametrize("shape", ["1E+1PD", "2E+1PD", "1E+1P+1D"])
@pytest.mark.parametrize("name", ROUTERS)
def test_by_its_rules_a_router_gets_right_answers_and_loses_no_key(
    row: Row, name: str, shape: str, requests: list[list[dict]]
) -> None:
    prefill, decode = row.workers
    encoders = row.encoders[: int(shape[0])]
    replay = Replay(ROUTERS[name], encoders, decode, prefill if "1D" in shape else None)
    before = row.encoded()
    with ThreadPoolExecutor() as side:
        answers = list(side.map(replay.chat, requests))
    for content, served in zip(requests, answers, strict=True):
        assert served.status == 200, f"{served.body}\n{decode.text()[-3000:]}"
        row.is_right(content, served.body)
        said = {name for params in served.replies for name in params}
        pictures = {part["image_url"]["url"] for part in content if "image_url" in part}
        assert served.merged.keys() == said
        assert len(said) == len(pictures)
        assert all(each["metadata"] for each in served.merged.values())
    assert row.encoded() == before


def test_vllms_example_proxy_deals_pictures_to_two_encoders(
    row: Row, started: list[Server], tmp_path: Path, requests: list[list[dict]]
) -> None:
    prefill, decode = row.workers
    before = row.encoded()
    started.append(proxy(tmp_path / "log", row.encoders, [decode], [prefill]))
    started[0].wait_ready()
    for content in requests:
        status, body = started[0].chat(content)
        assert status == 200, f"{body}\n{started[0].text()[-3000:]}"
        row.is_right(content, body)
    assert row.encoded() == before
    assert "Rewrote 4 media item(s)" in started[0].text()
    assert "External Cache Hit" in decode.text(), "the prompt's KV came from prefill"


def test_vllm_router_with_encoders_as_its_prefill_side(
    row: Row, started: list[Server], tmp_path: Path, requests: list[list[dict]]
) -> None:
    flags = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "power_of_two"]
    for encoder in row.encoders:
        flags += ["--prefill", encoder.url]
    for worker in row.workers:
        flags += ["--decode", worker.url]
    before = row.encoded()
    started.append(VllmRouter(tmp_path / "log", *flags).wait_ready())
    for content in requests:
        status, body = started[0].chat(content)
        assert status == 200, f"{body}\n{started[0].text()[-3000:]}"
        row.is_right(content, body)
    assert row.encoded() == before


def test_vllm_router_loses_no_request_of_an_engine_that_is_killed(
    row: Row,
    started: list[Server],
    tmp_path: Path,
    requests: list[list[dict]],
    fresh: Callable[[int], list[dict]],
) -> None:
    """The last test: it ends an engine."""
    urls = [worker.url for worker in row.workers]
    # A dead engine has least to do, and gets each of five tries until it is left out.
    flags = ["--cb-failure-threshold", "3", "--policy", "power_of_two", "--worker-urls", *urls]
    started.append(VllmRouter(tmp_path / "log", *flags).wait_ready())
    for content in requests:
        row.is_right(content, started[0].chat(content)[1])
    asked = [fresh(1) for _ in range(6)]
    dying, running = row.workers[0], "vllm:num_requests_running"
    row.steps.shut()

    def has_some() -> bool:
        row.steps.let()
        return dying.sample(running) >= 2

    with ThreadPoolExecutor(len(asked)) as side:
        answers = [side.submit(started[0].chat, content, max_tokens=800) for content in asked]
        eventually(has_some, "some are with the one that dies")
        # Between two steps no prompt's KV is half written: vLLM's example connector takes a
        # directory of KV for a whole prompt's, and half a one ends the engine that reads it.
        eventually(lambda: row.steps.here() == 1)
        dying.kill()
    for content, future in zip(asked, answers, strict=True):
        status, body = future.result()
        assert status == 200, f"{body}\n{started[0].text()[-3000:]}"
        row.is_right(content, body)
