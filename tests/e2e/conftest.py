from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.engines import EAGER, VERSIONS, Engine, installed, make_model
from support.daemon import Daemon


@pytest.fixture(scope="session", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Each vLLM that is installed; a missing one skips the tests, or fails them if required."""
    return installed(request.param)


@pytest.fixture(scope="session")
def model_of(version: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(version, kind, tmp_path_factory.mktemp(kind) / kind)
        return made[kind]

    return model


@pytest.fixture(scope="module")
def shared_daemon(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One address for all engines of a module. Tests start, kill and restart what listens there."""
    daemon = Daemon(tmp_path_factory.mktemp("daemon"))
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def start_engine(
    version: str,
    model_of: Callable[[str], Path],
    shared_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Engine]]:
    """Engines of this module's version and daemon, ended with the module."""
    number = itertools.count()
    engines: list[Engine] = []

    def start(
        role: str | None = None,
        kind: str = "qwen2_5_vl",
        model: Path | None = None,
        extra: dict | None = None,
        environ: dict[str, str] | None = None,
        encoder_less: bool = False,
        daemon: Daemon = shared_daemon,
        kv: str | None = None,
        **engine: object,
    ) -> Engine:
        setup: dict = {"model": str(model or model_of(kind)), "engine": engine}
        if role is not None:
            setup["role"] = role
            setup["extra"] = {"ecd_address": daemon.address, **(extra or {})}
        if role == "ec_producer" and version == "0.28.0":
            # Which cannot make a prefix cache for an engine without KV cache.
            setup["engine"] = {"enable_prefix_caching": False, **engine}
        setup["encoder_less"] = encoder_less
        if kv is not None:
            setup["kv"] = kv
        log = tmp_path_factory.mktemp("engine") / f"{role}-{next(number)}.log"
        engines.append(Engine(version, log, setup, daemon.prefix, **EAGER, **(environ or {})))
        return engines[-1]

    yield start
    with ThreadPoolExecutor() as side:
        list(side.map(Engine.close, engines))


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., Engine]) -> Engine:
    """An engine without ecd, whose tokens the others' are compared with."""
    return start_engine()
