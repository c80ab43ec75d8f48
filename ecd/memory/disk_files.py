"""The files of the disk tier: found at the start, published, removed for room, erased on request.

One thread changes names, in the order of the decisions: a file that is removed does not come back.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Sequence

from ecd.core.shelf import Shelf, Shelved
from ecd.core.types import Content, Key, Selection
from ecd.live import LiveCache
from ecd.memory.disk_dir import DiskDir, new_name
from ecd.memory.disk_format import CorruptFile, Found, file_name
from ecd.memory.disk_limits import DiskCounters, ReadTime
from ecd.memory.threads import Threads
from ecd_proto.contract import size_text

logger = logging.getLogger(__name__)

FOUND_AT_A_TIME = 256
"""Headers read between two looks at the event loop, at the start."""
REMOVED_AT_A_TIME = 64
"""Files removed for room in one turn of the event loop."""
REMOVAL_S, REMOVAL_EACH_S = 10.0, 0.01
"""How long an erasure waits for files to be removed: a constant, and as much for each."""
PROGRESS_S = 5.0


class DiskFiles:
    """Which entries have a file; one per daemon, on its event loop."""

    def __init__(self, live: LiveCache, directory: DiskDir, nbytes: int) -> None:
        self.directory, self.shelf = directory, Shelf(nbytes)
        self.counters, self.read_time = DiskCounters(), ReadTime()
        self._live = live
        self._clerk = Threads(1, "ecd-disk-files")
        self._erasures: list[Selection] | None = []  # since the start; None: all files are known

    def close(self) -> None:
        self._clerk.close()

    # -- the start -----------------------------------------------------------------------------

    async def find(self) -> None:
        """Take over the files of earlier daemons, and remove those that are none of theirs."""
        started_s = said_s = time.monotonic()
        try:
            names = await self._clerk.do(self.directory.names)
        except OSError as error:
            logger.warning("what lies in %s cannot be listed: %s", self.directory.path, error)
            names = []
        pace = self._live.turns.pace()
        for start in range(0, len(names), FOUND_AT_A_TIME):
            some = names[start : start + FOUND_AT_A_TIME]
            found, failures = await self._clerk.do(functools.partial(self._look_at, some))
            self.counters.failures.update(failures)
            await pace.each(self._take_over, found)
            if time.monotonic() - said_s > PROGRESS_S:
                said_s = time.monotonic()
                logger.info("%d of %d files on disk are known", start + len(some), len(names))
        self._erasures = None
        await self.make_room(0)  # the tier may have been larger
        logger.info(
            "%d entries, %s, on disk in %s; found in %.1f s",
            *(len(self.shelf), size_text(self.shelf.used_bytes), self.directory.path),
            time.monotonic() - started_s,
        )

    def _look_at(self, names: Sequence[str]) -> tuple[list[Found], Counter[str]]:
        """Read headers, and remove files without a right one; also counts failures. Blocking."""
        found: list[Found] = []
        failures: Counter[str] = Counter()
        for name in names:
            try:
                found.append(self.directory.read_header(name))
            except CorruptFile as error:
                failures["corrupt"] += 1
                logger.warning("%s is removed: %s", self.directory.path / name, error)
                failures["remove"] += self._remove_all([name])
            except OSError as error:
                failures["read"] += 1
                logger.warning("%s cannot be read: %s", self.directory.path / name, error)
        return found, failures

    def _take_over(self, found: Found) -> None:
        key, content = found.header.key, found.header.content
        if self.shelf.get(key) is None:
            shelved = self._add(key, content, found.file_bytes, found.age_s)
            now_s = self._live.now_s()
            if any(_is_selected(shelved, erased, now_s) for erased in self._erasures or ()):
                self.remove(shelved)

    # -- changes -------------------------------------------------------------------------------

    async def make_room(self, file_bytes: int) -> None:
        """Remove, in turns, what is worth least, until so many bytes more have room."""
        while self._remove_some(file_bytes):
            await self._live.turns.next()

    def _remove_some(self, file_bytes: int) -> bool:
        """Remove some files for room. False: there is room."""
        victims = self.shelf.make_room(file_bytes, REMOVED_AT_A_TIME)
        if victims:
            self.counters.evictions += len(victims)
            self._remove_names([file_name(each.key) for each in victims])
        return bool(victims)

    async def publish(self, key: Key, content: Content, file_bytes: int) -> None:
        """Let a written entry be found, at once, after `make_room`. Raises OSError."""
        self._remove_some(file_bytes)  # another write may have taken the room
        shelved = self._add(key, content, file_bytes)
        shelved.is_ready = False
        try:
            await self._clerk.do(lambda: self.directory.publish(file_name(key)))
            shelved.is_ready = True
        except OSError:
            self.shelf.remove(shelved)
            raise

    async def discard(self, key: Key) -> None:
        """Remove a written file that is not to be published."""
        await self._remove_names([new_name(file_name(key))])

    def remove(self, shelved: Shelved) -> None:
        """Take an entry off the shelf, and remove its file."""
        self.shelf.remove(shelved)
        self._remove_names([file_name(shelved.key)])

    async def erase(self, selection: Selection, dry_run: bool) -> tuple[int, int, int]:
        """Erase the selected: entries, their bytes, and files that could not be removed.

        What is being read is not stored. Files that are not known yet are erased when they are.
        """
        if self._erasures is not None and not dry_run:
            self._erasures.append(selection)
        pace, now_s = self._live.turns.pace(), self._live.now_s()
        named = None if selection.key is None else self.shelf.get(selection.key)
        every = list(self.shelf) if selection.key is None else [named] if named else []
        names: list[str] = []
        nbytes = failed = 0
        for shelved in every:
            await pace.step()
            if _is_selected(shelved, selection, now_s):
                names.append(file_name(shelved.key))
                nbytes += shelved.nbytes
                if not dry_run:
                    shelved.is_erased = True
                    self.shelf.remove(shelved)
        if names and not dry_run:
            removal = self._remove_names(names)
            await asyncio.wait((removal,), timeout=REMOVAL_S + REMOVAL_EACH_S * len(names))
            failed = removal.result() if removal.done() else len(names)
        return len(names), nbytes, failed

    # -- steps ---------------------------------------------------------------------------------

    def _add(self, key: Key, content: Content, file_bytes: int, age_s: float = 0.0) -> Shelved:
        cost_s = self._live.cache.cost_s(key, content)
        saved_s = cost_s - self.read_time.seconds(content.nbytes)
        about = content.nbytes, file_bytes, cost_s, saved_s
        return self.shelf.add(key, *about, self._live.now_s(), age_s)

    def _remove_names(self, names: Sequence[str]) -> asyncio.Future[int]:
        def removed(done: asyncio.Future[int]) -> None:
            self.counters.failures["remove"] += done.result()

        removal = self._clerk.do(lambda: self._remove_all(names))
        removal.add_done_callback(removed)
        return removal

    def _remove_all(self, names: Sequence[str]) -> int:
        """Remove files; how many could not be. Blocking."""
        failed = 0
        for name in names:
            try:
                self.directory.remove(name)
            except OSError as error:
                failed += 1
                logger.error("%s cannot be removed: %s", self.directory.path / name, error)
        return failed


def _is_selected(shelved: Shelved, selection: Selection, now_s: float) -> bool:
    return (
        selection.key in (None, shelved.key)
        and selection.namespace in (None, shelved.key.namespace)
        and now_s - shelved.used_s >= selection.idle_s
        and now_s - shelved.created_s >= selection.age_s
    )
