"""What every process of a campaign knows without asking: keys, sizes, right bytes, deadlines."""

from __future__ import annotations

import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ecd_client import Client, Item
from ecd_client.session.leases import Pin
from ecd_proto.mapped_file import MappedFile

NAMESPACES = "red", "blue"
"""Two: the same mm_hash has other bytes in each."""
SIZES = ((0, 8 << 10), (0, 8 << 10), (0, 8 << 10), (8 << 10, 64 << 10), (300 << 10, 1 << 20))
WEIGHTS = (30, 20, 10, 30, 10)
WINDOW, KEYS_A_SECOND = 60, 20
"""Keys that are in use at one time; so many of them are new each second."""
CALL_TIMEOUT_S = 2.0
STRICT_S = 2.0
"""What a request may be late on a machine whose cores are all busy; each that is later counts."""
SLACK_S = float(os.environ.get("ECD_CAMPAIGN_SLACK_S", STRICT_S))
"""From here on it is a violation. `make test` sets HANG_S: it asks only that each request ends."""
RECOVERY_LIMIT_S = max(30.0, SLACK_S)
WORDS = 64
COUNTS = "requests", "hits", "misses", "puts", "refused", "verified_bytes", "checks", "late"
FIRST_THREAD_WORD, WORDS_A_THREAD = 16, 2


class WrongBytes(Exception):
    """A reader has seen what nobody put under this key."""


@dataclass(frozen=True)
class Known:
    namespace: str
    mm_hash: str
    nbytes: int

    @property
    def content(self) -> bytes:
        """The one right content."""
        return random.Random(f"{self.namespace} {self.mm_hash}").randbytes(self.nbytes)

    @property
    def metadata(self) -> bytes:
        return self.mm_hash.encode()


def known(number: int, namespace: str) -> Known:
    chance = random.Random(f"{namespace} {number}")
    [bounds] = chance.choices(SIZES, WEIGHTS)
    return Known(namespace, f"k{number}", chance.randint(*bounds))


def current(chance: random.Random) -> Known:
    """A key that all clients of all nodes put and get about now."""
    newest = int(time.monotonic() * KEYS_A_SECOND)
    return known(newest - chance.randrange(WINDOW), chance.choice(NAMESPACES))


def put(client: Client, key: Known, cost_s: float = 0.1) -> bool:
    about = {"metadata": key.metadata, "cost": cost_s, "namespace": key.namespace}
    return client.put_bytes(key.mm_hash, key.content, "uint8", (key.nbytes,), **about)


def _whose(some: bytes, key: Known) -> str:
    """What these bytes, found under the key, are."""
    if not any(some):
        return "zeros"
    if not (shared := re.fullmatch(r"k(\d+)", key.mm_hash)):
        return "under a probe's key"
    around = int(shared[1])
    for number in range(around - 4 * WINDOW, around + 4 * WINDOW):
        for namespace in NAMESPACES:
            other = known(number, namespace)
            if (at := other.content.find(some[:16])) >= 0:
                return f"those of {other} from {at} on"
    return "of none of the keys around it"


def _held(item: Item) -> str:
    """What holds the item, and whether its session has ended."""
    hold, extent = item._hold, item._hold.extent
    how = f"leased until {hold.expires_s}"
    if isinstance(hold, Pin):
        word, page = hold._pin, hold.session.puts and hold.session.puts.page_number
        how = f"entry {hold.entry} pinned by word {word} of page {page}: {hold._index._words[word]}"
    return f"{how}, at {extent.offset}, session {'over' if hold.session._over else 'open'}"


def check(item: Item, view: memoryview, key: Known) -> int:
    """Compare all that a view of the item shows; returns the bytes compared.

    Raises WrongBytes and LeaseExpired.

    What a reader sees whose lease ends meanwhile means nothing, as the lease's end says.
    """
    try:
        seen = bytes(view)
        said = item.nbytes, item.dtype, item.shape, item.metadata
    finally:
        item.check()
    if said != (key.nbytes, "uint8", (key.nbytes,), key.metadata):
        raise WrongBytes(f"{key} is {said}")
    right = key.content
    if seen != right:
        item.check()
        wrong = [at for at, (a, b) in enumerate(zip(seen, right, strict=True)) if a != b]
        others = seen[wrong[0] : wrong[-1] + 1]
        raise WrongBytes(
            f"{key}: {len(wrong)} bytes from {wrong[0]} to {wrong[-1]}, {_whose(others, key)}: "
            f"{others[:16].hex()}; right when read again: {bytes(view) == right}; {_held(item)}"
        )
    return key.nbytes


class Ledger:
    """Counters of one client in a file that outlives it, and what its threads are at."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            mapping = MappedFile(file.fileno(), 8 * WORDS, True)
        self._words = mapping.view(0, 8 * WORDS).cast("Q")

    def add(self, count: str, by: int = 1) -> None:
        self._words[COUNTS.index(count)] += by

    def counts(self) -> dict[str, int]:
        return dict(zip(COUNTS, self._words.tolist(), strict=False))

    def begin(self, thread: int, limit_s: float) -> None:
        """The thread makes a request that is to end within so many seconds; 0: it has ended."""
        at = FIRST_THREAD_WORD + WORDS_A_THREAD * thread
        self._words[at] = time.monotonic_ns()
        self._words[at + 1] = int(limit_s * 1e9)

    def overdue_s(self, threads: int) -> float:
        """By how much the slowest request that is under way is late; 0: none is."""
        now_ns, latest_ns = time.monotonic_ns(), 0
        for thread in range(threads):
            at = FIRST_THREAD_WORD + WORDS_A_THREAD * thread
            limit_ns = self._words[at + 1]
            if limit_ns:
                latest_ns = max(latest_ns, now_ns - self._words[at] - limit_ns)
        return latest_ns / 1e9


class Found:
    """What a get found, if anything; looked at through one view, counted and closed."""

    def __init__(self, ledger: Ledger, key: Known) -> None:
        self.item: Item | None = None
        self.key = key
        self._view: memoryview | None = None
        self._ledger, self._is_counted = ledger, False

    def look(self) -> None:
        ledger = self._ledger
        if not self._is_counted:
            self._is_counted = True
            ledger.add("misses" if self.item is None else "hits")
        if self.item is not None:
            if self._view is None:
                self._view = self.item.view
            ledger.add("verified_bytes", check(self.item, self._view, self.key))
            ledger.add("checks")

    def close(self) -> None:
        if self.item is not None:
            self.item.close()
