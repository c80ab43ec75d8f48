"""The trace: every operation on the host pool that decides what is evicted, written down in order.

The first line is a JSON object, the header; each other line is a JSON array, one operation:

    ["take", start, nbytes]      an extent is allocated; `start` counts granules
    ["place", start, nbytes]     the same, at a given start: recovery
    ["cut", start, at]           an extent is cut in two
    ["free", start]
    ["admit", entry, start, key, namespace, nbytes, rows, cost_s, now_s]
    ["cost", entry, cost_s]      what it costs from now on
    ["use", entry, now_s]        a read; of reads without a call, one a look
    ["use", entry, now_s, true]  one that only brought it to the engine for which it was encoded
    ["hold", entry]              the first reader came
    ["let go", entry]            the last reader went
    ["plan", nbytes, entries]    evicted together for an extent of `nbytes`; 0: the coldest, to trim
    ["evict", entry, reason]     each of them, and those of a quota, too old or asked for
    ["hole", records]            so many records are missing here: they came too quickly
    ["end"]                      the daemon ended the trace

Keys are 8 bytes of BLAKE2 over a salt that no file holds, namespaces are numbered as they come, and
times are seconds since the second in which the trace began.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ecd.core.model.block import Block
from ecd.core.model.entry import Entry
from ecd.core.model.types import Extent, PoolLimits
from ecd.core.policy.policy import Policy, Weighing
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Evict, Pool, Scan

logger = logging.getLogger(__name__)

VERSION = 2
MAX_WAITING = 1 << 16
"""Most records queued for the writer's thread; further ones are a hole in the trace."""
WRITTEN_AT_ONCE = 512
"""Records encoded at once: the event loop waits for the interpreter's lock meanwhile."""
PERIOD_S = 0.25
CLOSE_S = 0.5
MAX_NAMESPACES = 1 << 16
"""Namespaces with a number of their own; later ones are all number 0."""

Record = tuple[Any, ...]


