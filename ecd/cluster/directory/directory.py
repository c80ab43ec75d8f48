"""Directories: which nodes hold a key. Their answers are advice: the peer decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ecd.base.clock import Clock
from ecd.core.model.types import Key
from ecd_proto.contract import Hint

MAX_ERROR_CHARS = 500
"""Characters of another's error message that are kept and shown."""
MAX_ONCE_LISTED = 4096
"""Nodes of the past that are remembered; with more, only those that are listed now."""


class Candidate(NamedTuple):
    """A node that may hold a key; `load` counts the leases of other nodes there, of late.

    `metadata` is the entry's, if it is known and has at most TOLD_METADATA_BYTES.
    """

    hint: Hint
    zone: str = ""
    load: int = 0
    metadata: bytes = b""


class OtherMaker(NamedTuple):
    """A node, and its incarnation, that makes a key."""

    node: Candidate
    incarnation: str


@dataclass
class DirectoryState:
    """A directory's state, for operators."""

    kind: str
    up: bool = True
    last_error: str = ""
    lookups: int = 0
    errors: int = 0
    skipped: int = 0  # lookups that were not made, as it had failed a moment ago
    unpublished: int = 0
    lag_s: float = 0.0
    nodes: int = 0  # living ones that it lists; 0: it lists none
    listed: Collection[str] = frozenset()  # some of them
    once_listed: Collection[str] = frozenset()  # at some time; nodes of older daemons never are

    def lists(self, nodes: int, listed: Collection[str]) -> None:
        self.nodes, self.listed = nodes, listed
        forgets = len(self.once_listed) > MAX_ONCE_LISTED
        self.once_listed = frozenset(listed).union(() if forgets else self.once_listed)

    @property
    def living(self) -> Collection[str] | None:
        """All living nodes of the cluster; None if the directory does not list all of them."""
        return self.listed if self.up and 0 < self.nodes == len(self.listed) else None

    def has_left(self, node: str) -> bool:
        """Whether a node that was listed once is no longer."""
        is_away = self.living is not None and node not in self.living
        return is_away and node in self.once_listed

    def failed(self, error: object) -> None:
        self.errors += 1
        self.last_error = str(error)[:MAX_ERROR_CHARS]


Found = Mapping[Key, Sequence[Candidate]]


class Directory(Protocol):
    """Finds which nodes hold a key. No call raises: a directory that is down finds nothing."""

    state: DirectoryState

    @property
    def is_told(self) -> bool:
        """Whether other nodes can know of every published change."""

    async def find(self, keys: Sequence[Key], all_within_s: float | None = None) -> Found | None:
        """The nodes that may hold these keys, within a bounded time; None: it may answer soon.

        With `all_within_s` every node that is heard so soon, else at least one for each key.
        """

    async def knows(self, node: str) -> bool:
        """Whether a living node of the cluster has this host:port; answers as soon as `find`."""

    async def encoding(self) -> Collection[str]:
        """Nodes that may have encoders; answers as soon as `find`."""

    async def begin_making(self, keys: Mapping[Key, str]) -> Mapping[Key, OtherMaker]:
        """Note that this node makes these keys; return those that others make already.

        Each key comes with the incarnation whose note is void, as it was tried ("": none).
        """

    def publish(self, changes: Mapping[Key, bool]) -> None:
        """Publish, in the background, which keys are stored here (True) or evicted."""

    async def run(self) -> None:
        """Do the work in the background, until cancelled."""

    async def close(self) -> None:
        """Publish that this node no longer holds anything."""

    def reload(self, nodes: Sequence[str]) -> None:
        """Take over the list of other nodes in the settings."""


class NoDirectory:
    """The directory of a cluster without one: only hints lead to other nodes."""

    is_told = True

    def __init__(self) -> None:
        self.state = DirectoryState("none")

    async def find(self, keys: Sequence[Key], all_within_s: float | None = None) -> Found:
        return {}

    async def knows(self, node: str) -> bool:
        return False

    async def encoding(self) -> Collection[str]:
        return ()

    async def begin_making(self, keys: Mapping[Key, str]) -> Mapping[Key, OtherMaker]:
        return {}

    def publish(self, changes: Mapping[Key, bool]) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass

    def reload(self, nodes: Sequence[str]) -> None:
        pass


Ask = Callable[[str, Sequence[Key]], Awaitable[Sequence[Candidate | None]]]
"""Asks one node for its place of each key. Raises nothing: a node that is away has none."""


class StaticDirectory(NoDirectory):
    """A fixed list of nodes, all asked at the same time."""

    def __init__(self, nodes: Sequence[str], ask: Ask, clock: Clock) -> None:
        self.state = DirectoryState("static")
        self._nodes, self._ask, self._clock = nodes, ask, clock

    def reload(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes

    async def find(self, keys: Sequence[Key], all_within_s: float | None = None) -> Found:
        """Ask all nodes, until every key is found somewhere or every node has answered."""
        wants_all = all_within_s is not None
        until_s = self._clock.now_s() + (all_within_s or 0.0)
        self.state.lookups += len(keys)
        found: dict[Key, list[Candidate]] = {}
        asked = [asyncio.ensure_future(self._ask(node, keys)) for node in self._nodes]
        try:
            for_whom = set(asked)
            while for_whom and (wants_all or len(found) < len(keys)):
                left_s = max(0.0, until_s - self._clock.now_s()) if wants_all else None
                done, for_whom = await asyncio.wait(
                    for_whom, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    self.state.failed(f"{len(for_whom)} nodes did not answer in time")
                    break
                for answer in done:
                    for key, candidate in zip(keys, answer.result(), strict=False):
                        if candidate is not None:
                            found.setdefault(key, []).append(candidate)
        finally:
            for answer in asked:
                answer.cancel()
        return found
