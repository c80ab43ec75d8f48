"""`ecd-cli bench`: the times of puts and gets from here, with every byte compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.item import Item
from ecd_proto.contract import BENCH_NAMESPACE
from ecd_proto.v1 import cache_pb2 as pb

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "8 MiB": 8 << 20, "32 MiB": 32 << 20}
BENCH_KEYS = 4
"""Entries of a size that are stored at a time: the CPU's caches do not hold all large ones."""
Evict = Callable[[str], None]
"""A function that evicts a namespace."""


class WrongBytes(EcdError):
    """An entry came back with other bytes than were put in, or not at all."""


@dataclass(frozen=True)
class Measured:
    """Medians in microseconds; `copy_us` is a copy of the same bytes within this process."""

    size: str
    nbytes: int
    put_us: float
    get_us: float
    read_us: float
    contains_us: float
    copy_us: float


def measure(address: str, room_bytes: int, rounds: int, evict: Evict) -> Iterator[Measured]:
    """Measure each size that `fits` into `room_bytes`: nothing is evicted for it.

    Raises WrongBytes, and EcdError.
    """
    namespace = f"{BENCH_NAMESPACE}{clock.secret(4)}"
    with Client(address, namespace=namespace, name="ecd-cli bench") as client:
        try:
            for size, nbytes in SIZES.items():
                if fits(nbytes, room_bytes):
                    yield _measure(client, size, nbytes, rounds, lambda: evict(namespace))
        finally:
            evict(namespace)


def fits(nbytes: int, room_bytes: int) -> bool:
    """Whether some entries of a size have room for themselves and for their successors."""
    return 2 * BENCH_KEYS * nbytes <= room_bytes


def cut_by_quota(status: pb.StatusReply) -> int:
    """Entries of benches that a quota has evicted or refused since the daemon's start."""
    return status.bench.evictions["quota"] + status.bench.refused["quota_full"]


def _measure(
    client: Client, size: str, nbytes: int, rounds: int, evict: Callable[[], None]
) -> Measured:
    took: dict[str, list[float]] = {name: [] for name in ("put", "get", "read", "contains", "copy")}
    contents = [clock.random_bytes(nbytes) for _ in range(BENCH_KEYS)]
    target = memoryview(bytearray(nbytes))

    def timed(name: str, work: Callable[..., object], *arguments: object) -> None:
        started_s = clock.now_s()
        work(*arguments)
        took[name].append((clock.now_s() - started_s) * 1e6)

    def copy(source: bytes | memoryview) -> None:
        target[:] = source

    def read(key: str) -> None:
        with _get(client, key) as item:
            copy(item.view)

    for number in range(rounds + 1):
        keyed = {f"{size}-{number}-{key}": content for key, content in enumerate(contents)}
        for key, content in keyed.items():
            timed("put", client.put_bytes, key, content, "uint8", (nbytes,))
        for key, content in keyed.items():
            timed("contains", client.contains, [key])
            timed("get", lambda k: _get(client, k).close(), key)
            timed("read", read, key)
            if target != content:
                raise WrongBytes(f"{size}: other bytes came back than were put in")
            timed("copy", copy, content)
        evict()
    # The first round runs cold and is left out.
    medians = {name: median(values[BENCH_KEYS:]) for name, values in took.items()}
    names = ("put", "get", "read", "contains", "copy")
    return Measured(size, nbytes, *(medians[name] for name in names))


def _get(client: Client, key: str) -> Item:
    item = client.get(key)
    if item is None:
        raise WrongBytes(
            f"{key} was put and is not there: a pool that is nearly full (`ecd-cli status`) evicts "
            "it to make room. Make some with `ecd-cli evict`, and measure again"
        )
    return item
