"""Reads traces: the daemon's own (`ecd.ops.trace`), and CSV as libCacheSim reads it."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ecd.ops.trace import VERSION

TOLD_EVERY = 1 << 12
"""Lines between two reports of progress."""
CSV_COLUMNS = {
    "time": ("time", "timestamp", "ts", "clock_time"),
    "id": ("id", "obj_id", "key", "object_id", "obj"),
    "size": ("size", "obj_size", "bytes", "object_size"),
    "cost": ("cost", "cost_s"),
}
"""The columns of a CSV, in order, and the names that a header may give them. `cost` is ours."""
GRANULE_BYTES = 4096

READABLE = 1, VERSION
"""Versions of a trace: the first says of no read that it only handed an entry over."""
_READABLE = " and ".join(map(str, READABLE))

Progress = Callable[[int, int], None]
"""Receives the work done and the work in total, in one unit of any kind."""


class TraceError(Exception):
    """The file is not a trace that this version can read; the message says why."""


class TraceHeader(msgspec.Struct, frozen=True):
    """The recorded pool."""

    trace: str
    version: int
    pool_bytes: int
    granule_bytes: int
    policy: str
    watermarks: tuple[float, float]


class TracedKey(NamedTuple):
    """A key of a trace, and what its latest entry was."""

    key: int
    namespace: int
    nbytes: int
    rows: int
    cost_s: float


@dataclass
class Accesses:
    """The reads and writes of a trace, as an encoder asks for them: who misses, encodes and puts.

    A read that only handed an entry over is left out: it belongs to the write.
    `order` indexes `items`; `times_s` grow from the begin of the trace.
    """

    items: list[TracedKey] = field(default_factory=list)
    order: array[int] = field(default_factory=lambda: array("I"))
    times_s: array[float] = field(default_factory=lambda: array("d"))
    granule_bytes: int = GRANULE_BYTES
    recorded: TraceHeader | None = None
    missing: int = 0
    """Records that the trace misses."""

    @property
    def footprint_bytes(self) -> int:
        """The bytes of all keys together: a pool of this size evicts nothing."""
        return sum(self.block_bytes(item) for item in self.items)

    def block_bytes(self, item: TracedKey) -> int:
        """The bytes that an item takes from a pool."""
        return max(1, -(-item.nbytes // self.granule_bytes)) * self.granule_bytes


def no_progress(done: int, total: int) -> None:
    """Report no progress."""


def is_trace(path: Path) -> bool:
    """Whether the file begins as a trace of the daemon does. Raises TraceError."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None


def records(
    path: Path, progress: Progress = no_progress
) -> tuple[TraceHeader, Iterator[list[Any]]]:
    """The header of a daemon's trace, and its operations. A cut last line is left out.

    Raises TraceError, the iterator too.
    """
    with path.open("rb") as file:
        try:
            header = msgspec.json.decode(file.readline(), type=TraceHeader)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise TraceError(f"{path} does not begin with the header of a trace") from None
    if header.granule_bytes <= 0 or header.pool_bytes < header.granule_bytes:
        raise TraceError(f"{path} is of a pool of {header.pool_bytes} bytes")
    if header.version not in READABLE:
        raise TraceError(f"{path} has version {header.version}; this ecd reads {_READABLE}")
    return header, _records(path, progress)


def _records(path: Path, progress: Progress) -> Iterator[list[Any]]:
    decode = msgspec.json.Decoder(list[Any]).decode
    total = path.stat().st_size
    with path.open("rb") as file:
        done = len(file.readline())
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                return
            done += len(line)
            if number % TOLD_EVERY == 0:
                progress(done, total)
            try:
                yield decode(line)
            except msgspec.MsgspecError as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
    progress(total, total)


def accesses(path: Path, progress: Progress = no_progress) -> Accesses:
    """All accesses of a trace or a CSV. Raises TraceError."""
    if not is_trace(path):
        return _from_csv(path, progress)
    header, lines = records(path, progress)
    found = Accesses(granule_bytes=header.granule_bytes, recorded=header)
    numbers: dict[tuple[int, int], int] = {}  # of items, by namespace and key
    entries: dict[int, int] = {}  # the same, by entry
    for line in lines:
        match line:
            case ["admit", entry, _, key, namespace, nbytes, rows, cost_s, now_s]:
                item = TracedKey(key, namespace, nbytes, rows, cost_s)
                number = numbers.setdefault((namespace, key), len(numbers))
                if number == len(found.items):
                    found.items.append(item)
                found.items[number] = item
                entries[entry] = number
            case ["use", entry, now_s] if entry in entries:
                number = entries[entry]
            case ["hole", missing]:
                found.missing += missing
                continue
            case ["evict", entry, _]:
                entries.pop(entry, None)
                continue
            case _:
                continue
        found.order.append(number)
        found.times_s.append(now_s)
    return found


def _from_csv(path: Path, progress: Progress) -> Accesses:
    found = Accesses()
    numbers: dict[str, int] = {}
    total = path.stat().st_size
    done = 0
    try:
        with path.open(newline="", encoding="utf-8") as file:
            dialect = "excel-tab" if "\t" in file.readline() else "excel"
            file.seek(0)
            rows = csv.reader(file, dialect, skipinitialspace=True)
            columns = {name: place for place, name in enumerate(CSV_COLUMNS)}
            for row in filter(None, rows):
                if rows.line_num == 1 and not _is_number(row[-1]):
                    columns = _columns(path, row)
                    continue
                done += sum(map(len, row)) + len(row)
                if rows.line_num % TOLD_EVERY == 0:
                    progress(done, total)
                name = row[columns["id"]]
                number = numbers.setdefault(name, len(numbers))
                if number == len(found.items):
                    cost = columns.get("cost", len(row))
                    key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
                    cost_s = float(row[cost]) if cost < len(row) else 1.0
                    found.items.append(TracedKey(key, 1, int(row[columns["size"]]), 0, cost_s))
                found.order.append(number)
                found.times_s.append(float(row[columns["time"]]))
    except (IndexError, ValueError, UnicodeDecodeError, csv.Error) as error:
        line = f", line {rows.line_num}" if found.order else ""
        raise TraceError(f"{path}{line} is neither a trace nor time,id,size: {error}") from None
    if not found.order:
        raise TraceError(f"{path} is empty")
    progress(total, total)
    return found


def _columns(path: Path, header: list[str]) -> dict[str, int]:
    given = [name.strip().lower().replace("-", "_").replace(" ", "_") for name in header]
    columns = {
        name: given.index(alias)
        for name, aliases in CSV_COLUMNS.items()
        for alias in aliases
        if alias in given
    }
    missing = {"time", "id", "size"} - columns.keys()
    if missing:
        raise TraceError(f"{path} has no column for {' and '.join(sorted(missing))}")
    return columns


def _is_number(text: str) -> bool:
    return text.strip().replace(".", "", 1).isdecimal()
