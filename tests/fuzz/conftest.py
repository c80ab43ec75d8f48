from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.fuzz import MESSAGES

NODE, PORTS = "127.0.81.1:9465", "28500-28515"
TOKEN = "a secret of the test"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(300 + MESSAGES / 50))


@pytest.fixture
def make_node(make_daemon: Callable[..., Daemon]) -> Callable[..., Daemon]:
    """A daemon with other nodes around it: all on loopback, whatever messages name."""

    def make(pool: str = "64MiB", **settings: str) -> Daemon:
        clustered = {
            "ECD_PEER_ADDRESS": NODE,
            "ECD_ENGINE_PORTS": PORTS,
            "ECD_HINT_NETWORKS": "127.0.81.0/24",
            "ECD_FETCH_TIMEOUT_S": "0.5",
            "ECD_WARM_RESTART": "false",
        }
        return make_daemon(pool, **{**clustered, **settings})

    return make
