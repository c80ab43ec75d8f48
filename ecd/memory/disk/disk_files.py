"""The files of the disk tier: found at the start, published, removed for room, erased on request.

One thread changes names, in the order of the decisions: a file that is removed does not come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
from collections import Counter
from collections.abc import Sequence
from math import inf

from ecd.core.disk_catalog import Catalog, OnDisk
from ecd.core.model.types import Content, Key, Selection
from ecd.live.background import within
from ecd.live.live import LiveCache
from ecd.memory.disk.disk_dir import DiskDir, new_name
from ecd.memory.disk.disk_format import CorruptFile, Found, file_name
from ecd.memory.disk.disk_limits import DiskCounters, ReadTime
from ecd.memory.disk.threads import Threads
from ecd_proto.contract import size_text

logger = logging.getLogger(__name__)

FOUND_AT_A_TIME = 256
"""Headers read between two looks at the event loop, at the start."""
REMOVED_AT_A_TIME = 64
"""Files removed for room in one turn of the event loop."""
FROZEN_AT_A_TIME = 64 * FOUND_AT_A_TIME
KNOWN_S = 5.0
"""How long an erasure waits for every file to be known."""
REMOVAL_S, REMOVAL_EACH_S = 10.0, 0.01
"""How long an erasure waits for files to be removed: a constant, and as much for each."""
PROGRESS_S = 5.0
EXPIRY_S = 1.0
"""Pause between two searches for expired files, which are not read meanwhile."""


class DiskFiles:
    """Which entries have a file; one per daemon, on its event loop."""

    def __init__(self, live: LiveCache, directory: DiskDir, nbytes: int) -> None:
        self.directory, self.catalog = directory, Catalog(nbytes)
        self.counters, self.read_time = DiskCounters(), ReadTime(live.clock)
        self._live = live
        self._clerk = Threads(1, "ecd-disk-files")
        self._is_known = asyncio.Event()  # every file
        self._unknown = 0
        self._erasures: list[Selection] = []  # since the start, until every file is known
        self._stuck: set[str] = set()  # names of files that could not be removed

    def close(self) -> None:
        self._clerk.close()

    @property
    def is_idle(self) -> bool:
        """Whether every file is known, and each that was to be removed is."""
        return self._is_known.is_set() and self._clerk.is_idle

    # -- the start -----------------------------------------------------------------------------

    async def find(self) -> None:
        """Take over the files of earlier daemons, and remove foreign ones."""
        started_s = said_s = self._live.clock.now_s()
        try:
            names = await self._clerk.do(self.directory.names)
        except OSError as error:
            logger.warning("what lies in %s cannot be listed: %s", self.directory.path, error)
            names = []
        pace = self._live.turns.pace()
        for start in range(0, len(names), FOUND_AT_A_TIME):
            self._unknown = len(names) - start
            some = names[start : start + FOUND_AT_A_TIME]
            found, failures = await self._clerk.do(functools.partial(self._look_at, some))
            self.counters.failures.update(failures)
            await pace.each(self._take_over, found)
            if self._live.clock.now_s() - said_s > PROGRESS_S:
                said_s = self._live.clock.now_s()
                logger.info("%d of %d files on disk are known", start + len(some), len(names))
            if start % FROZEN_AT_A_TIME == 0:
                gc.freeze()  # or all of it is looked through again and again
        self._unknown, self._erasures = 0, []
        self._is_known.set()
        gc.freeze()
        await self.make_room(0)  # the tier may have been larger
        logger.info(
            "%d entries, %s, on disk in %s; found in %.1f s",
            len(self.catalog),
            size_text(self.catalog.used_bytes),
            self.directory.path,
            self._live.clock.now_s() - started_s,
        )
        await self._compare_with_space()

    async def _compare_with_space(self) -> None:
        """Warn of a tier that its file system has no room for."""
        try:
            free_bytes, mount = await self._clerk.do(self.directory.space)
        except OSError as error:
            logger.warning("the space of %s is not known: %s", self.directory.path, error)
            return
        used_bytes = self.catalog.used_bytes
        if used_bytes + free_bytes < self.catalog.nbytes:
            logger.warning(
                "disk_pool_bytes is %s, and the file system of %s, mounted at %s, has %s free "
                "beside the %s of the tier: writes fail once the disk is full. Free some space, or "
                "lower ECD_DISK_POOL_BYTES below %s",
                size_text(self.catalog.nbytes),
                self.directory.path,
                mount,
                size_text(free_bytes),
                size_text(used_bytes),
                size_text(used_bytes + free_bytes),
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
                failures["remove"] += len(self._remove_all([name]))
            except OSError as error:
                failures["read"] += 1
                logger.warning("%s cannot be read: %s", self.directory.path / name, error)
        return found, failures

    def _take_over(self, found: Found) -> None:
        key, content = found.header.key, found.header.content
        if self.catalog.get(key) is None:
            on_disk = self._add(key, content, found.file_bytes, found.age_s, found.idle_s)
            now_s = self._live.clock.now_s()
            if any(_is_selected(on_disk, erased, now_s) for erased in self._erasures):
                self.remove(on_disk)

    # -- changes -------------------------------------------------------------------------------

    async def make_room(self, file_bytes: int) -> None:
        """Remove, in turns, the least valuable files, until this many bytes have room."""
        while self._remove_some(file_bytes):
            await self._live.turns.next()

    def _remove_some(self, file_bytes: int) -> bool:
        """Remove some files for room. False: there is room already."""
        victims = self.catalog.make_room(file_bytes, REMOVED_AT_A_TIME)
        if victims:
            self.counters.evictions += len(victims)
            self._remove_names([file_name(each.key) for each in victims])
        return not self.catalog.has_room(file_bytes)

    async def publish(self, key: Key, content: Content, file_bytes: int, age_s: float) -> None:
        """Make a written entry findable. Raises OSError; then it has no file."""
        self._stuck.discard(file_name(key))
        on_disk = self._add(key, content, file_bytes, age_s)
        on_disk.is_ready = False
        try:
            await self._clerk.do(lambda: self.directory.publish(file_name(key)))
            on_disk.is_ready = True
        except OSError:
            self.catalog.remove(on_disk)
            await self.discard(key)
            raise

    async def discard(self, key: Key) -> None:
        """Remove a written file that is not to be published."""
        await self._remove_names([new_name(file_name(key))])

    def remove(self, on_disk: OnDisk) -> None:
        """Remove an entry from the catalog, and its file."""
        self.catalog.remove(on_disk)
        self._remove_names([file_name(on_disk.key)])

    async def erase(self, selection: Selection, dry_run: bool) -> tuple[dict[str, int], int]:
        """Erase the selected: the bytes of each by its file's name, and how many files are left.

        What is being read is not stored. Files that are not known yet are waited for; those that
        are not known in time count as not removed, and are when they are found. What could not be
        removed before is tried again.
        """
        unknown = 0
        if not dry_run and not self._is_known.is_set():
            self._erasures.append(selection)
            with contextlib.suppress(asyncio.TimeoutError):
                await within(KNOWN_S, self._is_known.wait())
            unknown = self._unknown
        pace, now_s = self._live.turns.pace(), self._live.clock.now_s()
        named = None if selection.key is None else self.catalog.get(selection.key)
        every = self.catalog if selection.key is None else [named] if named else []
        erased: dict[str, int] = {}
        failed = 0
        for on_disk in every:
            await pace.step()
            if _is_selected(on_disk, selection, now_s):
                erased[file_name(on_disk.key)] = on_disk.nbytes
                if not dry_run:
                    on_disk.is_erased = True
                    self.catalog.remove(on_disk)
        if not dry_run:
            every_name = [*erased, *self._stuck]
            removal = self._remove_names(every_name)
            await asyncio.wait((removal,), timeout=REMOVAL_S + REMOVAL_EACH_S * len(every_name))
            failed = len(self._stuck) if removal.done() else len(every_name)
        return erased, failed + unknown

    # -- time ----------------------------------------------------------------------------------

    async def expire(self) -> None:
        """Remove, in turns, the files of expired entries, until cancelled."""
        while True:
            await self._live.clock.sleep(EXPIRY_S)
            while expired := self.catalog.take_expired(self._live.clock.now_s(), REMOVED_AT_A_TIME):
                self.counters.expired += len(expired)
                self._remove_names([file_name(each.key) for each in expired])
                await self._live.turns.next()

    async def reapply_rules(self) -> None:
        pace = self._live.turns.pace()
        for on_disk in self.catalog:
            await pace.step()
            self.catalog.end_after(on_disk, self._ttl_s(on_disk.key))

    # -- steps ---------------------------------------------------------------------------------

    def _ttl_s(self, key: Key) -> float:
        ttl_s = self._live.cache.retention.rules.ttl_s(key.namespace)
        return inf if ttl_s is None else ttl_s

    def _add(
        self, key: Key, content: Content, file_bytes: int, age_s: float, idle_s: float = 0.0
    ) -> OnDisk:
        cost_s = self._live.cache.views.cost_s(key, content)
        saved_s = cost_s - self.read_time.seconds(content.nbytes)
        return self.catalog.add(
            key,
            content.nbytes,
            file_bytes,
            cost_s,
            saved_s,
            self._live.clock.now_s(),
            age_s,
            idle_s,
            self._ttl_s(key),
        )

    def _remove_names(self, names: Sequence[str]) -> asyncio.Future[list[str]]:
        """Remove files; returns the names of those that could not be removed."""

        def removed(done: asyncio.Future[list[str]]) -> None:
            if done.cancelled():  # with the task that waited, as the daemon stops
                return
            self.counters.failures["remove"] += len(set(done.result()) - self._stuck)
            self._stuck.difference_update(names)
            self._stuck.update(done.result())

        removal = self._clerk.do(lambda: self._remove_all(names))
        removal.add_done_callback(removed)
        return removal

    def _remove_all(self, names: Sequence[str]) -> list[str]:
        """As `_remove_names`. Blocking."""
        failed: list[str] = []
        for name in names:
            try:
                self.directory.remove(name)
            except OSError as error:
                failed.append(name)
                logger.error("%s cannot be removed: %s", self.directory.path / name, error)
        return failed


def _is_selected(on_disk: OnDisk, selection: Selection, now_s: float) -> bool:
    """Whether the entry is selected at a time, after which it may have been used or added."""
    return (
        selection.key in (None, on_disk.key)
        and selection.namespace in (None, on_disk.key.namespace)
        and max(0.0, now_s - on_disk.used_s) >= selection.idle_s
        and max(0.0, now_s - on_disk.created_s) >= selection.age_s
    )
