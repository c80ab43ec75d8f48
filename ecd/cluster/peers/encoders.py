"""Encoders that engines have registered at this node and at others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from ecd.base.clock import Clock
from ecd.cluster.directory.directory import Directory
from ecd.cluster.peers.admission import is_within
from ecd.cluster.peers.peer import PeerUnavailable
from ecd.cluster.peers.peers import Peers
from ecd.settings.config import Config
from ecd_proto.contract import shown
from ecd_proto.encoders import RegisteredEncoder, is_loopback

logger = logging.getLogger(__name__)

KNOWN_S = 0.5
"""How long all engines of this node get one answer of the others."""
MAX_TOLD = 64
"""Encoders that are not called and that the log names, until the settings are read anew."""


class Encoders:
    """Asks for the encoders of nodes that `peers` or the directory names, on links to them.

    A node that a request names is not asked: it would be sent pictures, and the servers' key.
    """

    def __init__(
        self, node: str, config: Config, peers: Peers, directory: Directory, clock: Clock
    ) -> None:
        self.own: Callable[[], Sequence[RegisteredEncoder]] = lambda: ()
        """The encoders of this node."""
        self._node, self._peers, self._directory, self._clock = node, peers, directory, clock
        self._told: set[str] = set()
        self._asking: asyncio.Future[list[RegisteredEncoder]] | None = None
        self._known_until_s = 0.0
        self.reload(config)

    def reload(self, config: Config) -> None:
        self._configured, self._networks = config.peers, config.hint_networks
        self._told.clear()

    def told(self) -> list[RegisteredEncoder]:
        """Those of this node that others can reach: none that listens on loopback alone."""
        host = _host(self._node)
        return [e for e in self.own() if e.host == host or not is_loopback(e.host)]

    async def elsewhere(self) -> list[RegisteredEncoder]:
        """Those of other nodes, KNOWN_S ago at most; of a node that does not answer none."""
        now_s = self._clock.now_s()
        if self._asking is None or (self._asking.done() and now_s >= self._known_until_s):
            self._asking = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> list[RegisteredEncoder]:
        nodes = {*self._configured, *await self._directory.encoding()} - {self._node}
        found = await asyncio.gather(*map(self._of, sorted(nodes)))
        self._known_until_s = self._clock.now_s() + KNOWN_S
        return [each for of_node in found for each in of_node]

    async def _of(self, node: str) -> list[RegisteredEncoder]:
        try:
            found = await (await self._peers.link(node)).encoders()
        except PeerUnavailable:  # the peer's row says why
            return []
        return [replace(each, node=node) for each in found if self._is_allowed(node, each)]

    def _is_allowed(self, node: str, encoder: RegisteredEncoder) -> bool:
        """Whether it is on its node's host, or in a network that hints may lead into."""
        host = encoder.host
        if host == _host(node) or (is_within(host, self._networks) and not is_loopback(host)):
            return True
        if encoder.url not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(encoder.url)
            logger.warning(
                "the encoder %s of node %s is not called, as it is on another host: allow its "
                "network with ECD_HINT_NETWORKS, by IPv4 addresses",
                shown(encoder.url),
                node,
            )
        return False


def _host(node: str) -> str:
    return node.rpartition(":")[0].lower()
