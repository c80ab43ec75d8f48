"""The index as clients read it: whatever it says, looking something up ends, and well."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from ecd_client import Client, EcdError
from ecd_proto.contract import CONTRACT_VERSION
from ecd_proto.shm.index import (
    BUCKET_BYTES,
    GENERATION_WORD,
    MAILBOXES_AT,
    NAMESPACES_AT,
    REMOVALS_WORD,
    IndexShape,
    unpack_index_header,
)
from ecd_proto.shm.rows import ROW_BYTES
from ecd_proto.shm.session_page import MAILBOX_BYTES
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from fuzz.test_page import alter_row, any_word, make_whole, mapped
from support.daemon import Daemon
from support.fuzz import drive

BATCH = 4
KEYS = {f"key {number}": 1 + 97 * number for number in range(200)}
NAMESPACES = ("index", "another")
SESSIONS = 64
"""Bytes to lock; the copy of the pages has as many."""


class Pretender(pb_grpc.CacheServicer):
    """A daemon that has nothing to say but where its files are."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files, self._sessions = files, 0

    def Session(self, requests: Any, context: Any) -> Iterator[pb.SessionEvent]:  # noqa: N802
        self._sessions += 1
        over = threading.Event()
        context.add_callback(over.set)
        pool = self._files["pool"].stat()
        yield pb.SessionEvent(
            incarnation="0" * 32,
            welcome=pb.Welcome(
                session="s",
                contract_version=CONTRACT_VERSION,
                lease_ttl_s=30.0,
                node="127.0.81.1:9465",
                pools=[
                    pb.PoolFile(
                        kind="host",
                        path=str(self._files["pool"]),
                        nbytes=pool.st_size,
                        inode=pool.st_ino,
                    )
                ],
                lock_path=str(self._files["sessions"]),
                lock_offset=self._sessions,
                index=pb.IndexFile(
                    path=str(self._files["index"]), pins_path=str(self._files["pins"])
                ),
            ),
        )
        over.wait()

    def Exchange(self, requests: Any, context: Any) -> Iterator[pb.ExchangeReply]:  # noqa: N802
        for request in requests:
            name = request.WhichOneof("call")
            yield pb.ExchangeReply(
                **{name: getattr(self, name.title())(getattr(request, name), None)}
            )

    def Reserve(self, request: Any, context: Any) -> pb.ReserveReply:  # noqa: N802
        full = pb.ReserveOutcome(pool_full=pb.PoolFull())
        return pb.ReserveReply(outcomes=[full for _ in request.items])

    def Acquire(self, request: Any, context: Any) -> pb.AcquireReply:  # noqa: N802
        missing = pb.AcquireOutcome(missing=pb.Missing())
        return pb.AcquireReply(outcomes=[missing for _ in request.keys])

    def Release(self, request: Any, context: Any) -> pb.ReleaseReply:  # noqa: N802
        return pb.ReleaseReply()

    def Contains(self, request: Any, context: Any) -> pb.ContainsReply:  # noqa: N802
        return pb.ContainsReply(contained=[False for _ in request.keys])


