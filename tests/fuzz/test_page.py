"""Clients that write untrue claims, pins and counters into their pages, and ring."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from ecd_client import Client
from ecd_proto.contract import DTYPES
from ecd_proto.mapped_file import MappedFile
from ecd_proto.shm.index import MAILBOXES_AT, IndexShape, unpack_index_header
from ecd_proto.shm.rows import ROW_BYTES, ROW_CHECKSUM_WORD, Row, key_record, pack_row
from ecd_proto.shm.session_page import (
    CLAIM_DONE,
    CLAIM_NUMBER,
    CLAIM_ROW,
    CLAIMS_WORD,
    DOORBELL,
    FIRST_GRANT_WORD,
    FIRST_PIN_WORD,
    FIRST_USE_WORD,
    MAILBOX_BYTES,
    MAX_CLAIMS,
    MAX_GRANTS,
    MAX_PINS,
    PAGE_BYTES,
    PINS_USED_WORD,
    RECENT_USES,
    USES_WORD,
    claim_at,
    unpack_grant,
)
from support.daemon import Daemon
from support.fuzz import INTEGERS, drive, pick, watched

BATCH = 8
TURNS = 200
"""How often the daemon may run before a ring counts as unheard."""
ROW_FIELDS = {
    8: "<Q",
    16: "<Q",
    24: "<Q",
    32: "<Q",
    40: "<d",
    48: "<H",
    50: "<B",
    51: "<B",
    52: "<H",
}
"""Of a row, where its checksum, entry, offset, bytes, cost, pool, dtype, dimensions and metadata's
bytes are; the lengths in its key's record come after that."""
RECORD_AT = 56


