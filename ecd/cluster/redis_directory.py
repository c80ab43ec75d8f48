"""A directory in Redis, that of one server or of a Redis Cluster.

`ecd:<cluster>:e:<digest of the key>`  a hash with one field for each node that holds the key: the
                                       node's incarnation, and where in its pool, as
                                       `<offset>+<bytes>`. Expires after ROW_TTL_S, and is written
                                       again before that.
`ecd:<cluster>:n:<incarnation>`        who that is, as JSON. Expires after NODE_TTL_S: with it every
                                       row of the node is void.
`ecd:<cluster>:a:<host:port>`          the incarnation of the node that is reached there. Expires
                                       with the node's record.

Changes are written behind, in pipelines. What is lost on either side, by a Redis that restarts
empty for example, is written again. Others write here too: whatever cannot be one of our rows is
passed over, and costs nothing but itself. So nothing is read whole that may be of any size.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf
from itertools import islice
from typing import Any

from redis import RedisError
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from ecd.cluster.directory import Candidate, DirectoryState, Found
from ecd.core.types import EntryId, Extent, Key
from ecd_proto.contract import NODE_PATTERN, Hint

logger = logging.getLogger(__name__)

NODE_TTL_S = 15
ROW_TTL_S = 3600
LOOKUP_TIMEOUT_S = 0.25
"""A lookup that takes longer is a miss; after it nobody asks for PAUSE_S."""
WRITE_TIMEOUT_S = 2.0
PAUSE_S = (1.0, 5.0)
NODE_CACHE_S = 2.0
BATCH = 512
MAX_UNPUBLISHED = 1 << 18
"""Changes that wait for Redis; with more, all entries are told again instead."""
MAX_CANDIDATES = 16
MAX_KNOWN = 4096
"""Nodes whose records are remembered, and addresses, each for NODE_CACHE_S."""
MAX_RECORD_BYTES = 1024
SOME_OF_ROW = """
if redis.call('type', KEYS[1]).ok ~= 'hash' then return {} end
local some = {}
for _, name in ipairs(redis.call('hrandfield', KEYS[1], ARGV[1])) do
  if #name == 32 and redis.call('hstrlen', KEYS[1], name) <= 37 then
    table.insert(some, name)
    table.insert(some, redis.call('hget', KEYS[1], name))
  end