class Recorder:
    """Writes records to a file from a thread of its own.

    A write that fails ends the trace, and nothing else. The file is this user's alone.
    """

    def __init__(self, path: Path, now_s: float) -> None:
        """Begin the trace anew. Raises OSError if the file cannot be opened."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.open(path, flags, 0o600)  # which waits for no reader of a FIFO
        os.set_blocking(self._file, True)
        if stat.S_ISREG(os.fstat(self._file).st_mode):
            os.fchmod(self._file, 0o600)
        self.lost = 0
        """Records that are not in the trace."""
        self._path = path
        self._begin_s = math.floor(now_s)  # whole, so that a difference from it is exact
        self._waiting: deque[Record | dict[str, object]] = deque()
        self._missing = 0  # records left out since the last hole was noted
        self._has_failed = False
        self._encode = msgspec.json.Encoder().encode_lines
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="ecd-trace", daemon=True)
        self._thread.start()

    def pool(
        self,
        allocator: tuple[int, int, int],
        policy: Policy,
        policy_name: str,
        fingerprint: Callable[[Entry], int],
        limits: PoolLimits | None = None,
    ) -> Pool:
        """A pool that this records: its allocator's number, bytes and granule, and its policy.

        `fingerprint` gives the 64 bits that stand for an entry's key. A trace is of one pool.
        """
        number, nbytes, granule_bytes = allocator
        recorded = _Allocator(number, nbytes, granule_bytes, self.write)
        told = _Policy(policy, fingerprint, self.write, self._begin_s)
        pool = _Pool(recorded, told, self.write, limits)
        self._waiting.append(
            {
                "trace": "ecd",
                "version": VERSION,
                "pool_bytes": recorded.nbytes,
                "granule_bytes": granule_bytes,
                "policy": policy_name,
                "watermarks": [pool.limits.low_watermark, pool.limits.high_watermark],
            }
        )
        return pool

    def write(self, *record: Any) -> None:
        """Queue a record, which a thread writes. A record without room leaves a hole."""
        if len(self._waiting) >= MAX_WAITING or self._has_failed:
            self._missing += 1
            self.lost += 1
            return
        if self._missing:
            self._waiting.append(("hole", self._missing))
            self._missing = 0
        self._waiting.append(record)

    def close(self) -> None:
        """Write what is left; a file that takes no bytes is given up after CLOSE_S."""
        self.write("end")
        self._ends.set()
        self._thread.join(CLOSE_S)
        if self.lost:
            logger.warning("%s: %d records of the trace are lost", self._path, self.lost)

    def _write_on(self) -> None:
        try:
            while not self._ends.wait(PERIOD_S):
                self._write_waiting()
            self._write_waiting()
        except OSError as error:
            self._has_failed = True
            self.lost += len(self._waiting)
            self._waiting.clear()
            logger.error("%s: %s. Nothing more is traced", self._path, error.strerror)
        finally:
            os.close(self._file)

    def _write_waiting(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), WRITTEN_AT_ONCE)
            left = memoryview(self._encode([self._waiting.popleft() for _ in range(count)]))
            while left:
                left = left[os.write(self._file, left) :]


Write = Callable[..., None]


class _Allocator(Allocator):
    def __init__(self, pool_number: int, nbytes: int, granule_bytes: int, write: Write) -> None:
        super().__init__(pool_number, nbytes, granule_bytes)
        self._write = write

    def allocate(self, nbytes: int) -> Block | None:
        block = super().allocate(nbytes)
        if block is not None:
            self._write("take", block.start, nbytes)
        return block

    def allocate_at(self, extent: Extent) -> Block | None:
        block = super().allocate_at(extent)
        if block is not None:
            self._write("place", block.start, extent.nbytes)
        return block

    def free(self, block: Block) -> None:
        self._write("free", block.start)
        super().free(block)

    def split(self, block: Block, at: int) -> Block:
        self._write("cut", block.start, at)
        return super().split(block, at)


class _Policy:
    """Records the calls of a policy, and forwards its questions."""

    def __init__(
        self, policy: Policy, fingerprint: Callable[[Entry], int], write: Write, begin_s: int
    ) -> None:
        self._policy, self._fingerprint = policy, fingerprint
        self._write, self._begin_s = write, begin_s
        self._namespaces: dict[str, int] = {}
        self.wanted = 0  # bytes of the extent that room is being made for; 0 while trimming
        self.hands_over = False  # whether the use that is being counted saves no encode
        self.remove, self.coldest = policy.remove, policy.coldest
        self.warmth, self.loss = policy.warmth, policy.loss

    @property
    def anchors(self) -> int:
        return self._policy.anchors

    @property
    def weighing(self) -> Weighing:
        return self._policy.weighing

    def __getattr__(self, name: str) -> Any:
        """The figures that the policy itself has."""
        return getattr(self._policy, name)

    def admit(self, entry: Entry) -> None:
        content = entry.content
        self._write(
            "admit",
            entry.id,
            entry.block.start,
            self._fingerprint(entry),
            self._number(entry.namespace),
            content.nbytes,
            content.shape[0] if content.shape else 0,
            entry.cost_s,
            entry.used_s - self._begin_s,
        )
        self._policy.admit(entry)

    def _number(self, namespace: str) -> int:
        numbers = self._namespaces
        if len(numbers) >= MAX_NAMESPACES:
            return numbers.get(namespace, 0)
        return numbers.setdefault(namespace, len(numbers) + 1)

    def use(self, entry: Entry, now_s: float) -> None:
        self._write("use", entry.id, now_s - self._begin_s, *([True] if self.hands_over else ()))
        self._policy.use(entry, now_s)

    def hold(self, entry: Entry) -> None:
        self._write("hold", entry.id)
        self._policy.hold(entry)

    def let_go(self, entry: Entry) -> None:
        self._write("let go", entry.id)
        self._policy.let_go(entry)

    def give_up(self, victims: Sequence[Entry]) -> None:
        self._write("plan", self.wanted, [victim.id for victim in victims])
        self._policy.give_up(victims)


class _Pool(Pool):
    def __init__(
        self, allocator: Allocator, policy: _Policy, write: Write, limits: PoolLimits | None
    ) -> None:
        super().__init__(allocator, limits=limits, policy=policy)
        self._recorded, self._write = policy, write

    def use(self, entry: Entry, now_s: float, *, for_another: bool = False) -> bool:
        self._recorded.hands_over = entry.is_handover(now_s) and not for_another
        return super().use(entry, now_s, for_another=for_another)

    def evict_for(
        self, nbytes: int, evict: Evict, scan: Scan, most: int | None = None
    ) -> Block | None:
        self._recorded.wanted = self.rounded_bytes(nbytes)  # 0 would be a trim
        return super().evict_for(nbytes, evict, scan, most)

    def trim(self, most: int, evict: Evict) -> int:
        self._recorded.wanted = 0
        return super().trim(most, evict)

    def price_anew(self, entry: Entry) -> None:
        super().price_anew(entry)
        self._write("cost", entry.id, entry.cost_s)

    def drop(self, entry: Entry, reason: str, is_counted: bool) -> None:
        self._write("evict", entry.id, reason)
        super().drop(entry, reason, is_counted)
