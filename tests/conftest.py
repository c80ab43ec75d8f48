from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecd_client import Client
from support.daemon import Daemon


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Daemons that end with the test."""
    daemons: list[Daemon] = []

    def make(pool: str = "64MiB", **settings: str) -> Daemon:
        daemons.append(Daemon(tmp_path, pool, **settings))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.close()
        assert not daemon.shm.exists()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon().start()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.address) as client:
        yield client
