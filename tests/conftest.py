from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from ecd_client import Client
from support.daemon import Daemon


class Scheduling(LoadScopeScheduling):
    """For several workers: what shares addresses or engines stays with one of them."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        directory = file.rpartition("/")[0]
        return directory if directory in ("tests/cluster", "tests/e2e") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    config.option.loadscopereorder = False  # the two that take longest come first
    return Scheduling(config, log)


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
