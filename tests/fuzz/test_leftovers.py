"""Leftovers spoilt before the next daemon starts: it serves the bytes that were put, or none."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

from ecd_client import Client
from ecd_proto.shm.index import GENERATION_WORD, MAILBOXES_AT, NAMESPACES_AT, unpack_index_header
from ecd_proto.shm.rows import ROW_BYTES, ROW_CHECKSUM_WORD
from fuzz.test_page import ROW_FIELDS, any_word, make_whole
from support.daemon import Daemon
from support.fuzz import Watch, drive, spoilt
from support.waiting import HANG_S

BATCH = 100
"""Of the places that are spoilt before one start."""
KEYS = {f"key {number}": 1 + 331 * number % 30_000 for number in range(250)}
NAMESPACES = ("left", "another")


def content(namespace: str, key: str) -> bytes:
    return Random(f"{namespace} {key}").randbytes(KEYS[key])


def fill(client: Client) -> None:
    for namespace in NAMESPACES:
        stored = client.contains([*KEYS], namespace=namespace)
        for key in itertools.compress(KEYS, [not is_ for is_ in stored]):
            data = content(namespace, key)
            client.put_bytes(key, data, "uint8", (len(data),), namespace=namespace)


def compare(client: Client) -> int:
    """How many are there; what is there is what was put."""
    found = 0
    for namespace in NAMESPACES:
        for key in KEYS:
            item = client.get(key, namespace=namespace)
            if item is not None:
                with item:
                    assert bytes(item.view) == content(namespace, key), f"wrong bytes for {key}"
                found += 1
    return found


class Leftovers:
    """The files of a daemon that is stopped, and what others before it have left."""

    def __init__(self, shm: Path, attic: Path) -> None:
        self._shm, self._attic = shm, attic

    def keep(self) -> None:
        """Remember these indexes, to be found beside later ones."""
        for index in self._shm.glob("*.index"):
            shutil.copy(index, self._attic / "old.index")

    def spoil(self, chance: Random) -> None:
        if not list(self._shm.glob("*.index")):
            return
        for _ in range(BATCH - 1):
            self._spoil_row(chance)
        self._spoil_files(chance)

    def _path(self, suffix: str) -> Path | None:
        """The last life's; None: it left none."""
        return max(self._shm.glob(f"*{suffix}"), key=os.path.getmtime, default=None)

    def _spoil_row(self, chance: Random) -> None:
        path = self._path(".index")
        assert path is not None
        how, at, word = chance.randrange(5), chance.choice([*ROW_FIELDS]), any_word(chance)
        place, which = chance.randrange(1 << 16), chance.randrange(ROW_BYTES)
        data, chances = chance.randbytes(8), chance.random()
        with path.open("r+b") as file:
            shape = unpack_index_header(file.read(4096))
            if shape is None or shape.rows_at + ROW_BYTES * 600 > path.stat().st_size:
                return
            start = shape.rows_at + place % 600 * ROW_BYTES
            file.seek(start)
            row = bytearray(file.read(ROW_BYTES))
            match how:
                case 0:
                    row[which : which + 8] = data[: ROW_BYTES - which]
                case 1:
                    struct.pack_into("<Q", row, 8 * ROW_CHECKSUM_WORD, word)
                case 2:  # another row's place, and its own proof
                    file.seek(shape.rows_at + (place + 1) % 600 * ROW_BYTES)
                    row[24:40] = file.read(ROW_BYTES)[24:40]
                    make_whole(row)
                case _:
                    kind = ROW_FIELDS[at]
                    value = word % (1 << 8 * struct.calcsize(kind))
                    struct.pack_into(kind, row, at, chances if kind == "<d" else value)
                    make_whole(row)
            file.seek(start)
            file.write(row)

    def _spoil_files(self, chance: Random) -> None:
        how, part, data = chance.randrange(14), chance.random(), chance.randbytes(64)
        suffix = chance.choice((".index", ".index", ".pool", ".sessions", ".pins"))
        at, word = chance.choice((0, 8, 12, 16, 24, 32, 40, 8 * GENERATION_WORD)), any_word(chance)
        spoiling = Random(chance.getrandbits(64))
        path, index, pool = self._path(suffix), self._path(".index"), self._path(".pool")
        if path is None or index is None or pool is None:
            return
        match how:
            case 0:
                os.truncate(path, int(part * path.stat().st_size))
            case 1:
                path.unlink()
            case 2:
                _overwrite(index, at, struct.pack("<Q", word))
            case 3:
                _overwrite(index, 8 * GENERATION_WORD, struct.pack("<Q", word))
            case 4 | 5:
                _overwrite(pool, int(part * 4_000_000), data)
            case 6:
                with index.open("r+b") as file:
                    file.seek(NAMESPACES_AT)
                    names = file.read(200)
                    file.seek(NAMESPACES_AT)
                    file.write(spoilt(names, spoiling)[: MAILBOXES_AT - NAMESPACES_AT])
            case 7 if (self._attic / "old.index").exists():  # in place of the last life's
                shutil.copy(self._attic / "old.index", index)
            case 8 if (self._attic / "old.index").exists():  # beside it, with the same pool
                other = spoiling.randbytes(16).hex()
                shutil.copy(self._attic / "old.index", self._shm / f"{other}.index")
                os.link(pool, self._shm / f"{other}.pool")
                (self._shm / f"{other}.sessions").touch()
            case 9 if path.suffix != ".pool":
                _overwrite(path, int(part * path.stat().st_size), data)
            case _:
                pass  # the rows are all


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_leftovers_that_are_not_true(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon("24MiB").start()
    leftovers = Leftovers(daemon.shm, tmp_path)
    watch = Watch(daemon, [])
    kept: list[int] = []
    with Client(daemon.address, namespace="left") as client:
        fill(client)

        def send(drawn: Random) -> None:
            chance = Random(drawn.getrandbits(64))  # Hypothesis ends what draws much half way
            is_killed, is_kept = chance.random() < 0.5, chance.random() < 0.3
            daemon.wait_idle("drained", "hashed")
            if is_killed:
                daemon.kill()
            else:
                assert daemon.terminate() == 0
            if is_kept:
                leftovers.keep()
            leftovers.spoil(chance)
            daemon.start()
            client.wait_connected(HANG_S)
            kept.append(compare(client))
            watch.check()
            fill(client)
            assert compare(client) == len(KEYS) * len(NAMESPACES)

        daemon.wait_idle("drained", "hashed")
        daemon.kill()
        daemon.start()
        client.wait_connected(HANG_S)
        assert compare(client) > 100, "nothing was taken over"
        fill(client)
        drive("leftovers", 0.05, send, BATCH)
    print(f"found after each start: {kept}")
    daemon.check_nothing_leaked()


def test_the_number_of_a_life_is_not_taken_beyond_its_word(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon("8MiB").start()
    daemon.kill()
    [index] = daemon.shm.glob("*.index")
    _overwrite(index, 8 * GENERATION_WORD, b"\xff" * 8)
    daemon.start()
    with contextlib.closing(Client(daemon.address)) as client:
        assert client.put_bytes("k", b"x", "uint8", (1,))