class Vandal:
    """A client that writes its page without the library, and knows the others' entries."""

    def __init__(self, daemon: Daemon, client: Client | None = None) -> None:
        self._client = client or Client(daemon.address, namespace="vandal")
        for number in range(4):
            self._client.put_bytes(f"own {number}", b"v" * 5000, "uint8", (5000,))
        session = self._client._connection.session()
        self.number = session.puts.page_number
        index_path, pins_path, doorbell_path = (
            next(Path(daemon.shm).glob(f"{session.incarnation}{suffix}"))
            for suffix in (".index", ".pins", ".bell")
        )
        self._index = mapped(index_path, writable=False)
        shape = unpack_index_header(self._index.view(0, 4096).tobytes())
        assert shape is not None
        self._shape: IndexShape = shape
        pins = mapped(pins_path, writable=True)
        self.page = pins.view(self.number * PAGE_BYTES, PAGE_BYTES)
        self.words = self.page.cast("Q")
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._bell.connect(str(doorbell_path))
        self._last = 1 << 32
        self._numbers = self._client._connection.session().index._names

    def close(self) -> None:
        self._bell.close()
        self._client.close()

    def grants(self, page: int) -> list[tuple[int, int]]:
        mailbox = self._index.view(MAILBOXES_AT + page * MAILBOX_BYTES, MAILBOX_BYTES).cast("Q")
        words = mailbox[FIRST_GRANT_WORD : FIRST_GRANT_WORD + MAX_GRANTS].tolist()
        grants = [unpack_grant(word) for word in words if word] or [unpack_grant(1)]
        return [(grant.offset, grant.nbytes) for grant in grants]

    def entries(self, count: int = 200) -> list[tuple[int, int, int]]:
        """Number, offset and bytes of what is stored, anybody's."""
        rows = self._index.view(self._shape.rows_at, count * ROW_BYTES)
        found = [struct.unpack_from("<QQQ", rows, at * ROW_BYTES + 16) for at in range(count)]
        return [row for row in found if row[0]] or [(1, 0, 1)]

    def act(self, chance: Random) -> None:
        """Write something into the page, and ring or not."""
        match chance.randrange(8):
            case 0:
                for _ in range(chance.choice((1, 30))):
                    at = chance.randrange(MAX_PINS)
                    entry = pick(chance, self.entries())[0]
                    is_one = chance.random() < 0.7
                    self.words[FIRST_PIN_WORD + at] = entry if is_one else any_word(chance)
                self.words[PINS_USED_WORD] = chance.choice((1, MAX_PINS, any_word(chance)))
            case 1:
                self.words[USES_WORD + chance.randrange(5)] = any_word(chance)
            case 2:
                uses = self.words[USES_WORD] + chance.choice((1, 100, RECENT_USES + 1))
                self.words[USES_WORD] = uses % (1 << 64)
                entry = pick(chance, self.entries())[0]
                self.words[FIRST_USE_WORD + chance.randrange(RECENT_USES)] = entry
            case 3:
                at = chance.randrange(PAGE_BYTES)
                data = chance.randbytes(chance.choice((1, 8, 100)))[: PAGE_BYTES - at]
                self.page[at : at + len(data)] = data
            case 4:
                self.words[CLAIMS_WORD] = chance.choice((0, 1, any_word(chance)))
            case _:
                self.claim(chance)
        match chance.randrange(8):
            case 0:
                self.ring(chance.randbytes(chance.choice((0, 1, 3, 4, 5, 100))))
            case 1:
                self.ring(DOORBELL.pack(any_word(chance) % (1 << 32)))
            case 2:
                self.ring(DOORBELL.pack(chance.randrange(8)))
            case 3:
                pass
            case _:
                self.ring(DOORBELL.pack(self.number))

    def claim(self, chance: Random) -> None:
        """A put that is announced and may be done: in own memory, in others', or nowhere."""
        at = claim_at(chance.randrange(MAX_CLAIMS))
        is_of_others = chance.random() < 0.3
        keys = OTHERS_KEYS if is_of_others else OWN_KEYS
        namespace, mm_hash = chance.choice(keys)
        offset, nbytes = self.place(chance, in_own=not is_of_others)
        dtype = chance.choice([*DTYPES])
        shape = (nbytes // DTYPES[dtype],)
        if chance.random() < 0.8:
            nbytes = shape[0] * DTYPES[dtype]
        row = Row(any_word(chance), 0, offset, nbytes, dtype, shape, b"meta", 0.5, False)
        number = self._numbers.number_of(namespace) or 1
        record = key_record(number, mm_hash)
        assert record is not None
        packed = bytearray(pack_row(record, row, 0))
        for _ in range(chance.choice((0, 0, 0, 1, 2))):
            alter_row(packed, chance)
        if chance.random() < 0.9:
            make_whole(packed)
        self._last += 1
        put = chance.choice((self._last, self._last, self._last, 1, any_word(chance)))
        start = (at + CLAIM_ROW) * 8
        self.page[start : start + ROW_BYTES] = bytes(packed)
        self.words[at + CLAIM_NUMBER] = put
        self.words[at + CLAIM_DONE] = chance.choice((put, put, 0, any_word(chance)))
        self.words[CLAIMS_WORD] = 1

    def place(self, chance: Random, in_own: bool) -> tuple[int, int]:
        nbytes = chance.choice((0, 1, 4096, 8192, 40_000))
        match chance.randrange(8 if in_own else 3):
            case 0:
                _, offset, nbytes = pick(chance, self.entries())
                return offset, nbytes
            case 1:  # some other session's
                others = [page for page in range(8) if page != self.number]
                return pick(chance, self.grants(chance.choice(others)))[0], nbytes
            case 2:
                return any_word(chance), any_word(chance)
            case _:
                offset, granted = pick(chance, self.grants(self.number))
                return offset + 4096 * (chance.randrange(1 << 16) % max(1, granted // 4096)), nbytes

    def ring(self, data: bytes) -> None:
        """Ring, and let the daemon run until it has heard that."""
        with contextlib.suppress(BlockingIOError):
            self._bell.send(data)
        for _ in range(TURNS):
            if not struct.unpack("i", fcntl.ioctl(self._bell, termios.TIOCOUTQ, bytes(4)))[0]:
                return
            os.sched_yield()


OWN_KEYS = [("vandal", f"k{number}") for number in range(5000)]
OTHERS_KEYS = [("citizen 0", f"citizen 0 key {number}") for number in range(2)]
OTHERS_KEYS += [(f"citizen {who}", f"ghost {number}") for who in range(2) for number in range(2)]


def mapped(path: Path, writable: bool) -> MappedFile:
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        return MappedFile(fd, os.fstat(fd).st_size, writable)
    finally:
        os.close(fd)


def any_word(chance: Random) -> int:
    return chance.choice(INTEGERS) % (1 << 64)


def alter_row(row: bytearray, chance: Random) -> None:
    """Alter one field of the row, or some of its bytes."""
    if chance.random() < 0.7:
        at = chance.choice([*ROW_FIELDS, RECORD_AT, RECORD_AT + 2])
        kind = ROW_FIELDS.get(at, "<H")
        value: Any = chance.choice((float("nan"), float("inf"), -1.0))
        if kind != "<d":
            value = any_word(chance) % (1 << 8 * struct.calcsize(kind))
        struct.pack_into(kind, row, at, value)
    else:
        at = chance.randrange(8, ROW_BYTES)
        data = chance.randbytes(chance.choice((1, 4, 16)))[: ROW_BYTES - at]
        row[at : at + len(data)] = data


def make_whole(row: bytearray) -> None:
    """Let its checksum say that it is as it was written."""
    struct.pack_into("<Q", row, 8, crc32(bytes(row[16 : 8 * ROW_CHECKSUM_WORD])))


def test_pages_that_are_not_true(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    with watched(daemon, 2) as watch, contextlib.closing(Vandal(daemon)) as vandal:

        def send(chance: Random) -> None:
            for _ in range(BATCH):
                vandal.act(chance)
            watch.now_and_then(10)

        drive("session page", 0.35, send, BATCH)
        counters = daemon.status().counters
        print(f"puts: {counters.puts}, {daemon.text().count('makes no sense')} made no sense")