@pytest.fixture
def files(make_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Copies of what a daemon had, by suffix; nobody else maps them."""
    daemon = make_daemon("8MiB").start()
    with Client(daemon.address) as client:
        for key, nbytes in KEYS.items():
            for namespace in NAMESPACES:
                data = content(namespace, key, nbytes)
                client.put_bytes(key, data, "uint8", (nbytes,), namespace=namespace)
        copies = {}
        for path in daemon.shm.glob("*.*"):
            if path.is_file():
                copies[path.suffix[1:]] = tmp_path / path.name
                shutil.copy(path, tmp_path)
        yield copies


@pytest.fixture
def address(files: dict[str, Path], tmp_path: Path) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(16))
    pb_grpc.add_CacheServicer_to_server(Pretender(files), server)
    server.add_insecure_port(f"unix://{tmp_path}/pretender.sock")
    server.start()
    yield f"unix://{tmp_path}/pretender.sock"
    server.stop(None)


def content(namespace: str, key: str, nbytes: int) -> bytes:
    return Random(f"{namespace} {key}").randbytes(nbytes)


class Spoiler:
    """Writes into the index, and puts back what was there."""

    def __init__(self, path: Path) -> None:
        memory = mapped(path, writable=True)
        self.memory = memory.view(0, memory.nbytes)
        self.original = bytes(self.memory)
        shape = unpack_index_header(self.original)
        assert shape is not None
        self._shape: IndexShape = shape
        rows = range(shape.rows_at, shape.rows_at + 4096 * ROW_BYTES, ROW_BYTES)
        self._rows = [at for at in rows if any(self.original[at + 16 : at + 24])]
        self._spoilt: list[tuple[int, int]] = []
        self.is_whole = False
        """Whether what is spoilt has the right checksum: then nobody can tell."""

    def _write(self, at: int, data: bytes) -> None:
        end = min(at + len(data), len(self.memory))
        self.memory[at:end] = data[: end - at]
        self._spoilt.append((at, end))

    def restore(self) -> None:
        for at, end in self._spoilt:
            self.memory[at:end] = self.original[at:end]
        self._spoilt.clear()
        self.is_whole = False

    def spoil(self, chance: Random) -> None:
        match chance.randrange(10):
            case 0:  # counters: removals, unlisted, reservations, pages
                at = 8 * chance.randrange(REMOVALS_WORD, GENERATION_WORD)
                self._write(at, struct.pack("<Q", any_word(chance)))
            case 1:
                at = NAMESPACES_AT + chance.choice((0, 8, 12, 14, chance.randrange(100)))
                self._write(at, chance.randbytes(chance.choice((1, 2, 8))))
            case 2:
                at = MAILBOXES_AT + chance.randrange(8 * MAILBOX_BYTES)
                self._write(at, chance.randbytes(8))
            case 3:
                count = chance.choice((1, 100, self._shape.buckets))
                numbers = [self.row_number(chance) for _ in range(min(count, 100))]
                at = self._shape.buckets_at
                if count < self._shape.buckets:
                    at += BUCKET_BYTES * chance.randrange(self._shape.buckets - count)
                packed = struct.pack(f"<{len(numbers)}I", *numbers)
                self._write(at, packed * -(-count // len(numbers)))
            case 4:  # chains: into each other, in circles, to nowhere
                for at in self._rows if chance.random() < 0.5 else chance.sample(self._rows, 20):
                    self._write(at, struct.pack("<Q", self.row_number(chance, wide=True)))
            case 5 | 6:
                at = chance.choice(self._rows) + chance.randrange(ROW_BYTES)
                self._write(at, chance.randbytes(chance.choice((1, 8, 64))))
            case _:
                self.is_whole = True
                for at in self._rows if chance.random() < 0.3 else chance.sample(self._rows, 20):
                    row = bytearray(self.memory[at : at + ROW_BYTES])
                    alter_row(row, chance)
                    make_whole(row)
                    self._write(at, bytes(row))

    def row_number(self, chance: Random, wide: bool = False) -> int:
        if chance.random() < 0.5:
            at = chance.choice(self._rows)
            return (at - self._shape.rows_at) // ROW_BYTES + 1
        return any_word(chance) % (1 << 64 if wide else 1 << 32)

    def spoil_header(self, chance: Random) -> None:
        if chance.random() < 0.7:
            at = 16 + 8 * chance.randrange(4)
            self._write(at, struct.pack("<Q", any_word(chance)))
        else:
            self._write(chance.randrange(48), chance.randbytes(chance.choice((1, 8))))


def test_an_index_that_is_not_true(files: dict[str, Path], address: str) -> None:
    spoiler = Spoiler(files["index"])
    found = [0, 0]

    def look(client: Client, chance: Random) -> None:
        key, namespace = chance.choice([*KEYS, "nothing"]), chance.choice(NAMESPACES)
        how = chance.randrange(6)
        with contextlib.suppress(EcdError):
            item = None
            match how:
                case 0:
                    client.contains([key, "nothing"], namespace=namespace)
                case 1:
                    client.hint(key, namespace=namespace)
                case 2:
                    item, _ = client.get_now(key, namespace=namespace)
                case 3:
                    client.put_bytes("new", b"x", "uint8", (1,), namespace=namespace, timeout=0.1)
                case 4:
                    item = client.get(key, 0.01, namespace=namespace)
                case _:
                    item = client.get(key, namespace=namespace)
            if item is not None:
                with item:
                    right = bytes(item.view) == content(namespace, key, KEYS[key])
                found[right] += 1
                assert right or spoiler.is_whole, f"wrong bytes for {key}"

    with Client(address) as client:

        def send(chance: Random) -> None:
            for _ in range(BATCH):
                for _ in range(chance.choice((1, 1, 2))):
                    spoiler.spoil(chance)
                for _ in range(3):
                    look(client, chance)
                spoiler.restore()

        drive("index", 0.1, send, BATCH)
        print(f"found: {found[True]} right, {found[False]} forged")
        assert found[True] > 10


def test_an_index_whose_header_is_not_true(files: dict[str, Path], address: str) -> None:
    """A client connects or says why not; it connects once the file is right again."""
    spoiler = Spoiler(files["index"])

    def send(chance: Random) -> None:
        spoiler.spoil_header(chance)
        try:
            with contextlib.suppress(EcdError), Client(address, connect_timeout=0.5) as client:
                client.contains(["key 1"], namespace="index")
                item = client.get("key 1", namespace="index")
                if item is not None:
                    with item:
                        assert bytes(item.view) == content("index", "key 1", KEYS["key 1"])
        finally:
            spoiler.restore()

    drive("header of the index", 0.002, send)
    with Client(address) as client, client.get("key 1", namespace="index") as item:
        assert bytes(item.view) == content("index", "key 1", KEYS["key 1"])
    assert threading.active_count() < 60
    assert len(os.listdir("/proc/self/fd")) < 200
