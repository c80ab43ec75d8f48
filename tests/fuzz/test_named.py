"""Nonsense with a name: what is written into pages, files and sockets, and what must follow.

Whatever it is, a neighbour reads right bytes and puts more, a newcomer is served, the log has no
error, and in the end no session, lease, descriptor or byte of the pool is left.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import grpc
import pytest

from ecd.rpc.cache import attach as daemons_side
from ecd.rpc.cache.attach import AttachSocket
from ecd_client import Client, EcdError
from ecd_client.device.attach import attach
from ecd_client.session.channel import open_channel
from ecd_proto.contract import CONTRACT_VERSION
from ecd_proto.shm.rows import ROW_BYTES, Row, key_record, pack_row
from ecd_proto.shm.session_page import (
    CLAIM_DONE,
    CLAIM_NUMBER,
    CLAIM_ROW,
    CLAIM_WORDS,
    CLAIMS_WORD,
    DMA_WORD,
    DOORBELL,
    FIRST_CLAIM_WORD,
    MAX_CLAIMS,
    claim_at,
)
from ecd_proto.v1 import cache_pb2 as pb
from fuzz.test_page import Vandal, make_whole
from fuzz.test_socket import frame, head
from support.daemon import Daemon
from support.fuzz import Watch
from support.waiting import HANG_S, eventually, stop

KIB, MIB = 1 << 10, 1 << 20
KEYS = {f"key {number}": 1 + 9999 * number % 50_000 for number in range(100)}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def content(key: str, turn: int = 0) -> bytes:
    return Random(f"{key} {turn}").randbytes(KEYS[key])


def put_all(client: Client, turn: int = 0) -> None:
    for key in KEYS:
        data = content(key, turn)
        assert client.put_bytes(key, data, "uint8", (len(data),), metadata=key.encode())


def check_all(client: Client, turn: int = 0) -> None:
    assert all(client.contains([*KEYS]))
    for key in KEYS:
        with client.get(key) as item:
            assert (bytes(item.view), item.metadata) == (content(key, turn), key.encode())


class Scene(NamedTuple):
    daemon: Daemon
    neighbour: Client
    vandal: Vandal

    @property
    def attach_path(self) -> Path:
        [path] = self.daemon.shm.glob("*.attach")
        return path

    @property
    def token(self) -> str:
        return self.neighbour._connection.session().token


class Case(NamedTuple):
    write: Callable[[Scene], None]
    follows: Callable[[Scene], None] = lambda _: None


# -- pages and bells -------------------------------------------------------------------------------


def words(word_of: Callable[[int], int], first: int = 0, end: int | None = None) -> Case:
    """Words of the page; a pin of no entry is no lease."""

    def write(scene: Scene) -> None:
        for word in range(first, len(scene.vandal.words) if end is None else end):
            scene.vandal.words[word] = word_of(word)

    def follows(scene: Scene) -> None:
        eventually(lambda: scene.daemon.status().leases <= 2 * len(KEYS), "pins are few leases")
        scene.vandal.words[DMA_WORD] = 0  # nobody waits for a device of its

    return Case(write, follows)


def rest_of_grant(client: Client) -> tuple[int, int]:
    """Start and end of memory that this client may still write without a call."""
    return next(piece for piece in client._connection.session().puts._pieces if piece[0] < piece[1])


def plant(
    vandal: Vandal,
    place: int,
    key: tuple[str, str],
    offset: int,
    nbytes: int = 4096,
    done: bool = True,
    length: int | None = None,
    cost_s: float = 0.0,
    altered: bytes = b"",
) -> None:
    """A put that is announced or done, says the page; `altered` are its dtype and dimensions."""
    record = key_record(vandal._numbers.number_of(key[0]), key[1])
    assert record is not None
    put = 1000 + place
    shape = (nbytes if length is None else length,)
    entry = Row(put, 0, offset, nbytes, "uint8", shape, b"", cost_s, False)
    row = bytearray(pack_row(record, entry, 0))
    row[50 : 50 + len(altered)] = altered
    make_whole(row)
    at = claim_at(place)
    vandal.page[8 * (at + CLAIM_ROW) : 8 * (at + CLAIM_ROW) + ROW_BYTES] = bytes(row)
    vandal.words[at + CLAIM_NUMBER] = put
    vandal.words[at + CLAIM_DONE] = put * done
    vandal.words[CLAIMS_WORD] += 1


def claim(dtype: int, dimensions: int) -> Case:
    """A claim with a right checksum that nobody can read: it is nobody else's error."""

    def write(scene: Scene) -> None:
        altered = bytes((dtype, dimensions))
        plant(scene.vandal, 0, ("vandal", "claimed"), 4096, 4, done=False, altered=altered)

    def follows(scene: Scene) -> None:
        client = scene.neighbour
        assert client._connection.session().index.row("vandal", "claimed") is None
        assert client.contains(["claimed"], namespace="vandal") == [False]
        assert client.get("claimed", namespace="vandal") is None
        assert client.get_now("claimed", namespace="vandal") == (None, True)

    return Case(write, follows)


