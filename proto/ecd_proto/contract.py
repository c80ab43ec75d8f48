"""Constants of the contract that its messages do not contain."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

DISTRIBUTION = "encoder-cache-daemon"
"""The name under which daemon and client are installed: `ecd` is another project's on PyPI."""
CONTRACT_VERSION = 2
"""Raised when a client of the version before could misread an answer; additions do not count."""

DTYPES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float64": 8,
}
"""The dtypes an entry may have, by their names in torch, and the bytes of one element."""

POPULATING = "the daemon is populating its pool"
"""How a refusal begins that time alone will end."""
SMALL_POOL_BYTES = 256 << 20
"""A pool of fewer bytes that nobody asked for is worth a warning: an item has up to 130 MB."""
MAX_METADATA_BYTES = 4096
MAX_NAMESPACE_BYTES = 1024
MAX_MM_HASH_BYTES = 1024
MAX_DIMENSIONS = 16
MAX_LENGTH = (1 << 63) - 1
"""Largest dimension, offset or number of bytes: torch's are signed."""
BENCH_NAMESPACE = "ecd-cli bench "
"""How the namespaces of `ecd-cli bench` begin: what is done there is no user's traffic, so the
client does not count its reads, and the daemon counts the rest apart."""
IDLE_BOUNDS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0)
"""Upper ends of the classes of `Counters.idle_evictions`; the last class has none."""
SIZE_BOUNDS_BYTES = tuple(1 << power for power in range(12, 33, 2))
"""The same of `Counters.put_sizes` and `Counters.hit_sizes`."""
MAX_BATCH = 1024
"""Items in one batch call."""
MAX_PAGE = 1000
"""Entries in one List reply."""
MAX_MESSAGE_BYTES = 16 << 20
MAX_HINTS = 8
"""Nodes named for one key."""
NODE_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,252}):[0-9]{1,5}$"
"""A node's name: the host:port of its Peer service, an IPv4 address or a host name."""
MAX_NODE_LENGTH = 259
NEVER_ASKED = "never asked"
"""The state of another node that is known, and to which no link was tried."""
GONE = "gone"
"""The state of another node that has left the directory, through which it was known."""
REFUSES = "refuses this node: "
"""How the last error of a directory begins that answers, and not as it should."""
MAX_SHOWN = 128
"""Characters of a name from outside that a line of log has."""
MAKING_S = 1.5
"""How long a client makes a key that none of its node has locked: it may have ended in vain."""


MAX_DURATION_S = 3650 * 86400.0
"""Longest duration that a setting or an option may name."""
MAX_SIZE_BYTES = 1 << 62
"""Largest size that a setting or an option may name: more does not fit into a message."""
_NUMBER = r"([0-9]{1,20}(?:\.[0-9]{1,20})?|\.[0-9]{1,20})"
_DURATION = re.compile(rf"{_NUMBER}(ms|[smhd])?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(rf"{_NUMBER} *(?:([kmgtpe])(i)?)?(b)?", re.ASCII | re.I)

MAX_POOLS = 64
"""Pools of one daemon, numbered from 0."""


class Hint(NamedTuple):
    """A node that is likely to have an entry, host:port, and the entry's extent there.

    With the extent (`nbytes` above 0) the bytes are read while the node is asked for their lease.
    """

    node: str
    pool: int = 0
    offset: int = 0
    nbytes: int = 0


def pool_names(kinds: Mapping[int, str]) -> dict[int, str]:
    """The name of each pool, by number: its kind, and its number too from a kind's second on."""
    names: dict[int, str] = {}
    for number, kind in kinds.items():
        names[number] = f"{kind}{number}" if kind in names.values() else kind
    return names


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor. Raises KeyError for a dtype that is not in DTYPES."""
    nbytes = DTYPES[dtype]
    for length in shape:
        nbytes *= length
    return nbytes


def shown(name: str) -> str:
    """A name or a text from outside, for a message: short, in one line and ASCII."""
    more = f"... ({len(name):,} characters)" if len(name) > MAX_SHOWN else ""
    return ascii(name[:MAX_SHOWN])[1:-1] + more


def size_text(nbytes: float) -> str:
    """A size for people, in the units in which it is set: 512 MiB, 1.5 GiB."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1023.95 and len(units) > 1:  # it would round to 1024.0
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.1f}".removesuffix(".0") + f" {units[0]}"


