"""How long vLLM's engines wait because of ecd, and how long its middleware has a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pytest

from e2e.engines import VERSIONS, installed, kept_warm
from e2e.gates import Gate
from e2e.servers import api_server, noise_url
from e2e.shared import Engines, Pictures, await_sessions, constants, tokens
from e2e.test_failures import FAIL, IMPATIENT
from e2e.test_one_encode import HASTY
from e2e.test_requests import bare
from e2e.test_reuse import MIDDLEWARE, READY, preprocessed, shown
from ecd_client.vllm.base.settings import ENCODE, LOAD_TIMEOUT_S
from ecd_proto.contract import MAKING_S
from support.daemon import Daemon
from support.waiting import eventually, stopped

pytestmark = pytest.mark.timeout(600)
Figure = Callable[[str, float, str, str], None]
ROUNDS = 11
PICTURES = 20
FORWARD_S = 2.0


@pytest.fixture
def version() -> str:
    return installed(VERSIONS[0])


@pytest.fixture
def engines(daemon: Daemon, tmp_path: Path) -> Iterator[Engines]:
    with kept_warm():
        engines = Engines(tmp_path, daemon)
        yield engines
        engines.close()


@pytest.fixture
def new(request: pytest.FixtureRequest) -> Pictures:
    return Pictures(request.node.nodeid)


def test_the_middleware_has_a_request(
    version: str, engines: Engines, daemon: Daemon, new: Pictures, tmp_path: Path, figure: Figure
) -> None:
    about = {"counting": True, "ecd_address": daemon.address}
    log, model = tmp_path / "log", engines.model(version)
    server = api_server(version, log, model, "ec_both", MIDDLEWARE, **about)
    try:
        server.wait_ready()
        eventually(lambda: READY in server.text())
        daemon.wait_for_clients(3)
        large = shown(noise_url(1))
        assert server.chat(large)[0] == 200
        eventually(lambda: daemon.status().entries == 1)
        seen = preprocessed(server)
        words = [{"type": "text", "text": "what is what?"}]
        for name, content, most in (("words", words, "1"), ("a stored picture", large, "50")):
            for _ in range(ROUNDS):
                assert server.chat(content, max_tokens=1)[0] == 200
            had_ms = median(server.had_for_s()[-ROUNDS:]) * 1e3
            figure(name, had_ms, "ms", f"less than {most}: ten times what it should take")
        assert preprocessed(server) == seen
    finally:
        server.close()


def test_metadata_waits_for_a_daemon(
    version: str, engines: Engines, daemon: Daemon, new: Pictures, figure: Figure
) -> None:
    wait_s = IMPATIENT["ecd_load_timeout_s"]
    how = {"extra": FAIL | IMPATIENT, "enable_mm_embeds": True}
    engine = engines.shared(version, "ec_consumer", **how)
    unknown = engine.generate([bare(new.named())])
    figure("nobody has it", unknown["seconds"], "s", f"less than {wait_s:.0f}: it is known at once")
    daemon.kill()
    await_sessions(engine, None)
    missed = engine.generate([bare(new.named())])
    figure("no daemon", missed["seconds"], "s", f"{wait_s:.0f}, and a little")


def test_a_stopped_engine_is_waited_for(
    version: str, engines: Engines, new: Pictures, tmp_path: Path, figure: Figure
) -> None:
    one, other = (engines.shared(version, "ec_both", which) for which in range(2))
    gate = Gate(tmp_path / "gate")
    gate.shut()
    requests = new.requests(1)
    one.send({"do": "generate", "requests": requests, "gate": str(gate.path)})
    gate.await_seen(here=1)
    with constants(other, **HASTY), stopped(one.pid):
        waited = other.generate(requests)
    gate.open()
    one.receive()
    figure("one stands still", waited["seconds"], "s", f"{MAKING_S}, and a little")


def test_many_pictures_are_new_to_two_engines(
    version: str, engines: Engines, new: Pictures, tmp_path: Path, figure: Figure
) -> None:
    """Both are asked at once, with the patience of the default setting and a slow tower."""
    how = {"extra": {"ecd_load_timeout_s": LOAD_TIMEOUT_S[ENCODE]}}
    pair = [engines.shared(version, "ec_both", which, **how) for which in range(2)]
    gate = Gate(tmp_path / "gate")
    gate.shut()
    requests = new.requests(PICTURES)
    for engine in pair:
        engine.send({"do": "generate", "requests": requests, "gate": str(gate.path)})
    with ThreadPoolExecutor() as side:
        waits = [side.submit(engine.receive) for engine in pair]
        try:
            while not all(each.done() for each in waits):
                here = gate.here()
                time.sleep(FORWARD_S if here else FORWARD_S / 100)
                gate.let(here)
        finally:
            gate.open()
    replies = [each.result() for each in waits]
    assert tokens(replies[0]) == tokens(replies[1])
    encoded = sum(reply["encoded"] for reply in replies)
    figure("encodes", encoded, "pictures", f"{PICTURES}, or one more")