def put(length: int, cost_s: float) -> Case:
    """A put of 4096 bytes that is done, of a content that cannot be: the daemon refuses it."""

    def write(scene: Scene) -> None:
        daemon, vandal = scene.daemon, scene.vandal
        refused = daemon.text().count("a put that makes no sense")
        start, _ = rest_of_grant(vandal._client)
        plant(vandal, 0, ("vandal", "claimed"), start, length=length, cost_s=cost_s)
        vandal.ring(DOORBELL.pack(vandal.number))
        daemon.status()  # all puts before it are stored or refused
        assert daemon.text().count("a put that makes no sense") == refused + 1
        assert scene.neighbour.get("claimed", namespace="vandal") is None

    return Case(write)


def ring(scene: Scene) -> None:
    for message in (b"", b"\xff" * 4, b"\x00" * 4, b"x" * 100, bytes([1, 0, 0, 0])):
        scene.vandal.ring(message)


# -- the socket of calls ---------------------------------------------------------------------------


def send(address: str, *sent: bytes) -> None:
    """Send it, and wait until the daemon has hung up."""
    with socket.socket(socket.AF_UNIX) as intruder:
        intruder.settimeout(HANG_S)
        intruder.connect(address.removeprefix("unix://"))
        with contextlib.suppress(ConnectionError):
            for data in sent:
                intruder.sendall(data)
            intruder.shutdown(socket.SHUT_WR)
            while intruder.recv(1 << 16):
                pass


def bytes_for_http2(scene: Scene) -> None:
    chance = Random(1)
    for attempt in range(60):
        garbage = chance.randbytes(1 << (attempt % 15))
        send(scene.daemon.address, PREFACE if attempt % 2 else b"", garbage)


def bytes_for_messages(scene: Scene) -> None:
    with open_channel(scene.daemon.address) as channel:
        for method in ("Reserve", "Acquire", "Evict", "List", "Session"):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(f"/ecd.v1.Cache/{method}")(b"\xff" * 100, timeout=HANG_S)


def garbage_and_gone(scene: Scene) -> None:
    """A session's stream, on which bytes that are no message come at one time with its end."""

    def message(data: bytes) -> bytes:
        return frame(0, 0, 1, b"\0" + struct.pack(">I", len(data)) + data)

    hello = pb.SessionRequest(hello=pb.Hello(contract_version=CONTRACT_VERSION))
    sessions = scene.daemon.status().sessions
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as intruder:
            intruder.connect(scene.daemon.address.removeprefix("unix://"))
            intruder.sendall(PREFACE + head(b"/ecd.v1.Cache/Session"))
            intruder.sendall(message(hello.SerializeToString()))
            eventually(lambda: scene.daemon.status().sessions > sessions, "its session")
            cancel = frame(3, 0, 1, struct.pack(">I", 8))
            intruder.sendall(message(b"\xff" * 100) + cancel)
            eventually(lambda: scene.daemon.status().sessions == sessions, "the session's end")


# -- the socket of those who attach ----------------------------------------------------------------


