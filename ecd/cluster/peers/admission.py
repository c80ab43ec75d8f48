"""Admission of hints: only some of the nodes that requests name are asked.

Any client can send hints. They lead to nodes that the configuration or the directory
names, and to others only within `hint_networks`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network
from typing import NamedTuple

from ecd.cluster.directory.directory import Directory
from ecd.cluster.peers.peers import Peers
from ecd.settings.config import Config
from ecd_proto.contract import NODE_PATTERN, Hint

logger = logging.getLogger(__name__)

MAX_TOLD = 64
"""Ignored nodes that the log names, until the settings are read anew."""


class Admitted(NamedTuple):
    """A node to ask; `hinted` if only requests name it."""

    hint: Hint
    hinted: bool = False


class _Standing(Enum):
    NAMED = auto()
    HINTED = auto()  # its network is allowed
    UNKNOWN = auto()  # the directory may know it
    NOBODY = auto()


class Admission:
    """Decides which hints are followed; one per daemon, on its event loop."""

    def __init__(self, node: str, config: Config, peers: Peers, directory: Directory) -> None:
        self.ignored = 0
        """Hints not followed, because no setting or record allows their node."""
        self._node, self._peers, self._directory = node, peers, directory
        self._told: set[str] = set()
        self.reload(config)

    def reload(self, config: Config) -> None:
        self._configured = frozenset(config.peers)
        self._networks = config.hint_networks
        self._allowed = lru_cache(maxsize=1024)(self._standing_of_address)
        self._told.clear()

    async def admit(self, hints: Sequence[Hint]) -> list[Admitted]:
        """The hints that may be followed, in order, within the time of a lookup."""
        standings = [self._standing(hint.node) for hint in hints]
        unknown = {
            hint.node
            for hint, standing in zip(hints, standings, strict=True)
            if standing is _Standing.UNKNOWN
        }
        answers = await asyncio.gather(*map(self._directory.knows, unknown)) if unknown else ()
        known = {node for node, is_known in zip(unknown, answers, strict=True) if is_known}
        admitted = []
        for hint, standing in zip(hints, standings, strict=True):
            if standing is _Standing.NAMED or hint.node in known:
                admitted.append(Admitted(hint))
            elif standing is _Standing.HINTED:
                admitted.append(Admitted(hint, hinted=True))
            elif hint.node != self._node:
                self._ignore(hint.node, standing)
        return admitted

    def _standing(self, node: str) -> _Standing:
        if node == self._node:
            return _Standing.NOBODY
        if node in self._configured or self._peers.is_connected(node):
            return _Standing.NAMED
        return self._allowed(node)

    def _standing_of_address(self, node: str) -> _Standing:
        host, _, port = node.rpartition(":")
        if not (re.fullmatch(NODE_PATTERN, node) and 0 < int(port) < 65536):
            return _Standing.NOBODY
        return _Standing.HINTED if is_within(host, self._networks) else _Standing.UNKNOWN

    def _ignore(self, node: str, standing: _Standing) -> None:
        self.ignored += 1
        if standing is _Standing.UNKNOWN and node not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(node)
            logger.warning(
                "a request names %s, which is not asked: set ECD_PEERS to name it, or "
                "ECD_HINT_NETWORKS to allow its network",
                node,
                extra={"peer": node},
            )


def is_within(host: str, networks: Sequence[IPv4Network]) -> bool:
    """Whether the host is an IPv4 address in one of the networks."""
    try:
        address = IPv4Address(host)
    except ValueError:
        return False
    return any(address in network for network in networks)
