"""Messages of the real formats, altered: what the fuzz tests send, and who watches meanwhile.

Hypothesis draws every choice, and draws the same again from the seed that is printed. What the
daemon answered goes into later messages, so that they are alike, not the same to the byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ecd_client import Client
from support.daemon import Daemon
from support.processes import child
from support.waiting import HANG_S

FEW = 1000
MESSAGES = int(os.environ.get("ECD_FUZZ_MESSAGES", FEW))
"""In all targets together."""
SEED = os.environ.get("ECD_FUZZ_SEED") or ("0" if MESSAGES == FEW else secrets.token_hex(4))
"""The few messages are the same in every run; more are drawn by lot."""
LEAST_SENT = 4
"""How often each target sends at least."""
ROUND = 200
"""Examples that Hypothesis keeps in mind together."""

INTEGERS = (
    *(0, 1, 2, 3, 7, 15, 16, 17, 255, 256, 504, 505, 512, 1023, 1024, 1025, 4095, 4096, 4097),
    *((1 << bits) + more for bits in (16, 20, 31, 32, 40, 48, 52, 56, 63) for more in (-1, 0, 1)),
    *(-1, -2, -4096),
)
"""Those below 0 count from the end of what their field can hold."""
REALS = (0.0, -0.0, 1e-3, 0.5, 60.0, -1.0, 1e18, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "\0", "\u2713" * 400, "x" * 1024, "x" * 1025, "x" * 300_000, "127.0.0.1:0")
COUNTS = (2, 3, 17, 1024, 1025, 5000)
HUGE = 2_000_000
"""Numbers in one message, now and then."""

Known = Mapping[str, Sequence[Any]]
"""Values that mean something now, by the names of the fields that have them."""


def drive(target: str, share: float, send: Callable[[Random], None], batch: int = 1) -> None:
    """Have `send` send this target's share of the messages, `batch` at a time.

    `send` draws what it sends and checks what comes back. What it draws must not depend on that.
    """
    wanted, sent, failures = max(LEAST_SENT * batch, int(MESSAGES * share)), 0, []
    print(f"{target}: {wanted} messages, ECD_FUZZ_SEED={SEED}")

    def one(chance: Random) -> None:
        nonlocal sent
        if failures:  # Hypothesis would send it again, and find another daemon
            raise failures[0]
        try:
            send(chance)
            sent += batch
        except Exception as error:
            failures.append(error)
            raise

    number = 0
    while sent < wanted:
        number += 1
        options = settings(
            max_examples=min(ROUND, -(-(wanted - sent) // batch)),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        try:
            seed(f"{SEED} {target} {number}")(options(given(st.randoms())(one)))()
        except Exception:
            print(f"{target}: after {sent} messages, ECD_FUZZ_SEED={SEED}")
            if failures:
                raise failures[0] from None
            raise


def pick(chance: Random, values: Sequence[Any]) -> Any:
    """Draw one of the values, by one random number however many there are just now."""
    return values[chance.randrange(1 << 16) % len(values)]


# -- protobuf messages -----------------------------------------------------------------------------


def mutated(message: Message, chance: Random, known: Known) -> bytes:
    """The message as it is, with some of its fields altered, or with its bytes spoilt too."""
    altered = type(message).FromString(message.SerializeToString())
    for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 4))):
        _alter(altered, chance, known)
    encoded = altered.SerializeToString()
    return spoilt(encoded, chance) if chance.random() < 0.25 else encoded


def _alter(message: Message, chance: Random, known: Known) -> None:
    """Alter one field of the message, or of a message within it."""
    present = [
        field for field, _ in message.ListFields() if field.message_type and not _is_map(field)
    ]
    if present and chance.random() < 0.7:
        inner = getattr(message, chance.choice(present).name)
        if hasattr(inner, "add"):
            _alter(chance.choice(inner), chance, known)
        else:
            _alter(inner, chance, known)
        return
    if not message.DESCRIPTOR.fields:
        return
    field = chance.choice(message.DESCRIPTOR.fields)
    inner = getattr(message, field.name)
    if chance.random() < 0.15:
        message.ClearField(field.name)
    elif _is_map(field):
        for number in range(chance.choice((1, 1, 1, *COUNTS))):
            inner[f"{chance.choice(TEXTS[:6])}{number or ''}"] = chance.choice(TEXTS[:6])
    elif hasattr(inner, "add"):
        added = inner.add()
        if len(inner) > 1 and chance.random() < 0.7:
            added.CopyFrom(chance.choice(inner[:-1]))
        else:
            _alter(added, chance, known)
        if chance.random() < 0.1:
            inner.extend([added] * chance.choice(COUNTS))
    elif hasattr(inner, "extend"):
        few = [_value(field, chance, known) for _ in range(chance.randint(1, 4))]
        times = HUGE if chance.random() < 0.005 else chance.choice((1, 1, 1, 1, *COUNTS))
        inner.extend(
            few[:1] * times if times > 1 and field.cpp_type != field.CPPTYPE_STRING else few
        )
    elif field.message_type:
        inner.SetInParent()
        _alter(inner, chance, known)
    else:
        setattr(message, field.name, _value(field, chance, known))


def _is_map(field: Any) -> bool:
    return bool(field.message_type) and bool(field.message_type.GetOptions().map_entry)


def _value(field: Any, chance: Random, known: Known) -> Any:
    likely = known.get(field.name)
    if likely and chance.random() < 0.6:
        return pick(chance, likely)
    match field.cpp_type:
        case field.CPPTYPE_UINT64:
            return chance.choice(INTEGERS) % (1 << 64)
        case field.CPPTYPE_UINT32:
            return chance.choice(INTEGERS) % (1 << 32)
        case field.CPPTYPE_DOUBLE:
            return chance.choice(REALS)
        case field.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case _ if field.type == field.TYPE_BYTES:
            return chance.randbytes(chance.choice((0, 1, 16, 4096, 4097)))
        case _:
            return chance.choice(TEXTS)


def spoilt(data: bytes, chance: Random) -> bytes:
    """The data with some bytes changed, lost, doubled, in another order, or cut off."""
    spoiling = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = int(chance.random() * (len(spoiling) + 1))
        end = min(len(spoiling), at + chance.choice((1, 1, 2, 4, 8, 32)))
        match chance.randrange(7):
            case 0:
                bit = 1 << chance.randrange(8)
                spoiling[at:end] = bytes(byte ^ bit for byte in spoiling[at:end])
            case 1:
                spoiling[at:at] = chance.randbytes(chance.choice((1, 2, 8)))
            case 2:
                del spoiling[at:end]
            case 3:
                spoiling[at:at] = spoiling[at:end]
            case 4:
                del spoiling[at:]
            case 5:  # a number or a length that goes on and on
                spoiling[at:end] = b"\xff" * chance.choice((1, 4, 9, 10, 11))
            case _:
                spoiling = spoiling[at:] + spoiling[:at]
    return bytes(spoiling)


# -- those who must not notice ---------------------------------------------------------------------


class Citizen:
    """A client process that puts and gets, compares every byte, and tells how that went."""

    def __init__(self, daemon: Daemon, number: int = 1) -> None:
        script = Path(__file__).with_name("citizen.py")
        self._child = child(
            [sys.executable, str(script), daemon.address, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(script.parents[1])},
        )
        self._process = self._child.__enter__()
        try:
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n"
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        if self._process.poll() is not None:
            self.finish()
            raise AssertionError("the client ended")

    def finish(self) -> dict[str, Any]:
        """What it counted; everything in it was right."""
        said, _ = self._process.communicate(timeout=HANG_S)
        assert self._process.returncode == 0, f"exit code {self._process.returncode}"
        told: dict[str, Any] = json.loads(said)
        print("a client meanwhile:", told)
        assert not told["errors"], told["errors"][0]
        assert told["wrong"] == 0
        assert told["hits"] > 0, "it never found anything: nothing was compared"
        return told

    def close(self) -> None:
        self._child.__exit__(None, None, None)


class Watch:
    """Checks, now and then, of conditions that hold for a daemon at any time."""

    def __init__(self, daemon: Daemon, citizens: Sequence[Citizen]) -> None:
        self._daemon, self._citizens = daemon, citizens
        self._turns = 0

    def now_and_then(self, turns: int) -> None:
        self._turns += 1
        if self._turns % turns == 0:
            self.check()

    def check(self) -> None:
        self._daemon.status()
        for citizen in self._citizens:
            citizen.check()
        complaint = _first_complaint(self._daemon.log.read_bytes())
        assert complaint is None, complaint


@contextlib.contextmanager
def watched(daemon: Daemon, citizens: int = 1) -> Iterator[Watch]:
    """Have clients work meanwhile, and check that nothing is left when all have gone."""
    with contextlib.ExitStack() as opened:
        working = [
            opened.enter_context(contextlib.closing(Citizen(daemon, number)))
            for number in range(citizens)
        ]
        watch = Watch(daemon, working)
        yield watch
        watch.check()
        for citizen in working:
            citizen.finish()
    working.clear()
    watch.check()
    daemon.check_nothing_leaked()
    status = daemon.status()
    left = status.pools[0].reserved_bytes, status.pools[0].leased_bytes, status.leases, status.waits
    assert left == (0, 0, 0, 0)
    with Client(daemon.address) as client:
        assert client.put_bytes("after all that", b"right", "uint8", (5,))
        with client.get("after all that") as item:
            assert bytes(item.view) == b"right"


OF_CALLERS = re.compile(
    rb"^[^\n]* ERROR [^\n]*codec can't decode[^\n]*\nNoneType: None"
    rb"|^Traceback[^\n]*\n(  [^\n]*\n)+grpc._cython.cygrpc.ExecuteBatchError[^\n]*"
    rb"|^[^\n]* ERROR asyncio: Task exception was never retrieved"
    rb"\nfuture: [^\n]*UnicodeDecodeError.*?_server_main_loop\nUnicodeDecodeError[^\n]*",
    re.DOTALL | re.MULTILINE,
)
"""What grpcio says where a caller has ended the server, or has gone before its answer."""


def _first_complaint(log: bytes) -> str | None:
    """The log from the daemon's first error of its own on; None if it has none."""
    log = OF_CALLERS.sub(b"", log)
    found = [at for sign in (b"Traceback", b" ERROR ") if (at := log.find(sign)) >= 0]
    return log[max(0, min(found) - 500) :][:6000].decode(errors="replace") if found else None
