"""What the tests share: engines that live through the session, and answers that outlive it."""

from __future__ import annotations

import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from e2e.engines import (
    EAGER,
    HERE,
    NIGHTLY,
    ROOT,
    VERSIONS,
    Engine,
    last_words,
    make_model,
    python_of,
)
from e2e.servers import Server, api_server, picture_url
from support.daemon import Daemon
from support.waiting import HANG_S, eventually

EVERY = [*VERSIONS, NIGHTLY]
CONTRACT = pytest.mark.parametrize("version", EVERY, indirect=True, scope="session")
"""A test of what all versions of vLLM keep to; the others run with the newest one."""
AND_NEXT = pytest.mark.parametrize(
    "version", [VERSIONS[0], NIGHTLY], indirect=True, scope="session"
)
"""A test of the newest vLLM that runs at night with the one without a build for CPUs, too."""
PATIENT = {"ecd_load_timeout_s": 10 * HANG_S}
"""A setting of all engines, unless a test says otherwise: no wait that a test is there for ends."""
CALM = {"worker.worker.SEEN_WITHIN_S": HANG_S}
"""A limit of the connector that a busy machine passes, and its value in the tests' engines."""
MOST = 6
"""Engines that are alive at one time, of those that are shared."""
ANSWERS = ROOT / "build/answers"
POOL = "64MiB"
WORDS: dict = {"text": "what is what?", "images": []}


class Engines:
    """The engines of a session: those that tests share, and those of one test."""

    def __init__(self, directory: Path, home: Daemon) -> None:
        """`home` is the daemon of the engines that are told of no other."""
        self._directory, self._home = directory, home
        self._numbers = count()
        self._models: dict[str, Path] = {}
        self._shared: OrderedDict[str, Engine] = OrderedDict()

    def model(self, version: str, kind: str = "qwen2_5_vl") -> Path:
        """The directory of a tiny model."""
        name = f"{kind}-{version}"
        if name not in self._models:
            self._models[name] = make_model(version, kind, self._directory / name)
        return self._models[name]

    def start(
        self,
        version: str,
        role: str | None = None,
        kind: str = "qwen2_5_vl",
        model: Path | None = None,
        extra: dict | None = None,
        environ: dict[str, str] | None = None,
        encoder_less: bool = False,
        daemon: Daemon | None = None,
        kv: str | None = None,
        **engine: object,
    ) -> Engine:
        """An engine of the caller's own, who closes it."""
        setup: dict = {"model": str(model or self.model(version, kind)), "engine": engine}
        daemon = daemon or self._home
        if role is not None:
            setup |= {"role": role, "constants": CALM}
            setup["extra"] = {"ecd_address": daemon.address, **PATIENT, **(extra or {})}
        if role == "ec_producer" and version == "0.28.0":
            # Which cannot make a prefix cache for an engine without KV cache.
            setup["engine"] = {"enable_prefix_caching": False, **engine}
        setup["encoder_less"] = encoder_less
        if kv is not None:
            setup["kv"] = kv
        log = self._directory / f"{version}-{role}-{next(self._numbers)}.log"
        return Engine(version, log, setup, daemon.prefix, **EAGER, **(environ or {}))

    def shared(self, version: str, role: str | None = None, which: int = 0, **how: Any) -> Engine:
        """The engine of this version, role and settings, or another such one (`which`).

        It is started when it is first asked for, in place of the least recently used one of MOST.
        """
        daemon = how.get("daemon", self._home)
        key = json.dumps([version, role, which, daemon.address, sorted(how.items())], default=str)
        engine = self._shared.pop(key, None)
        if engine is not None and engine.owes:  # a test has failed
            engine.kill()
            engine = None
        if engine is not None and not engine.alive:
            engine.close()  # which says how it ended
        if engine is None:
            while len(self._shared) >= MOST:
                self._shared.popitem(last=False)[1].close()
            engine = self.start(version, role, **how)
        self._shared[key] = engine
        engine.daemon = daemon if role else None
        engine.wait_ready()
        if role and runs(daemon):
            await_sessions(engine, daemon)
        return engine

    def of(self, daemon: Daemon) -> list[Engine]:
        """The shared engines that are alive and use the daemon."""
        return [
            each
            for each in self._shared.values()
            if each.daemon is daemon and each.alive and not each.owes
        ]

    def check_alive(self) -> None:
        for engine in self._shared.values():
            assert engine.alive, f"{engine.log.name} ended:\n{last_words(engine.text())}"

    def close(self) -> None:
        with ThreadPoolExecutor() as side:
            list(side.map(Engine.close, self._shared.values()))


def runs(daemon: Daemon) -> bool:
    return daemon._process is not None and daemon._process.poll() is None


def await_sessions(engine: Engine, daemon: Daemon | None) -> None:
    """Wait until both roles of the engine use this daemon, as it now runs, or none."""
    now = "" if daemon is None else daemon.status().incarnation
    eventually(lambda: engine.do("daemons")["are"] == [now, now], f"{engine.log.name} uses {now}")


def anew(daemon: Daemon, engines: Engines, pool: str = POOL) -> Daemon:
    """Start the daemon again, and empty; returns once its shared engines use it."""
    daemon.close()
    daemon.pool = pool
    daemon.start()
    for engine in engines.of(daemon):
        await_sessions(engine, daemon)
    return daemon


