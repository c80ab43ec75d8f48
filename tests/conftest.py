from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from ecd_client import Client
from support.daemon import Daemon, close_all, cool
from support.limits import RUN_LIMIT_S, EndLimit, RunLimit, TestLimits
from support.processes import mark

LONGEST = (
    *("tests/e2e", "tests/cluster", "tests/e2e/models"),
    *("tests/gpu/test_device_pool.py", "tests/gpu/test_dma.py"),
    *("tests/campaign", "tests/fuzz", "tests/integration/test_install.py"),
    *("tests/integration/test_disk.py", "tests/integration/test_kill.py"),
    *("tests/integration/test_client.py", "tests/simulation"),
)
ALONE = ("tests/simulation",)
"""Directories of which each test is a scope. Campaigns are not: their limits are for one alone."""

mark()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-limit", type=float, default=RUN_LIMIT_S, help="seconds for all tests")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    run_limit_s = config.getoption("--run-limit")
    config.pluginmanager.register(TestLimits())
    config.pluginmanager.register(EndLimit() if is_worker else RunLimit(run_limit_s))


settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "bugs",
    settings.get_profile("patient"),
    phases=set(Phase) - {Phase.shrink, Phase.explain},
)
settings.load_profile("patient")  # a machine that stands still for a moment is no failure


def place(nodeid: str) -> str:
    """A test's directory, if it is one of LONGEST, else its file."""
    file = nodeid.partition("::")[0]
    directory = file.rpartition("/")[0]
    return directory if directory in LONGEST else file


def scope(nodeid: str) -> str:
    """The scope of a test: all tests of one scope share addresses or engines, and a worker."""
    return nodeid if place(nodeid) in ALONE else place(nodeid)


class Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (*LONGEST, place(item.nodeid)).index(place(item.nodeid)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sums of what tests have counted (`record_property`), in whichever process."""
    counted: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call":
                for what, count in report.user_properties:
                    assert isinstance(count, int)
                    counted[what] += count
    if counted:
        terminalreporter.section("counted")
        terminalreporter.line(", ".join(f"{count:,} {what}" for what, count in counted.items()))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    config.option.loadscopereorder = False  # what takes longest comes first
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def warm_daemons() -> Iterator[None]:
    yield
    cool()


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Daemons that end with the test."""
    daemons: list[Daemon] = []

    def make(pool: str = "64MiB", **settings: str) -> Daemon:
        daemons.append(Daemon(tmp_path, pool, **settings))
        return daemons[-1]

    yield make
    close_all(daemons)
    assert not any(daemon.shm.exists() for daemon in daemons)


@pytest.fixture(scope="module")
def unstarted_daemon(tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """The file's `shared_daemon` before its start: a file that needs settings overrides this."""
    return Daemon(tmp_path_factory.mktemp("shared"), "64MiB")


@pytest.fixture(scope="module")
def shared_daemon(unstarted_daemon: Daemon) -> Iterator[Daemon]:
    """One daemon for all tests of a file that neither end, stop nor configure it."""
    yield unstarted_daemon.start()
    unstarted_daemon.close()
    assert not unstarted_daemon.shm.exists()


@pytest.fixture
def unused_daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The daemon of the file, for one test.

    Before and after it nobody uses the daemon, and nothing has leaked.
    """
    shared_daemon.check_unused()
    yield shared_daemon
    shared_daemon.check_unused()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon().start()


@pytest.fixture
def client(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client whose namespace is named after the test."""
    with Client(daemon.address, namespace=request.node.name) as client:
        yield client