def tokens_of_nobody(scene: Scene) -> None:
    path, token = str(scene.attach_path), scene.token
    for wrong in ("", "0" * 32, token[:-1], token + "0", "\xe9" * 16, "x" * 10_000):
        with pytest.raises(EcdError, match="does not attach"):
            attach(path, wrong)


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(HANG_S)
    connection.connect(str(path))
    return connection


def packets_to_attach(scene: Scene) -> None:
    """Garbage, descriptors that nobody asked for, answers that nobody reads, and silence."""
    path, token, chance = scene.attach_path, scene.token.encode(), Random(1)
    before = descriptors(scene.daemon)
    with contextlib.ExitStack() as opened:
        for number in range(300):
            connection = opened.enter_context(connected(path))
            with contextlib.suppress(OSError):  # the oldest that said nothing has been dropped
                match number % 5:
                    case 0:
                        connection.send(chance.randbytes(chance.choice((1, 32, 64, 65, 5000))))
                    case 1:
                        fds = array.array("i", [connection.fileno()] * 10).tobytes()
                        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
                        connection.sendmsg([token], rights)
                    case 2:
                        connection.close()
                    case 3:
                        connection.send(token)
                        connection.close()
        kept = before + scene.daemon.status().sessions + 1
        eventually(lambda: descriptors(scene.daemon) <= kept, "the silent, and one pidfd")
        attach(str(path), scene.token)


# -- all of them -----------------------------------------------------------------------------------

CLAIMS = FIRST_CLAIM_WORD, FIRST_CLAIM_WORD + MAX_CLAIMS * CLAIM_WORDS
NONSENSE = {
    "large numbers all over a page": words(lambda word: (1 << 64) - 1 - word),
    "small numbers all over a page": words(lambda word: word),
    "claims of ones": words(lambda _: 0x0101010101010101, *CLAIMS),
    "a claim of no dtype": claim(200, 1),
    "a claim of the last dtype": claim(255, 1),
    "a claim of 17 dimensions": claim(6, 17),
    "a claim of 255 dimensions": claim(6, 255),
    "a claim of nothing that there is": claim(255, 255),
    "a put of more bytes than its shape has": put(4095, 0.0),
    "a put of fewer bytes than its shape has": put(4097, 0.0),
    "a put that costs less than nothing": put(4096, -1.0),
    "a put whose cost is no number": put(4096, float("nan")),
    "rings that name no page": Case(ring),
    "bytes for HTTP/2": Case(bytes_for_http2),
    "bytes for messages": Case(bytes_for_messages),
    "garbage on a stream that ends": Case(garbage_and_gone),
    "tokens of nobody": Case(tokens_of_nobody),
    "packets to attach": Case(packets_to_attach),
}


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def descriptors_at_rest(daemon: Daemon) -> int:
    """The daemon's open descriptors, once nobody is connected.

    gRPC binds its socket under the name that ends in `~`.
    """
    path = daemon.address.removeprefix("unix://") + "~"

    def is_alone() -> bool:
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return not any(row[5] == "03" and row[-1] == path for row in rows)  # connected

    eventually(is_alone, "nobody is connected")
    return descriptors(daemon)


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_harms_nobody_else(unused_daemon: Daemon, name: str) -> None:
    daemon, case = unused_daemon, NONSENSE[name]
    before = descriptors_at_rest(daemon)
    with Client(daemon.address, namespace="neighbour") as neighbour:
        put_all(neighbour)
        with contextlib.closing(Vandal(daemon)) as vandal:
            scene = Scene(daemon, neighbour, vandal)
            case.write(scene)
            check_all(neighbour)
            daemon.evict_all()
            put_all(neighbour, 1)
            case.follows(scene)
            check_all(neighbour, 1)
            with Client(daemon.address, namespace="neighbour") as newcomer:
                check_all(newcomer, 1)
    Watch(daemon, []).check()
    eventually(lambda: descriptors_at_rest(daemon) <= before, "no descriptor is left")


