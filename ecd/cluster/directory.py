"""Where to ask which nodes hold a key. What a directory says is advice: the peer decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ecd.core.types import Key
from ecd_proto.contract import Hint


class Candidate(NamedTuple):
    """A node that may hold a key. `load`: leases that other nodes held there, when it last said."""

    hint: Hint
    zone: str = ""
    load: int = 0


@dataclass
class DirectoryState:
    """How a directory is doing, for operators."""

    kind: str
    up: bool = True
    last_error: str = ""
    lookups: int = 0
    errors: int = 0
    unpublished: int = 0
    lag_s: float = 0.0


Found = Mapping[Key, Sequence[Candidate]]


class Directory(Protocol):
    """No call raises: a directory that is down knows of nothing."""

    state: DirectoryState

    async def find(self, keys: Sequence[Key]) -> Found:
        """Who may hold these keys, in one batch, within a bounded time."""

    async def knows(self, node: str) -> bool:
        """Whether a living node of the cluster is reached at this host:port, as soon as `find`."""

    def publish(self, changes: Mapping[Key, bool]) -> None:
        """These keys are stored here (True) or not any more; told to others in the background."""

    async def run(self) -> None:
        """Whatever is to be done in the background, until cancelled."""

    async def close(self) -> None:
        """This node holds nothing any more."""


class NoDirectory:
    """Only hints lead to other nodes."""

    def __init__(self) -> None:
        self.state = DirectoryState("none")

    async def find(self, keys: Sequence[Key]) -> Found:
        return {}

    async def knows(self, node: str) -> bool:
        return False

    def publish(self, changes: Mapping[Key, bool]) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


Ask = Callable[[str, Sequence[Key]], Awaitable[Sequence[Hint | None]]]
"""Asks one node where it has each of the keys. Raises nothing: a node that is away has none."""


class StaticDirectory(NoDirectory):
    """A fixed list of nodes, all asked at one time."""

    def __init__(self, nodes: Sequence[str], ask: Ask) -> None:
        self.state = DirectoryState("static")
        self.nodes = nodes
        self._ask = ask

    async def find(self, keys: Sequence[Key]) -> Found:
        """As soon as every key is found somewhere, or every node has answered."""
        self.state.lookups += len(keys)
        found: dict[Key, list[Candidate]] = {}
        asked = [asyncio.ensure_future(self._ask(node, keys)) for node in self.nodes]
        try:
            for_whom = set(asked)
            while for_whom and len(found) < len(keys):
                done, for_whom = await asyncio.wait(for_whom, return_when=asyncio.FIRST_COMPLETED)
                for answer in done:
                    for key, hint in zip(keys, answer.result(), strict=False):
                        if hint is not None:
                            found.setdefault(key, []).append(Candidate(hint))
        finally:
            for answer in asked:
                answer.cancel()
        return found
