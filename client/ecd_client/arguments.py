"""The doors for what callers pass to the client: each kind of argument is checked in one place.

Every function returns the argument as the client uses it, or raises InvalidArgument, which says
what to pass instead. Nothing has been asked for or taken by then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any

from ecd_client.errors import InvalidArgument
from ecd_proto.contract import (
    DTYPES,
    MAX_DIMENSIONS,
    MAX_HINTS,
    MAX_LENGTH,
    MAX_MM_HASH_BYTES,
    MAX_NAMESPACE_BYTES,
    Hint,
    nbytes_of,
)
from ecd_proto.encoders import MAX_URL_BYTES, RegisteredEncoder, checked_url
from ecd_proto.engines import MAX_PARTS, MAX_TEXT_BYTES, Engine
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    import torch

MAX_SECONDS = 1e9
"""Longest time that may be given: the kernel's and Python's clocks accept no infinite time."""
MAX_NUMBER = (1 << 31) - 1
_ADDRESS = re.compile(r"(?:\[[0-9A-Za-z:.%]{1,64}\]|[0-9A-Za-z_.-]{1,255}):([0-9]{1,5})")
MAX_POOL, MAX_PLACE = (1 << 32) - 1, (1 << 64) - 1
"""Largest numbers of a hint that a message holds; one without such an extent is a node's alone."""


def string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"a {what} is a string, not {_shown(value)}")
    return value


def text(value: Any, what: str) -> str:
    """A string that UTF-8 can spell."""
    if not string(value, what).isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"the {what} {_shown(value)} is not text: it has half a character"
            ) from None
    checked: str = value
    return checked


def key(namespace: Any, mm_hash: Any) -> tuple[str, str]:
    """A key that daemons accept."""
    for what, value, limit in (
        ("namespace", namespace, MAX_NAMESPACE_BYTES),
        ("mm_hash", mm_hash, MAX_MM_HASH_BYTES),
    ):
        text(value, what)
        nbytes = len(value.encode()) if len(value) <= limit else len(value)
        if not 0 < nbytes <= limit:
            raise InvalidArgument(f"a {what} of {nbytes} bytes; 1 to {limit} are allowed")
    return namespace, mm_hash


def many(values: Any, call: str) -> list[Any]:
    """A list of several things, for the method `call`, where one string would be several too."""
    if isinstance(values, str | bytes):
        raise InvalidArgument(f"{call} takes a list of keys: {call}([{_shown(values)}])")
    try:
        return list(values)
    except TypeError:
        raise InvalidArgument(f"{call} takes a list of strings, not {_shown(values)}") from None


def engine(value: Any) -> Engine:
    """A description of an engine that daemons accept."""
    if not isinstance(value, Engine):
        raise InvalidArgument(f"an engine is an ecd_proto.engines.Engine, not {_shown(value)}")
    try:
        is_taken = Engine.of(value.message) is not None
    except (ArithmeticError, AttributeError, TypeError, ValueError):  # what no message holds
        is_taken = False
    if not is_taken:
        raise InvalidArgument(
            "an engine's description has an id of letters and digits, a namespace, printable texts "
            f"of at most {MAX_TEXT_BYTES} bytes, and up to {MAX_PARTS} parts with words or digests"
        )
    return value


def encoder(engine_id: Any, url: Any, active: Any) -> RegisteredEncoder:
    """An engine's id, the URL of its API server and its load, as daemons accept them."""
    try:
        said = pb.Encoder(engine=engine_id, url=checked_url(url), active=active)
        made = RegisteredEncoder.of(said)
    except (AttributeError, TypeError, ValueError):
        made = None
    if made is None:
        raise InvalidArgument(
            f"an encoder has an engine's id, a URL such as http://10.0.0.1:8000, of at most "
            f"{MAX_URL_BYTES} bytes and without user, query and fragment, and active requests of 0 "
            "or more"
        )
    return made


def seconds(value: Any, what: str) -> float:
    """A finite time of 0 or more seconds."""
    number = _number(value)
    if number is None or number > MAX_SECONDS:
        raise InvalidArgument(f"{what} is {_shown(value)}; it must be 0 or more seconds")
    return number


def nodes(values: Any) -> Sequence[Hint]:
    """Nodes that may have one key, as many as a daemon reads."""
    if isinstance(values, str | bytes | Hint):
        raise InvalidArgument(f"nodes is a list: nodes=[{_shown(values)}]")
    try:
        some = list(islice(values, MAX_HINTS))
    except TypeError:
        raise InvalidArgument(
            f"nodes is a list of host:port or of hints, not {_shown(values)}"
        ) from None
    return [_hint(node) for node in some]


