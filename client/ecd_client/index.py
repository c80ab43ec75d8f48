"""Entries found, pinned and read without a call, in the index that the daemon maps for its clients.

The reader's half of hazard pointers: find the row, announce what will be read, see that the row is
still there. docs/reading-without-a-call.md has the argument; the steps here are in its order.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ecd_client.calls import open_file
from ecd_client.puts import Puts
from ecd_proto.mapping import Mapping
from ecd_proto.shm import (
    BUCKET_BYTES,
    DESK_BYTES,
    DESKS_AT,
    DUPLICATES_WORD,
    FIRST_ANSWER_WORD,
    FIRST_PIN_WORD,
    FIRST_PUT_WORD,
    FIRST_USE_WORD,
    INDEX_HEADER_BYTES,
    KEPT_USES,
    MAX_PINS,
    MAX_PUTS,
    MISSES_WORD,
    NAMES_AT,
    NAMES_BYTES,
    PAGE_BYTES,
    PAGES_WORD,
    PINS_USED_WORD,
    PUT_DONE,
    PUT_ROW,
    PUT_WORDS,
    PUTS_WORD,
    REMOVALS_WORD,
    RESERVATIONS_WORD,
    ROW_BYTES,
    UNLISTED_WORD,
    USED_BYTES_WORD,
    USES_WORD,
    IndexShape,
    Names,
    Row,
    answer_to,
    bucket_of,
    key_record,
    next_of,
    row_has_key,
    row_is_whole,
    row_mark,
    take_part_in_barriers,
    unpack_index_header,
    unpack_row,
)
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from ecd_client.conversation import Conversation

TRIES = 8
"""Looks at a bucket that changes meanwhile before the daemon is asked."""
MAX_CHAIN = 256
LISTED_WITHIN_S = 500e-6
"""How long who looks for what was just put waits for the daemon to list it, before it asks."""
_U64 = (1 << 64) - 1
_row_at = struct.Struct(f"{ROW_BYTES}s").unpack_from
_PAGE_WORDS = PAGE_BYTES // 8


class AskDaemon(Exception):
    """The index cannot say: make the call."""


class Pin:
    """A lease that nobody was asked for: it holds until it is ended, however long that takes."""

    expires_s = math.inf
    holds = True

    def __init__(self, conversation: Conversation, index: Index, row: Row, pin: int) -> None:
        self.conversation, self.content, self.extent = conversation, row, row
        self._index, self._pin = index, pin

    def end(self) -> None:
        self._index.unpin(self._pin)
        self.conversation.unuse()


class Index:
    """The mapped index, and this session's page of pins. Thread-safe."""

    @classmethod
    def open(cls, files: pb.IndexFile, uid: int | None = None) -> Index | None:
        """The files must be those of user `uid`. Raises OSError.

        None: this process cannot use them, and asks for everything.
        """
        with contextlib.ExitStack() as opened:
            fds = []
            for path, flags in ((files.path, os.O_RDONLY), (files.pins_path, os.O_RDWR)):
                fds.append(open_file(path, flags, uid))
                opened.callback(os.close, fds[-1])
            memory = Mapping(fds[0], os.fstat(fds[0]).st_size, writable=False)
            shape = unpack_index_header(memory.view(0, INDEX_HEADER_BYTES).tobytes())
            if shape is None or not take_part_in_barriers():
                return None
            if not shape.fits(memory.nbytes, os.fstat(fds[1]).st_size):
                return None
            page = Mapping(fds[1], PAGE_BYTES, writable=True, offset=files.pins_offset)
            pages = Mapping(fds[1], os.fstat(fds[1]).st_size, writable=False)
            index = cls(shape, memory, page, pages)
            if files.bell_path:
                number = files.pins_offset // PAGE_BYTES
                index.puts = Puts(page, number, memory, files.bell_path)
            return index

    def __init__(self, shape: IndexShape, memory: Mapping, page: Mapping, pages: Mapping) -> None:
        self.puts: Puts | None = None
        self._shape = shape
        self._header = memory.view(0, INDEX_HEADER_BYTES).cast("Q")
        buckets = memory.view(shape.buckets_at, shape.buckets * BUCKET_BYTES)
        self._buckets = buckets.cast("I")
        self._rows = memory.view(shape.rows_at, shape.rows * ROW_BYTES)
        self._names = Names(memory.view(NAMES_AT, NAMES_BYTES))
        self._numbers = self._names.numbers
        self._desks = memory.view(DESKS_AT, shape.desks * DESK_BYTES).cast("Q")
        self._page = page
        self._words = page.view(0, PAGE_BYTES).cast("Q")
        self._pages = pages.view(0, pages.nbytes).cast("Q")  # of all sessions
        self._lock = threading.Lock()
        self._free = list(range(FIRST_PIN_WORD + MAX_PINS - 1, FIRST_PIN_WORD - 1, -1))

    def contains(self, namespace: str, mm_hashes: Sequence[str]) -> list[bool]:
        """Which of them are stored. Raises AskDaemon."""
        found, find = [], self._find
        for mm_hash in mm_hashes:
            record = self.record(namespace, mm_hash)
            found.append(
                record is not None
                and (
                    find(record) is not None
                    or self._is_put(record)
                    or find(record) is not None  # listed before the look at puts, maybe
                )
            )
        return found

    def extent(self, namespace: str, mm_hash: str) -> tuple[int, int] | None:
        """Offset and bytes of what is listed, or being put: nothing holds it. Raises AskDaemon."""
        record = self.record(namespace, mm_hash)
        if record is None:
            return None
        listed = self._find(record)
        rows = [row for _, row in self._puts_of(record)] if listed is None else [listed[1]]
        for row in filter(row_is_whole, rows):
            with contextlib.suppress(struct.error, IndexError):  # a put's row is another client's
                said = unpack_row(row)
                return said.offset, said.nbytes
        return None

    def is_listed(self, record: bytes) -> bool:
        """`contains`, but for what was put a moment ago. Raises AskDaemon."""
        return self._find(record) is not None

    def is_put_elsewhere(self, record: bytes) -> bool:
        """Whether another session has announced a put of this key as well."""
        own = -1 if self.puts is None else self.puts.page_number
        return next(self._puts_of(record, own), None) is not None

    def pin(
        self, namespace: str, mm_hash: str, final: bool, or_coming: bool = False
    ) -> tuple[Row, int] | None:
        """The entry's row, and the pin that holds it until `unpin`.

        None: it is not stored; if that is `final`, it is counted as a miss. Raises AskDaemon; with
        `or_coming` also where somebody may be writing it.
        """
        record = self.record(namespace, mm_hash)
        for _ in range(TRIES):
            found = None if record is None else self._find(record)
            if found is None:
                if or_coming and self._header[RESERVATIONS_WORD]:
                    break
                if record is not None:
                    found = self._find_put(record, or_coming)
            if found is None:
                if final:
                    self._count(MISSES_WORD)
                return None
            start, bytes_ = found
            try:
                row = unpack_row(bytes_)
            except (IndexError, struct.error):
                break
            if row.ask:
                break
            pin = self._announce(row.entry)
            try:
                if row_mark(self._rows[start : start + ROW_BYTES]) == row_mark(bytes_):
                    self._note_use(row)
                    return row, pin
            except BaseException:  # Ctrl-C
                self.unpin(pin)
                raise
            self.unpin(pin)
        raise AskDaemon

    def record(self, namespace: str, mm_hash: str) -> bytes | None:
        """What the key's row has. None: its namespace has none. Raises AskDaemon."""
        number = self._numbers.get(namespace)
        if number is None:
            unlisted = self._header[UNLISTED_WORD]
            number = self._names.number_of(namespace)
            if number == 0 and not unlisted and namespace and mm_hash:
                return None
        record = number and key_record(number, mm_hash)
        if not record or not mm_hash:
            raise AskDaemon  # a long key, or one that it refuses
        return record

    def note_duplicate(self) -> None:
        """Count a put of what was there."""
        self._count(DUPLICATES_WORD)

    def unpin(self, pin: int) -> None:
        self._words[pin] = 0
        self._free.append(pin)

    def cut_off(self) -> None:
        """In a forked child: its pins and puts are its own, and nobody sees them."""
        self._page.cut_off()
        self._lock = threading.Lock()
        if self.puts is not None:
            self.puts.cut_off()

    # -- steps ---------------------------------------------------------------------------------

    def _count(self, word: int) -> None:
        with self._lock:
            self._words[word] += 1

    def _find(self, record: bytes) -> tuple[int, bytes] | None:
        """Where the row of this key lies, and its bytes. None: it has none, and is not stored."""
        bucket = bucket_of(record, self._shape)
        rows, header, last = self._rows, self._header, self._shape.rows
        for _ in range(TRIES):
            removals, unlisted = header[REMOVALS_WORD], header[UNLISTED_WORD]
            number = self._buckets[bucket]
            passed = 0
            while 0 < number <= last and passed < MAX_CHAIN:
                start = (number - 1) * ROW_BYTES
                row: bytes = _row_at(rows, start)[0]
                if row_has_key(row, record):
                    if row_is_whole(row):
                        return start, row
                    break
                number = next_of(row)
                passed += 1
            if not number:
                if unlisted:
                    break
                if header[REMOVALS_WORD] == removals and not removals & 1:
                    return None
        raise AskDaemon

    def _puts_of(self, record: bytes, but: int = -1) -> Iterator[tuple[bool, bytes]]:
        """For each put of this key without an answer, whether it is done, and its row.

        Not of the page `but`.
        """
        pages = self._pages
        used = self._header[PAGES_WORD] * _PAGE_WORDS
        for page, puts in enumerate(pages[PUTS_WORD:used:_PAGE_WORDS].tolist()):
            if not puts or page == but:
                continue
            first = page * _PAGE_WORDS + FIRST_PUT_WORD
            numbers = pages[first : first + MAX_PUTS * PUT_WORDS : PUT_WORDS].tolist()
            for place, number in enumerate(numbers):
                at = first + place * PUT_WORDS
                answer = page * DESK_BYTES // 8 + FIRST_ANSWER_WORD + place
                if not number or answer_to(number, self._desks[answer]):
                    continue
                row = pages[at + PUT_ROW : at + PUT_WORDS].tobytes()
                if row_has_key(row, record):
                    yield pages[at + PUT_DONE] == number, row

    def _is_put(self, record: bytes) -> bool:
        """Whether a put of this key is done, and the daemon has yet to list it."""
        return any(done for done, _ in self._puts_of(record))

    def _find_put(self, record: bytes, or_coming: bool) -> tuple[int, bytes] | None:
        """`_find` where nothing was found: of what was put a moment ago, or else once more.

        What was listed before the look at puts is not among them any more. Raises AskDaemon; with
        `or_coming` also where a put of it is not done.
        """
        deadline_s = None
        while puts := [done for done, _ in self._puts_of(record)]:
            if not any(puts):
                if or_coming:
                    raise AskDaemon
                break
            now_s = time.perf_counter()
            deadline_s = deadline_s or now_s + LISTED_WITHIN_S
            if now_s > deadline_s:
                raise AskDaemon
            os.sched_yield()
        return self._find(record)

    def _announce(self, entry: int) -> int:
        words = self._words
        try:
            pin = self._free.pop()
        except IndexError:
            raise AskDaemon from None
        words[pin] = entry
        if words[PINS_USED_WORD] <= pin - FIRST_PIN_WORD:
            with self._lock:
                words[PINS_USED_WORD] = max(words[PINS_USED_WORD], pin - FIRST_PIN_WORD + 1)
        return pin

    def _note_use(self, row: Row) -> None:
        words = self._words
        with self._lock:
            use = words[USES_WORD]
            words[FIRST_USE_WORD + use % KEPT_USES] = row.entry
            words[USED_BYTES_WORD] = words[USED_BYTES_WORD] + row.nbytes & _U64
            words[USES_WORD] = use + 1
