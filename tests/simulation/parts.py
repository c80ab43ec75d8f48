"""What a simulated daemon has in place of files, and the watch on its fetcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ecd.core.model.board import Uses
from ecd.core.model.types import Key
from ecd.live.flights import Flight, Outcome, Source
from ecd.memory.leftovers import LeftoverEntry
from ecd_proto.v1 import cache_pb2 as pb


class Files:
    """The files of clients' sessions: the locks that their processes hold."""

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.locked_keys: set[Key] = set()
        self.made_elsewhere: set[Key] = set()

    def pool_files(self) -> list[pb.PoolFile]:
        return []

    def index_file(self, session: int) -> None:
        return None

    def lock_path(self) -> str:
        return ""

    def attach_path(self) -> str:
        return ""

    def is_session_locked(self, offset: int) -> bool:
        return offset in self.locked

    def is_key_locked(self, key: Key) -> bool:
        return key in self.locked_keys

    def note_elsewhere(self, key: Key, *, is_made: bool) -> None:
        (self.made_elsewhere.add if is_made else self.made_elsewhere.discard)(key)

    def dma_word(self, session: int) -> int:
        return 0

    def note_namespace(self, session: int, namespace: str) -> None:
        pass

    def pinned_bytes(self, session: int) -> int:
        return 0


class Leftovers:
    """What the last daemon left: its entries, as its index had them."""

    def __init__(self, entries: Sequence[LeftoverEntry]) -> None:
        self._entries = list(entries)

    def entries(self) -> tuple[list[LeftoverEntry], int]:
        return self._entries, 0

    def uses(self) -> Uses:
        return Uses()

    def remove(self) -> None: ...


class Index:
    """The part of the shared index that a recovery writes."""

    def note_unseen(self, count: int) -> None: ...

    def note_taken(self) -> None: ...

    def begin_counting(self, uses: Uses) -> None: ...


class Watched:
    """A source of flights, which counts how often it is asked for one key at a time."""

    def __init__(self, source: Source) -> None:
        self._source, self.is_local = source, source.is_local
        self.bringing: dict[Any, int] = {}
        self.wrong: str = ""

    def may_have(self, key: Any) -> bool:
        return self._source.may_have(key)

    async def bring(self, flight: Flight) -> Outcome:
        key = flight.key
        self.bringing[key] = self.bringing.get(key, 0) + 1
        if self.bringing[key] > 1:
            self.wrong = f"{key.mm_hash} is fetched {self.bringing[key]} times at once"
        try:
            return await self._source.bring(flight)
        finally:
            self.bringing[key] -= 1
