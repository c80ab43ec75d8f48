from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import VERSIONS, Engine, installed, kept_warm
from e2e.gates import Gate
from e2e.shared import POOL, Engines, Pictures, Plain, PlainServer, anew, runs, settle
from support.daemon import Daemon


@pytest.fixture(scope="session", params=VERSIONS[:1])
def version(request: pytest.FixtureRequest) -> str:
    """The newest vLLM, or all in tests of the CONTRACT.

    Where one is not installed, its tests are skipped, or fail if it is required.
    """
    return installed(request.param)


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    with kept_warm("e2e.pauses"):
        yield


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The daemon of the shared engines. Tests start, kill and restart what listens there."""
    daemon = Daemon(tmp_path_factory.mktemp("home"), POOL)
    yield daemon
    try:
        if runs(daemon):
            daemon.check_unused()
    finally:
        daemon.close()


@pytest.fixture(scope="session")
def engines(
    warm: None, home: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"), home)
    yield engines
    engines.close()


@pytest.fixture
def daemon(home: Daemon, engines: Engines) -> Iterator[Daemon]:
    """The daemon of the shared engines, serving and empty; after the test no lease is left."""
    if not runs(home) or home.pool != POOL or home.command != Daemon.command:
        home.command = Daemon.command
        anew(home, engines)
    home.evict_all()
    yield home
    engines.check_alive()
    if runs(home):
        settle(home, engines)


@pytest.fixture
def shared(version: str, daemon: Daemon, engines: Engines) -> Callable[..., Engine]:
    """A shared engine of the version, by its role and settings."""

    def shared(role: str | None = None, which: int = 0, **how: Any) -> Engine:
        return engines.shared(version, role, which, **how)

    return shared


@pytest.fixture
def start_engine(version: str, engines: Engines) -> Iterator[Callable[..., Engine]]:
    """Engines of the test's own, which end with it."""
    started: list[Engine] = []

    def start(role: str | None = None, **how: Any) -> Engine:
        started.append(engines.start(version, role, **how))
        return started[-1]

    yield start
    with ThreadPoolExecutor() as side:
        list(side.map(Engine.close, started))


@pytest.fixture
def plain(version: str, engines: Engines) -> Plain:
    return Plain(engines, version)


@pytest.fixture(scope="session")
def plain_server(
    version: str, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlainServer]:
    server = PlainServer(engines, version, tmp_path_factory.mktemp("plain"))
    yield server
    server.close()


@pytest.fixture
def model_of(version: str, engines: Engines) -> Callable[[str], Path]:
    return lambda kind: engines.model(version, kind)


@pytest.fixture
def new(request: pytest.FixtureRequest) -> Pictures:
    return Pictures(request.node.nodeid)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate for forwards of the vision tower, which is shut."""
    gate = Gate(tmp_path / "gate")
    gate.shut()
    yield gate
    gate.open()