def test_who_says_nothing_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons_side, "SILENT_S", 0.1)

    class Sessions:
        clients = 1

        def attach(self, token: str, pidfd: int | None) -> bool:
            raise AssertionError("nobody has spoken")

    async def run() -> bytes:
        bound = AttachSocket(tmp_path / "x.attach")
        with contextlib.closing(bound), connected(bound.path) as silent:
            bound.listen(Sessions())
            return await asyncio.get_running_loop().run_in_executor(None, silent.recv, 1)

    assert asyncio.run(run()) == b""


# -- what a dead daemon leaves ---------------------------------------------------------------------


def plant_all_over(scene: Scene) -> Iterator[None]:
    """Puts that are done, says the page: only one of a new key, in its own grant, is believed."""
    daemon, neighbour, vandal = scene
    client = vandal._client
    plant(vandal, 0, ("vandal", "as grants are taken back"), 50 * MIB, done=False)
    daemon.evict_all()
    put_all(neighbour)
    for number in range(3):
        assert client.put_bytes(f"own {number}", b"v" * 4096, "uint8", (4096,))
        daemon.wait_idle("drained")  # what is granted next is what the next put is made in
    index, (others, others_end) = client._connection.session().index, rest_of_grant(neighbour)
    own, end = rest_of_grant(client)
    stop(daemon.pid)
    assert neighbour.put_bytes("waiting", b"w" * 20 * KIB, "uint8", (20 * KIB,))
    planted = {
        "over another's entry": index.row("neighbour", "key 3").offset,
        "over its own entry": index.row("vandal", "own 1").offset,
        "in another's grant": others_end - 4096,
        "where another puts": others,
        "in free memory": 60 * MIB,
        "beyond its grant": end - 2048,
        "beside a page": own + 100,
        "beyond the pool": 1 << 40,
    }
    plant(vandal, 0, ("vandal", "as grants are taken back"), 50 * MIB)
    for place, (key, at) in enumerate(planted.items(), 1):
        plant(vandal, place, ("vandal", key), at)
    plant(vandal, len(planted) + 1, ("vandal", "within its grant"), own)
    plant(vandal, len(planted) + 2, ("neighbour", "key 5"), own + 4096)
    daemon.kill()
    yield
    with neighbour.get("waiting") as item:
        assert bytes(item.view) == b"w" * 20 * KIB
    assert not any(client.contains(["as grants are taken back", *planted]))
    assert client.contains(["within its grant"]) == [True]


def spoil_claims(scene: Scene) -> Iterator[None]:
    daemon, _, vandal = scene
    daemon.wait_idle("drained")  # claims that are about to be overwritten are listed
    there, start = daemon.status().entries, 8 * FIRST_CLAIM_WORD
    vandal.page[start:] = Random(1).randbytes(len(vandal.page) - start)
    daemon.kill()
    yield
    eventually(lambda: daemon.status().entries == there, "all that was listed is, and no more")


def an_index_of_zeros(scene: Scene) -> Iterator[None]:
    """As of a daemon that was killed before it began, with the pool of another."""
    daemon = scene.daemon
    daemon.kill()
    [pool] = daemon.shm.glob("*.pool")
    os.link(pool, daemon.shm / "00ab.pool")
    (daemon.shm / "00ab.sessions").touch()
    (daemon.shm / "00ab.index").touch()
    os.truncate(daemon.shm / "00ab.index", MIB)
    yield
    assert not list(daemon.shm.glob("00ab.*"))


LEFT = {
    "puts all over the pool": plant_all_over,
    "claims of random bytes": spoil_claims,
    "an index of zeros": an_index_of_zeros,
}


@pytest.mark.parametrize("name", LEFT)
def test_nonsense_of_a_dead_daemon_harms_nobody_else(daemon: Daemon, name: str) -> None:
    with (
        Client(daemon.address, namespace="neighbour") as neighbour,
        contextlib.closing(Vandal(daemon)) as vandal,
    ):
        put_all(neighbour)
        follows = LEFT[name](Scene(daemon, neighbour, vandal))
        next(follows)
        daemon.start()
        for client in (neighbour, vandal._client):
            client.wait_connected(HANG_S)
        check_all(neighbour)
        next(follows, None)
    Watch(daemon, []).check()
    daemon.check_nothing_leaked()
