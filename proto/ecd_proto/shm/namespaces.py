"""The table of namespaces in an index, which rows name by number."""

from __future__ import annotations

import struct
import threading
from zlib import crc32

from ecd_proto.contract import MAX_NAMESPACE_BYTES

NAMESPACES_BYTES = 64 << 10


class Namespaces:
    """Names by number, counted from 1: names are few, and too long for each row to hold its own.

    The table starts with the number of its bytes in use. Each name follows its crc and its length.
    The daemon adds names and never removes one.
    """

    _HEAD = struct.Struct("<IH")
    _USED = struct.Struct("<Q")

    def __init__(self, table: memoryview) -> None:
        self._table = table
        self._used = self._USED.size
        self._names: list[str] = []
        self.numbers: dict[str, int] = {}
        """The names read so far."""
        self._lock = threading.Lock()

    def number_of(self, name: str) -> int | None:
        """The name's number; 0 for a namespace without rows, None where the table is unclear."""
        number = self.numbers.get(name)
        if number is None:
            with self._lock:
                whole = self._read()
                number = self.numbers.get(name, 0 if whole and self._has_room() else None)
        return number

    def name_of(self, number: int) -> str:
        """The name with this number. Raises IndexError if there is none."""
        if number > len(self._names):
            with self._lock:
                self._read()
        if number < 1:
            raise IndexError(number)
        return self._names[number - 1]

    def add(self, name: str) -> int | None:
        """Add a name, in the daemon, and return its number. None once the table is full."""
        number = self.number_of(name)
        if number == 0:
            encoded = name.encode()
            head = self._HEAD.pack(crc32(encoded), len(encoded))
            end = self._used + len(head) + len(encoded)
            self._table[self._used : end] = head + encoded
            self._table[: self._USED.size] = self._USED.pack(end)
            number = self.number_of(name)
        return number

    def _has_room(self) -> bool:
        return self._used + self._HEAD.size + MAX_NAMESPACE_BYTES <= len(self._table)

    def _read(self) -> bool:
        """Read the names added since. False if the table's end is unfinished or damaged."""
        end = max(self._used, self._USED.unpack_from(self._table)[0])
        while self._used < end:
            start = self._used + self._HEAD.size
            if start > len(self._table):
                return False
            checksum, nbytes = self._HEAD.unpack_from(self._table, self._used)
            encoded = bytes(self._table[start : start + nbytes])
            if not encoded or len(encoded) != nbytes or crc32(encoded) != checksum:
                return False
            try:
                name = encoded.decode()
            except UnicodeDecodeError:
                return False
            self._names.append(name)
            self.numbers[name] = len(self._names)
            self._used = start + nbytes
        return True
