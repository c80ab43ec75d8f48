"""Routers of others before real engines: encoders, prefill and decode in several arrangements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.engines import installed
from e2e.routers import ROUTERS, Replay, VllmRouter
from e2e.servers import Server, api_server, describes, proxy
from e2e.test_proxy import answer, fresh
from e2e.test_reuse import MIDDLEWARE, READY
from support.daemon import Daemon, eventually

pytestmark = pytest.mark.timeout(900)
WORDS = [{"type": "text", "text": "what is what?"}]


@pytest.fixture(scope="session")
def version() -> str:
    """The server of vLLM 0.28 takes no metadata as JSON."""
    return installed("0.32.0")


class Engines:
    """Two that encode, two that prefill, decode or both, and one that has never heard of ecd.

    One of each two has the middleware.
    """

    def __init__(self, start: Callable[..., Server], kv: Path, daemon: Daemon) -> None:
        extra = {"ecd_address": daemon.address}
        self.kv = kv
        self.encoders = [start("ec_producer", flags, **extra) for flags in (MIDDLEWARE, [])]
        roles = (("ec_both", MIDDLEWARE), ("ec_consumer", []))
        self.workers = [start(role, flags, kv=kv, **extra) for role, flags in roles]
        self.plain = start(None)

    def encoded(self) -> float:
        """How many pictures the workers have encoded themselves."""
        return sum(worker.metrics().get("misses", 0) for worker in self.workers)

    def is_right(self, content: list[dict], body: dict) -> None:
        """Its first tokens are the plain engine's."""
        expected = answer(self.plain.chat(content)[1])
        assert answer(body)[: len(expected)] == expected


@pytest.fixture(scope="module")
def engines(
    version: str,
    model_of: Callable[[str], Path],
    shared_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    logs = tmp_path_factory.mktemp("engines")
    servers: list[Server] = []

    def start(
        role: str | None, flags: Sequence[str] = (), kv: Path | None = None, **extra: object
    ) -> Server:
        log = logs / f"{role}-{len(servers)}.log"
        flags = [*flags, "--dtype", "float32"]  # sums are equal, whatever shares a step
        model = model_of("qwen2_5_vl")
        servers.append(api_server(version, log, model, role, flags, kv=kv, **extra))
        return servers[-1]

    shared_daemon.start()
    try:
        engines = Engines(start, logs / "kv", shared_daemon)
        for server in servers:
            server.wait_ready()
        for server in (engines.encoders[0], engines.workers[0]):
            eventually(lambda server=server: READY in server.text(), 30)
        for encoder in engines.encoders:  # a daemon's first put goes by calls, and may be seen late
            eventually(lambda encoder=encoder: describes(encoder.chat(fresh(1))[1]), 30)
        yield engines
    finally:
        with ThreadPoolExecutor() as side:
            list(side.map(Server.close, servers))


@pytest.fixture
def started() -> Iterator[list[Server]]:
    """Routers of a test, which end with it."""
    routers: list[Server] = []
    yield routers
    for each in routers:
        each.close()


def requests() -> list[list[dict]]:
    """One new picture, three of which one stands there twice, and words alone."""
    three = fresh(3)
    return [fresh(1), [*three[:3], *three[:1], *three[3:]], WORDS]


@pytest.mark.parametrize("shape", ["1E+1PD", "2E+1PD", "1E+1P+1D"])
@pytest.mark.parametrize("name", ROUTERS)
def test_by_its_rules_a_router_gets_right_answers_and_loses_no_key(
    engines: Engines, name: str, shape: str
) -> None:
    prefill, decode = engines.workers
    encoders = engines.encoders[: int(shape[0])]
    replay = Replay(ROUTERS[name], encoders, decode, prefill if "1D" in shape else None)
    before = engines.encoded()
    asked = requests()
    with ThreadPoolExecutor() as side:
        answers = list(side.map(replay.chat, asked))
    described: list[bool] = []
    for content, served in zip(asked, answers, strict=True):
        assert served.status == 200, f"{served.body}\n{decode.text()[-3000:]}"
        engines.is_right(content, served.body)
        said = {name for params in served.replies for name in params}
        pictures = {part["image_url"]["url"] for part in content if "image_url" in part}
        assert served.merged.keys() == said
        assert len(said) == len(pictures)
        described.extend(bool(each["metadata"]) for each in served.merged.values())
    assert sum(described) > len(described) / 2, "an encoder's answer may be ahead of its put"
    assert engines.encoded() == before


def test_vllms_example_proxy_deals_pictures_to_two_encoders(
    engines: Engines, started: list[Server], tmp_path: Path
) -> None:
    prefill, decode = engines.workers
    before = engines.encoded()
    started.append(proxy(tmp_path / "log", engines.encoders, [decode], [prefill]))
    started[0].wait_ready()
    for content in requests():
        status, body = started[0].chat(content)
        assert status == 200, f"{body}\n{started[0].text()[-3000:]}"
        engines.is_right(content, body)
    assert engines.encoded() == before
    assert "Rewrote 4 media item(s)" in started[0].text()
    assert "External Cache Hit" in decode.text(), "the prompt's KV came from prefill"


def test_vllm_router_with_encoders_as_its_prefill_side(
    engines: Engines, started: list[Server], tmp_path: Path
) -> None:
    flags = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "power_of_two"]
    for encoder in engines.encoders:
        flags += ["--prefill", encoder.url]
    for worker in engines.workers:
        flags += ["--decode", worker.url]
    before = engines.encoded()
    started.append(VllmRouter(tmp_path / "log", *flags).wait_ready())
    for content in requests():
        status, body = started[0].chat(content)
        assert status == 200, f"{body}\n{started[0].text()[-3000:]}"
        engines.is_right(content, body)
    assert engines.encoded() == before


def test_vllm_router_loses_no_request_of_an_engine_that_is_killed(
    engines: Engines, started: list[Server], tmp_path: Path
) -> None:
    """The last test: it ends an engine."""
    urls = [worker.url for worker in engines.workers]
    # A dead engine has least to do, and gets each of five tries until it is left out.
    flags = ["--cb-failure-threshold", "3", "--policy", "power_of_two", "--worker-urls", *urls]
    started.append(VllmRouter(tmp_path / "log", *flags).wait_ready())
    for content in requests():
        engines.is_right(content, started[0].chat(content)[1])
    asked = [fresh(1) for _ in range(6)]
    dying, running = engines.workers[0], "vllm:num_requests_running"

    def is_killed() -> bool:
        """vLLM's example connector takes a directory of KV for a whole prompt's.

        One that an engine left half written ends the engine that gets the request next.
        """
        with dying.engine_stopped():
            sizes = [[file.stat().st_size for file in kv.iterdir()] for kv in engines.kv.iterdir()]
            if not all(len(layers) == 2 and layers[0] == layers[1] for layers in sizes):
                return False
            assert dying.sample(running) > 0, "it had answered all of its own"
            dying.kill()
            return True

    with ThreadPoolExecutor(len(asked)) as side:
        answers = [side.submit(started[0].chat, content, max_tokens=800) for content in asked]
        eventually(lambda: dying.sample(running) >= 2, 30, "some are with the one that dies")
        eventually(is_killed, 10, "no prompt is half done")
    for content, future in zip(asked, answers, strict=True):
        status, body = future.result()
        assert status == 200, f"{body}\n{started[0].text()[-3000:]}"
        engines.is_right(content, body)
