"""The names by which a daemon is known."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeIdentity:
    """One incarnation of a daemon on one node; `node` is its host:port for peers, or empty."""

    name: str
    incarnation: str
    daemon: str  # with its version
    node: str = ""

    @property
    def holder(self) -> str:
        """The node's name for routers: without a host:port for peers, its host and name."""
        return self.node or f"{socket.gethostname()}/{self.name}"