end
return some
"""
"""Fields of a row that may be ours, and what they say, however many and long its fields are."""
DOWN = (RedisError, OSError, asyncio.TimeoutError)

INCARNATION = re.compile(rb"[0-9a-f]{32}")

Page = Callable[[EntryId, int], tuple[list[Key], "EntryId | None"]]
"""Some of the entries stored here, after a place, and where to go on."""


class RedisDirectory:
    """One per daemon, on its event loop."""

    def __init__(
        self,
        url: str,
        cluster: str,
        node: str,
        incarnation: str,
        zone: str,
        load: Callable[[], int],
        page: Page,
        extent: Callable[[Key], Extent | None],
    ) -> None:
        self.state = DirectoryState("redis", up=False)
        self._prefix = f"ecd:{cluster}"
        self._node, self._incarnation, self._zone = node, incarnation, zone
        self._load, self._page, self._extent = load, page, extent
        self._redis: Any = _client(url)
        self._unpublished: dict[Key, bool] = {}
        self._oldest_s: float | None = None
        self._changed = asyncio.Event()
        self._sweeping: EntryId | None = EntryId(0)
        self._swept_s = time.monotonic()
        self._beat_s = 0.0
        self._known = False  # Redis was seen to have our node
        self._silent_until_s = 0.0
        self._pause_s = 0.0
        self._nodes: dict[str, tuple[Candidate | None, float]] = {}
        self._addresses: dict[str, tuple[bool, float]] = {}
        self._asking: dict[str, asyncio.Task[bool]] = {}  # by address

    # -- reading -------------------------------------------------------------------------------

    async def find(self, keys: Sequence[Key]) -> Found:
        self.state.lookups += len(keys)
        if self._is_silent:
            return {}
        try:
            return await asyncio.wait_for(self._find(keys), LOOKUP_TIMEOUT_S)
        except Exception as error:
            self._failed(error)
            return {}

    async def knows(self, node: str) -> bool:
        now_s = time.monotonic()
        known, until_s = self._addresses.get(node, (False, 0.0))
        if now_s < until_s or self._is_silent:
            return known
        if node not in self._asking:
            if len(self._addresses) + len(self._asking) >= MAX_KNOWN:
                self._addresses = _fresh(self._addresses, now_s)
            if len(self._addresses) + len(self._asking) >= MAX_KNOWN:
                return known
            asking = self._asking[node] = asyncio.ensure_future(self._look_at(node))
            asking.add_done_callback(lambda _: self._asking.pop(node))
        return await asyncio.shield(self._asking[node])

    @property
    def _is_silent(self) -> bool:
        """Whether Redis has failed a moment ago, and nobody waits for it."""
        return time.monotonic() < self._silent_until_s

    async def _look_at(self, node: str) -> bool:
        """Whether a node is reached there; what was last known, if Redis does not answer."""
        known = self._addresses.get(node, (False, 0.0))[0]
        try:
            asked = self._redis.exists(self._address(node))
            known = bool(await asyncio.wait_for(asked, LOOKUP_TIMEOUT_S))
        except Exception as error:
            self._failed(error)
        self._addresses[node] = known, time.monotonic() + NODE_CACHE_S
        return known

    async def _find(self, keys: Sequence[Key]) -> Found:
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.eval(SOME_OF_ROW, 1, self._row(key), MAX_CANDIDATES)
        rows = [
            {
                name.decode(): at
                for name, at in zip(row[::2], row[1::2], strict=True)
                if INCARNATION.fullmatch(name) and name.decode() != self._incarnation
            }
            for row in await _execute(pipeline)
        ]
        nodes = await self._learn({name for row in rows for name in row})
        return {
            key: [
                Candidate(Hint(node.hint.node, *_place(at)), node.zone, node.load)
                for name, at in row.items()
                if (node := nodes[name]) is not None
            ]
            for key, row in zip(keys, rows, strict=True)
            if row
        }

    async def _learn(self, incarnations: set[str]) -> MappingOf[str, Candidate | None]:
        """Who each of these is: dead ones are nobody."""
        now_s = time.monotonic()
        nodes = {
            name: node
            for name in incarnations
            for node, until_s in (self._nodes.get(name, (None, 0.0)),)
            if now_s < until_s
        }
        unknown = sorted(incarnations - nodes.keys())
        if not unknown:
            return nodes
        pipeline = self._redis.pipeline(transaction=False)
        for incarnation in unknown:
            pipeline.getrange(self._record(incarnation), 0, MAX_RECORD_BYTES)
        records = await _execute(pipeline, or_else=b"")
        learned = dict(zip(unknown, map(_candidate, records), strict=True))
        if len(self._nodes) + len(learned) > MAX_KNOWN:
            self._nodes = _fresh(self._nodes, now_s)
        for name, node in islice(learned.items(), MAX_KNOWN - len(self._nodes)):
            self._nodes[name] = node, now_s + NODE_CACHE_S
        return nodes | learned

    # -- writing -------------------------------------------------------------------------------

    def publish(self, changes: MappingOf[Key, bool]) -> None:
        if not changes:
            return
        self._unpublished.update(changes)
        if len(self._unpublished) > MAX_UNPUBLISHED:
            self._unpublished.clear()  # rows of evicted entries expire; until then they cost a miss
            self._sweeping = EntryId(0)
        if self._oldest_s is None:
            self._oldest_s = time.monotonic()
        self._note_lag()
        self._changed.set()

    async def run(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._beat(), WRITE_TIMEOUT_S)
                while self._unpublished or self._sweeping is not None:
                    await asyncio.wait_for(self._write(), WRITE_TIMEOUT_S)
                    await asyncio.wait_for(self._beat(), WRITE_TIMEOUT_S)
                self._changed.clear()
                self.state.up, self._pause_s = True, 0.0
                await _event(self._changed, self._beat_s - time.monotonic())
            except Exception as error:
                self._failed(error)
                await asyncio.sleep(self._pause_s)

    async def close(self) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for name in (self._record(self._incarnation), self._address(self._node)):
            pipeline.delete(name)
        try:
            await asyncio.wait_for(pipeline.execute(), LOOKUP_TIMEOUT_S)
        except Exception as error:
            logger.debug("leaving without telling Redis: %s", error)
        await self._redis.aclose()

    async def _beat(self) -> None:
        """We live. If Redis has forgotten us, it has forgotten our entries."""
        now_s = time.monotonic()
        if now_s - self._swept_s > ROW_TTL_S / 2:
            self._sweeping, self._swept_s = EntryId(0), now_s
        if now_s < self._beat_s:
            return
        record = {"node": self._node, "zone": self._zone, "load": self._load()}
        name = self._record(self._incarnation)
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.exists(name)
        pipeline.set(name, json.dumps(record), ex=NODE_TTL_S)
        pipeline.set(self._address(self._node), self._incarnation, ex=NODE_TTL_S)
        existed, *_ = await _execute(pipeline)
        if not existed and self._known:
            logger.warning("the directory has forgotten this node: telling it all entries again")
            self._sweeping = EntryId(0)
        self._known = True
        self._beat_s = now_s + NODE_TTL_S / 3

    async def _write(self) -> None:
        """One batch: of changes, or of all entries if they are to be told again."""
        batch = dict(islice(self._unpublished.items(), BATCH))
        sweeps = not batch and self._sweeping is not None
        start = after = self._sweeping
        if sweeps and start is not None:
            keys, after = self._page(start, BATCH)
            batch = dict.fromkeys(keys, True)
        pipeline = self._redis.pipeline(transaction=False)
        for key, stored in batch.items():
            row = self._row(key)
            if stored:
                at = self._extent(key)
                pipeline.hset(row, self._incarnation, f"{at.offset}+{at.nbytes}" if at else "")
                pipeline.expire(row, ROW_TTL_S)
            else:
                pipeline.hdel(row, self._incarnation)
        if batch:
            await _execute(pipeline)
        for key, stored in batch.items():
            if self._unpublished.get(key) is stored:
                del self._unpublished[key]
        if sweeps and self._sweeping == start:  # not begun anew meanwhile
            self._sweeping = after
        self._oldest_s = time.monotonic() if self._unpublished else None
        self._note_lag()

    # -- state ---------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        self.state.errors += 1
        if not isinstance(error, DOWN):
            logger.error("the directory cannot be understood", exc_info=error)
        elif self.state.up or not self.state.last_error:
            logger.warning("the directory does not answer: %s", error or type(error).__name__)
        self.state.up = False
        self.state.last_error = str(error) or type(error).__name__
        first_s, longest_s = PAUSE_S
        self._pause_s = min(max(2 * self._pause_s, first_s), longest_s)
        self._silent_until_s = time.monotonic() + first_s
        self._beat_s = 0.0
        self._note_lag()

    def _note_lag(self) -> None:
        self.state.unpublished = len(self._unpublished)
        self.state.lag_s = 0.0 if self._oldest_s is None else time.monotonic() - self._oldest_s

    def _row(self, key: Key) -> str:
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
        return f"{self._prefix}:e:{digest}"

    def _record(self, incarnation: str) -> str:
        return f"{self._prefix}:n:{incarnation}"

    def _address(self, node: str) -> str:
        return f"{self._prefix}:a:{node}"


def _client(url: str) -> Any:
    options: Any = {"socket_timeout": WRITE_TIMEOUT_S, "socket_connect_timeout": WRITE_TIMEOUT_S}
    scheme, separator, rest = url.partition("://")
    if scheme.endswith("+cluster"):
        return RedisCluster.from_url(scheme.removesuffix("+cluster") + separator + rest, **options)
    return Redis.from_url(url, **options)


async def _execute(pipeline: Any, or_else: Any = None) -> list[Any]:
    """What each command gave; `or_else` of a row that is of another type than ours.

    Raises what else Redis answers with.
    """
    answers: list[Any] = await pipeline.execute(raise_on_error=False)
    for place, answer in enumerate(answers):
        if isinstance(answer, Exception):
            if not str(answer).startswith("WRONGTYPE"):
                raise answer
            answers[place] = or_else
    return answers


def _fresh(cached: dict[str, tuple[Any, float]], now_s: float) -> dict[str, tuple[Any, float]]:
    return {name: (value, until_s) for name, (value, until_s) in cached.items() if now_s < until_s}


def _place(said: bytes) -> tuple[int, int]:
    """Offset and bytes; no bytes: not known, or not one of ours."""
    found = re.fullmatch(rb"([0-9]{1,18})\+([0-9]{1,18})", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _candidate(record: bytes) -> Candidate | None:
    """What a node's record says; None: there is none, or it is not one of ours."""
    if not record or len(record) > MAX_RECORD_BYTES:
        return None
    try:
        fields = json.loads(record)
        if not re.fullmatch(NODE_PATTERN, fields["node"]):
            return None
        return Candidate(Hint(fields["node"]), str(fields["zone"]), int(fields["load"]))
    except Exception:  # JSON has many ways to be none of ours: too deep, 1e999, a list, ...
        return None


async def _event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for it, or for the time to be over."""
    try:
        await asyncio.wait_for(event.wait(), max(timeout_s, 0.0))
    except asyncio.TimeoutError:
        return
