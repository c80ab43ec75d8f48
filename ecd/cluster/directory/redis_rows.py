"""The rows of the directory in Redis, and what may be believed of them.

`ecd:<cluster>:e:<digest of the key>`  a hash with one field for each node that holds the key: the
                                       node's incarnation, and the entry's extent there, as
                                       `<pool>:<offset>+<bytes>`, then a space and its metadata if
                                       that is short. Expires after ROW_TTL_S, and is written again
                                       before that.
`ecd:<cluster>:n:<incarnation>`        the node's record, as JSON. Expires after NODE_TTL_S: with it
                                       every row of the node is void.
`ecd:<cluster>:m:<digest of the key>`  the incarnation of the node that makes the key now. Expires
                                       after NODE_TTL_S, and is written again while the node still
                                       makes the key.
`ecd:<cluster>:a:<host:port>`          the incarnation of the node that is reached there. Expires
                                       with the node's record.
`ecd:<cluster>:nodes`                  a sorted set of all living nodes' host:port, by the time of
                                       their last record on Redis' clock. For operators alone.
`ecd:<cluster>:encoding`               the same, of those nodes that have encoders.

Others write to Redis too. A row that cannot be ours is passed over, and costs nothing but itself:
no value of unknown size is read whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from typing import Any

from redis import AuthenticationError, BusyLoadingError, RedisError, ResponseError
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import RedisClusterException

from ecd.base.wire import TOLD_METADATA_BYTES, told_metadata
from ecd.cluster.directory.directory import Candidate
from ecd.core.model.types import EntryInfo, Extent, Key
from ecd_proto.contract import NODE_PATTERN, Hint

DOWN = (RedisError, RedisClusterException, OSError, asyncio.TimeoutError, RuntimeError)
"""RuntimeError: uvloop's, of a connection that Redis closes while it is made."""
ANSWERED = (ResponseError, AuthenticationError, BusyLoadingError)
"""Errors that Redis itself has sent."""
NODE_TTL_S = 15
ROW_TTL_S = 3600
MAX_RECORD_BYTES = 1024
MAX_LISTED = 128
"""Nodes of the cluster that are shown to operators, whether or not they were asked."""
INCARNATION = re.compile(rb"[0-9a-f]{32}")
SOME_OF_ROW = """
if redis.call('type', KEYS[1]).ok ~= 'hash' then return {} end
local some = {}
for _, name in ipairs(redis.call('hrandfield', KEYS[1], ARGV[1])) do
  if #name == 32 and redis.call('hstrlen', KEYS[1], name) <= 171 then
    table.insert(some, name)
    table.insert(some, redis.call('hget', KEYS[1], name))
  end
end
return some
"""
"""Some fields of a row that may be ours, with their values, however many and long all are."""

NOTE_MAKER = """
local by = ARGV[1]
if redis.call('type', KEYS[1]).ok == 'string' and redis.call('strlen', KEYS[1]) == 32 then
  by = redis.call('get', KEYS[1])
end
if by ~= ARGV[1] and by ~= ARGV[2] then return by end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[3])
return ARGV[1]
"""
"""Write the first argument, an incarnation, unless another than the second is there: return it."""


LIVING = """
local now = tonumber(redis.call('time')[1])
if ARGV[1] ~= '' then redis.call('zadd', KEYS[1], now, ARGV[1]) end
redis.call('zremrangebyscore', KEYS[1], '-inf', now - ARGV[2])
redis.call('zremrangebyscore', KEYS[1], now + ARGV[2], '+inf')
redis.call('expire', KEYS[1], ARGV[2])
local some = {redis.call('zcard', KEYS[1])}
for _, name in ipairs(redis.call('zrevrange', KEYS[1], 0, ARGV[3] - 1)) do
  table.insert(some, #name <= 259 and name or '')
end
return some
"""
"""Add a node to a set of living ones, unless it is "". Those go that were silent for too long.

Return their number, and some of them: "" for one whose name is too long. Fails where Redis does not
allow this, which costs operators the list, and nothing else.
"""


class RowNames:
    """The names of one cluster's rows."""

    def __init__(self, cluster: str) -> None:
        self._prefix = f"ecd:{cluster}"

    def row(self, key: Key) -> str:
        return f"{self._prefix}:e:{_digest(key)}"

    def making(self, key: Key) -> str:
        return f"{self._prefix}:m:{_digest(key)}"

    def record(self, incarnation: str) -> str:
        return f"{self._prefix}:n:{incarnation}"

    def address(self, node: str) -> str:
        return f"{self._prefix}:a:{node}"

    @property
    def nodes(self) -> str:
        return f"{self._prefix}:nodes"

    @property
    def encoding(self) -> str:
        return f"{self._prefix}:encoding"


def _digest(key: Key) -> str:
    return hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]


def pack_place(info: EntryInfo | None) -> bytes:
    if info is None:
        return b""
    extent, metadata = info.extent, told_metadata(info.content.metadata)
    place = f"{extent.pool}:{extent.offset}+{extent.nbytes}".encode()
    return place + b" " + metadata if metadata else place


def unpack_place(value: bytes) -> tuple[Extent, bytes]:
    """The extent and the metadata; both empty if unknown, or if ecd did not write the value."""
    place, _, metadata = value.partition(b" ")
    found = re.fullmatch(rb"([0-9]{1,4}):([0-9]{1,18})\+([0-9]{1,18})", place)
    if found is None or len(metadata) > TOLD_METADATA_BYTES:
        return Extent(0, 0, 0), b""
    return Extent(*map(int, found.groups())), told_metadata(metadata)


def pack_record(node: str, zone: str, load: int) -> str:
    return json.dumps({"node": node, "zone": zone, "load": load})


def unpack_record(record: bytes) -> Candidate | None:
    """The node of a record; None if there is no record, or if ecd did not write it."""
    if not record or len(record) > MAX_RECORD_BYTES:
        return None
    try:
        fields = json.loads(record)
        if not re.fullmatch(NODE_PATTERN, fields["node"]):
            return None
        return Candidate(Hint(fields["node"]), str(fields["zone"]), int(fields["load"]))
    except Exception:  # JSON has many ways to be none of ours: too deep, 1e999, a list, ...
        return None


def unpack_living(answer: Any) -> tuple[int, frozenset[str]]:
    """The number of living nodes, and some of them; none if the answer is an error.

    Names that ecd cannot have written are left out of both.
    """
    if not isinstance(answer, list):
        return 0, frozenset()
    count, *names = answer
    nodes = [name.decode(errors="replace") for name in names]
    listed = frozenset(node for node in nodes if re.fullmatch(NODE_PATTERN, node))
    return count - (len(names) - len(listed)), listed


def connect(url: str, timeout_s: float) -> Any:
    """A client of one server, or of a Redis Cluster."""
    options: Any = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    scheme, separator, rest = url.partition("://")
    if scheme.endswith("+cluster"):
        return RedisCluster.from_url(scheme.removesuffix("+cluster") + separator + rest, **options)
    return Redis.from_url(url, **options)


async def execute(pipeline: Any, or_else: Any = None) -> list[Any]:
    """The answer to each command; `or_else` for a row that is of another type than ours.

    Raises any other error that Redis answers with.
    """
    return checked(await pipeline.execute(raise_on_error=False), or_else)


def checked(answers: list[Any], or_else: Any = None) -> list[Any]:
    """The answers, as `execute` returns them."""
    for place, answer in enumerate(answers):
        if isinstance(answer, Exception):
            if not str(answer).startswith("WRONGTYPE"):
                raise answer
            answers[place] = or_else
    return answers