def node_names(values: Any, call: str) -> list[str]:
    """Nodes (host:port), for the method `call`."""
    if isinstance(values, str):
        raise InvalidArgument(f"nodes is a list: nodes=[{_shown(values)}]")
    return [text(node, "node") for node in many(values, call)]


def daemons(values: Any) -> list[tuple[str, str]]:
    """Where each of some daemons publishes its events, and where it replays them."""
    try:
        pairs = [() if isinstance(pair, str) else tuple(pair) for pair in values]
    except TypeError:
        pairs = [()]
    if not all(len(pair) == 2 and all(map(_is_address, pair)) for pair in pairs):
        raise InvalidArgument(
            "daemons is a list of pairs of host:port, where one publishes and where it replays, "
            f"not {_shown(values)}"
        )
    return [(events, replay) for events, replay in pairs]


def number(value: Any, what: str) -> int:
    """A count of 1 or more, as 32 bits hold it."""
    if type(value) is not int or not 0 < value <= MAX_NUMBER:
        raise InvalidArgument(f"{what} is {_shown(value)}; it must be a number, 1 to {MAX_NUMBER}")
    return value


def each(values: Any, count: int, what: str) -> Sequence[Any]:
    """A list with something for each of `count` keys, or an empty one."""
    try:
        found = list(values)
    except TypeError:
        found = [None]
    if found and (len(found) != count or isinstance(values, str | bytes | Hint)):
        raise InvalidArgument(
            f"{what} is a list with one of them for each of the {count} keys, not {_shown(values)}"
        )
    return found


def cost(value: Any) -> float:
    """The seconds that making an entry took."""
    number = _number(value)
    if number is None:
        raise InvalidArgument(
            f"the cost is a number of seconds, finite and 0 or more, not {_shown(value)}"
        )
    return number


def dense(dtype: Any, shape: Any) -> tuple[str, tuple[int, ...], int]:
    """The dtype's name, the shape and the bytes of a dense tensor."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidArgument(f"unknown dtype {_shown(dtype)}; known are {', '.join(DTYPES)}")
    try:
        lengths = tuple(_length(length) for length in shape)
    except TypeError:
        raise InvalidArgument(
            f"a shape is a list of integers, each 0 or more, not {_shown(shape)}"
        ) from None
    if len(lengths) > MAX_DIMENSIONS:
        raise InvalidArgument(f"{len(lengths)} dimensions; at most {MAX_DIMENSIONS}")
    nbytes = nbytes_of(dtype, lengths)
    if nbytes > MAX_LENGTH or max(lengths, default=0) > MAX_LENGTH:
        raise InvalidArgument(f"{dtype} of shape {_shown(lengths)} is larger than any memory")
    return dtype, lengths, nbytes


def buffer(data: Any) -> memoryview:
    """The bytes of an object that has them in one piece."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:  # no such object, with gaps, or released
        raise InvalidArgument(
            f"the data are bytes, or a memoryview without gaps, not {_shown(data)}: {error}"
        ) from None


def device(value: Any) -> torch.device:
    """A device of torch's."""
    import torch

    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{_shown(value)} is no device of torch's: {error}") from None


def _is_address(value: Any) -> bool:
    """Whether it is host:port; a host of numbers with colons stands in brackets."""
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    return found is not None and 0 < int(found[1]) < 1 << 16


def _number(value: Any) -> float | None:
    """A finite number of 0 or more; None if the value is none."""
    if type(value) is not float:
        if not isinstance(value, Real):
            return None
        try:
            value = float(value)
        except OverflowError:
            return None
    number: float = value
    return number if 0.0 <= number < float("inf") else None


def _length(value: Any) -> int:
    """The value as a length. Raises TypeError if it is none."""
    if type(value) is not int:
        if isinstance(value, bool):
            raise TypeError
        value = index(value)
    length: int = value
    if length < 0:
        raise TypeError
    return length


def _hint(node: Any) -> Hint:
    if isinstance(node, str):
        return Hint(text(node, "node"))
    if not isinstance(node, Hint):
        raise InvalidArgument(f"a node is host:port, or a hint of a node, not {_shown(node)}")
    limits = MAX_POOL, MAX_PLACE, MAX_PLACE
    if not all(
        type(value) is int and 0 <= value <= limit
        for value, limit in zip(node[1:], limits, strict=True)
    ):
        raise InvalidArgument(f"a hint has a node and the extent there, not {_shown(node)}")
    text(node.node, "node")
    return node


def _shown(value: Any) -> str:
    """The value for a message, which is short."""
    try:
        return f"{value!r:.80}"
    except Exception:  # an integer of too many digits, or an object that cannot say what it is
        return f"a {type(value).__name__}"