def settle(daemon: Daemon, engines: Engines) -> None:
    """Return once no lease is left: an engine gives its last ones back with a further step."""
    if daemon.status().leases:
        for engine in engines.of(daemon):
            engine.generate([WORDS], max_tokens=1)
    eventually(lambda: not daemon.status().leases, "no lease is left")


def tokens(reply: dict) -> list[list[int]]:
    return [output["tokens"] for output in reply["outputs"]]


@contextlib.contextmanager
def constants(*engines: Engine, **values: float) -> Iterator[None]:
    """These engines have other constants, as `room__module__NAME`, within the block."""
    told = {name.replace("__", "."): value for name, value in values.items()}
    were = [engine.do("set", constants=told) for engine in engines]
    try:
        yield
    finally:
        for engine, before in zip(engines, were, strict=True):
            if not engine.owes and engine.alive:
                engine.do("set", constants=before)


class Pictures:
    """New pictures of one test: the same ones in each run, and no other test has them."""

    SIZE = (336, 224)
    GRID = (1, 16, 24)
    EMBEDDINGS = 96

    def __init__(self, test: str) -> None:
        self._numbers = count(crc32(test.encode()) << 16)

    def image(self, size: tuple[int, int] = SIZE) -> list[int]:
        return [*size, next(self._numbers)]

    def request(self, images: int = 1, text: str = "what is in this picture?") -> dict:
        return {"text": text, "images": [self.image() for _ in range(images)]}

    def requests(self, count: int) -> list[dict]:
        return [self.request() for _ in range(count)]

    def named(self, images: int = 1) -> dict:
        """A request whose client has chosen the names of its pictures."""
        made = self.request(images)
        return {**made, "uuids": [f"picture-{number}" for _, _, number in made["images"]]}

    def redrawn(self, requests: list[dict]) -> list[dict]:
        """The same requests with new pictures, where there were equal ones equal again."""
        new: dict[tuple[int, ...], list[int]] = {}
        for request in requests:
            for width, height, number in request["images"]:
                size = width, height
                new.setdefault((*size, number), self.image(size))
        return [{**r, "images": [new[tuple(image)] for image in r["images"]]} for r in requests]

    def url(self, *, transparent: bool = False) -> str:
        return picture_url(next(self._numbers), transparent=transparent)


@cache
def _about(version: str) -> str:
    """What the answers of an engine without ecd depend on, but for what it is asked."""
    sources = (HERE / name for name in ("tiny_models.py", "engine_process.py", "prompts.py"))
    packages = python_of(version).parents[1] / "before-ecd.txt"
    found = [each.read_text() for each in (*sources, packages)]
    cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    flags = [line for line in cpu.splitlines() if line.startswith(("model name", "flags"))]
    return sha256("\n".join([version, *found, *flags]).encode()).hexdigest()


def _remembered(version: str, asked: object, ask: Callable[[], dict]) -> dict:
    told = json.dumps([_about(version), asked], sort_keys=True, default=str)
    file = ANSWERS / f"{sha256(told.encode()).hexdigest()}.json"
    if not file.exists():
        ANSWERS.mkdir(parents=True, exist_ok=True)
        answer = ask()
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(answer))
        new.rename(file)
    return json.loads(file.read_text())


class Plain:
    """An engine without ecd, whose answers the others' are compared with.

    They are remembered in `build/answers`: the engine starts for those that are not there.
    """

    def __init__(self, engines: Engines, version: str, **how: Any) -> None:
        self._engines, self._version, self._how = engines, version, how

    def generate(self, requests: list[dict], scaled: float = 1.0, **options: object) -> dict:
        """`scaled` is a factor of the vision tower's weights (see `scale` in engine_process.py)."""
        told = [{k: v for k, v in r.items() if k != "ec_transfer_params"} for r in requests]
        asked = [self._how, told, scaled, options]
        return _remembered(self._version, asked, lambda: self._ask(told, scaled, options))

    def _ask(self, requests: list[dict], scaled: float, options: dict) -> dict:
        engine = self._engines.shared(self._version, **self._how)
        with self._weights(engine, scaled):
            return engine.generate(requests, **options)

    @contextlib.contextmanager
    def _weights(self, engine: Engine, scaled: float) -> Iterator[None]:
        if scaled == 1.0:
            yield
            return
        engine.do("scale", factor=scaled, then=["reset_encoder_cache"])
        yield
        engine.do("scale", factor=1 / scaled, then=["reset_encoder_cache"])


TRUST = "--trust-request-mm-kwargs"
EXACT = ["--dtype", "float32"]
"""Sums are equal, whatever shares a step."""
PLAIN = [TRUST, *EXACT]


class PlainServer:
    """vLLM's server without ecd; its answers are remembered as those of Plain."""

    def __init__(self, engines: Engines, version: str, directory: Path) -> None:
        self._engines, self._version, self._log = engines, version, directory / "plain.log"
        self._server: Server | None = None

    def chat(self, content: list[dict], **options: object) -> dict:
        """The body of a chat completion."""
        asked = [*PLAIN, "chat", content, options]
        return _remembered(
            self._version, asked, lambda: self._started().chat(content, **options)[1]
        )

    def stream(self, content: list[dict], **options: object) -> list[str]:
        asked = [*PLAIN, "stream", content, options]
        said = lambda: {"lines": self._started().stream(content, **options)}  # noqa: E731
        return _remembered(self._version, asked, said)["lines"]

    def _started(self) -> Server:
        if self._server is None:
            model = self._engines.model(self._version)
            self._server = api_server(self._version, self._log, model, None, PLAIN)
        return self._server.wait_ready()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
