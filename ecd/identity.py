"""The names by which a daemon is known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeIdentity:
    """One life of a daemon on one node; `node` is its host:port for peers, empty without any."""

    name: str
    incarnation: str
    daemon: str  # with its version
    node: str = ""