def too_large(namespace: str, pool_bytes: int, quota_bytes: int) -> str:
    """Why an entry can never be stored, and advice: the quota if it is not 0, else the pool."""
    if quota_bytes:
        quota = f"the quota of '{shown(namespace)}' is {size_text(quota_bytes)}"
        return f"{quota}: raise ECD_NAMESPACE_QUOTAS"
    return f"the whole pool has {size_text(pool_bytes)}: raise ECD_HOST_POOL_BYTES"


def pool_full(namespace: str, held_bytes: int, largest_free_bytes: int, quota_bytes: int) -> str:
    """Why an entry cannot be stored now, and advice: the quota if it is not 0, else the pool."""
    held, setting = f"{size_text(held_bytes)} are", "ECD_HOST_POOL_BYTES"
    free = f", the largest free piece has {size_text(largest_free_bytes)}"
    if quota_bytes:
        quota = f"the quota of '{shown(namespace)}', {size_text(quota_bytes)}"
        held, free, setting = f"{quota}, is full of what is", "", "ECD_NAMESPACE_QUOTAS"
    return (
        f"{held} leased, kept or being written (`ecd-cli clients` and `ecd-cli ls --kept` show "
        f"what holds them){free}. Try later, end a keep by `ecd-cli unkeep`, or raise {setting}"
    )


def count_text(count: int, noun: str) -> str:
    """A number of things for people: 1 entry, 2,000 entries."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def duration_text(seconds: float) -> str:
    """A time for people: 3 h, 1.5 s."""
    units = ((86400, "d"), (3600, "h"), (60, "min"))
    fits = (each for each in units if seconds >= 0.9995 * each[0])  # else it would round to 60.0
    size, unit = next(fits, (1, "s"))
    return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"


def seconds_of(text: str) -> float:
    """The seconds of a duration as people type it: 500ms, 30s, 10m, 2h, 1d; 0 needs no unit.

    Raises ValueError, whose text continues a sentence that names the value.
    """
    text = text.strip()
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError("must be a duration, such as 30s, 10m, 2h or 7d")
    number, unit = float(match[1]), match[2]
    if number and unit is None:
        raise ValueError(f"needs a unit, such as {text}s, {text}m, {text}h or {text}d")
    seconds = number * _SECONDS[unit or "s"]
    if seconds > MAX_DURATION_S:
        raise ValueError(f"must be at most {MAX_DURATION_S / 86400:.0f}d")
    return seconds


def bytes_of(text: str) -> int:
    """The bytes of a size as people type it: 512MiB, 4Gi, 20MB; 0 needs no unit.

    Raises ValueError, whose text continues a sentence that names the value.
    """
    text = text.strip()
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("must be a size, such as 512MiB or 4GiB")
    number, prefix, binary, byte = match.groups()
    if float(number) and not prefix and not byte:
        raise ValueError(f"needs a unit, such as {text}MiB or {text}GiB")
    factor = (1024 if binary else 1000) ** (1 + "kmgtpe".index(prefix.lower())) if prefix else 1
    nbytes = int(Fraction(number) * factor)
    if nbytes > MAX_SIZE_BYTES:
        raise ValueError(f"must be at most {MAX_SIZE_BYTES >> 60}EiB")
    return nbytes


def as_address(text: str) -> str:
    """A socket's address; a plain path is one, too."""
    return f"unix://{text}" if text.startswith("/") else text


def proof(token: str, *said: str) -> str:
    """Prove that the speaker has the cluster's token, which itself is never sent."""
    return hmac.new(token.encode(), "\0".join(said).encode(), "sha256").hexdigest()


def default_address() -> str:
    """`ECD_ADDRESS`, or the socket of this user's daemon."""
    if address := os.environ.get("ECD_ADDRESS"):
        return address
    if os.geteuid() == 0:
        return "unix:///run/ecd/ecd.sock"
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    return f"unix://{runtime_dir}/ecd/ecd.sock"
