"""A directory in Redis, that of one server or of a Redis Cluster. Rows: `redis_rows.py`.

Changes are written behind, in pipelines. Rows that are lost on either side, by a Redis that
restarts empty for example, are written again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from redis import ResponseError

from ecd.base.clock import REAL, Clock
from ecd.base.identity import NodeIdentity
from ecd.cluster.directory.directory import Candidate, Claimed, DirectoryState, Found
from ecd.cluster.directory.redis_rows import (
    ANSWERED,
    CLAIM,
    DOWN,
    INCARNATION,
    LIVING,
    MAX_RECORD_BYTES,
    NODE_TTL_S,
    ROW_TTL_S,
    SOME_OF_ROW,
    RowNames,
    checked,
    connect,
    execute,
    pack_place,
    pack_record,
    unpack_living,
    unpack_place,
    unpack_record,
)
from ecd.core.cache import Cache
from ecd.core.model.types import EntryId, Key
from ecd.live.background import within
from ecd.settings.config import Config
from ecd.settings.redaction import answer_without_password
from ecd_proto.backoff import Backoff
from ecd_proto.contract import REFUSES, Hint, duration_text

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 0.25
"""A lookup that takes longer is a miss; after it Redis is not asked for the first pause."""
HICCUP_S = 5.0
"""A Redis that has failed for no longer than this is expected to answer again soon."""
WRITE_TIMEOUT_S = 2.0
PAUSE = Backoff(1.0, 5.0)
"""Pauses between attempts to write: the first for HICCUP_S, then each twice the one before."""
BEAT_S = NODE_TTL_S / 3
"""How often a node's record is written, and each claim of what it makes for longer."""
NODE_CACHE_S = 2.0
BATCH = 512
MAX_UNPUBLISHED = 1 << 18
"""Changes that wait for Redis; with more, all entries are published again instead."""
MAX_CANDIDATES = 16
MAX_LISTED = 128
"""Nodes of the cluster that are shown to operators, whether or not they were asked."""
MAX_KNOWN = 4096
"""Nodes whose records are remembered, and addresses, each for NODE_CACHE_S."""


class RedisDirectory:
    """Publishes this node's entries in Redis, and finds those of others; one per daemon."""

    def __init__(
        self,
        config: Config,
        identity: NodeIdentity,
        cache: Cache,
        connect: Callable[[str, float], Any] = connect,
        lasting: Callable[[float], Iterable[Key]] = lambda _: (),
        clock: Clock = REAL,
        encodes: Callable[[], bool] = lambda: False,
    ) -> None:
        """`connect` makes a client of the Redis at a URL, with a timeout in seconds.

        `lasting` has the keys that this node has been making for some seconds, and still makes.
        `encodes` says whether it has encoders.
        """
        assert config.directory is not None
        self.state = DirectoryState("redis", up=False)
        self._clock = clock
        self._names = RowNames(config.cluster)
        self._node, self._incarnation = identity.node, identity.incarnation
        self._zone, self._cache = config.zone, cache
        self._url, self._lasting, self._encodes = config.directory, lasting, encodes
        self._redis: Any = connect(config.directory, WRITE_TIMEOUT_S)
        self._unpublished: dict[Key, bool] = {}
        self._oldest_s: float | None = None
        self._changed = asyncio.Event()
        self._sweeping: EntryId | None = EntryId(0)
        self._swept_s = self._clock.now_s()
        self._beat_s = 0.0
        self._known = False  # Redis was seen to have our node
        self._silent_until_s = self._claimless_until_s = 0.0
        self._unanswered_since_s: float | None = None  # lookups
        self._down_since_s: float | None = None
        self._pause_s = 0.0
        self._nodes: dict[str, tuple[Candidate | None, float]] = {}
        self._addresses: dict[str, tuple[bool, float]] = {}
        self._asking: dict[str, asyncio.Task[bool]] = {}  # by address
        self._encoding: tuple[Collection[str], float] = (), 0.0

    def reload(self, nodes: Sequence[str]) -> None:
        """Change nothing: nodes are known only from Redis."""

    # -- reading -------------------------------------------------------------------------------

    async def find(self, keys: Sequence[Key], all_within_s: float | None = None) -> Found | None:
        self.state.lookups += len(keys)
        if self._is_silent:
            self.state.skipped += 1
            return self._nothing()
        try:
            found = await within(LOOKUP_TIMEOUT_S, self._find(keys))
        except Exception as error:
            self._failed(error)
            return self._nothing()
        if not self._is_silent:
            self._unanswered_since_s = None
            if not self.state.up:
                self._changed.set()  # `run` waits for its next beat, seconds after a late lookup
        return found

    async def claim(self, keys: Mapping[Key, str]) -> Mapping[Key, Claimed]:
        if self._is_silent or self._clock.now_s() < self._claimless_until_s:
            return {}
        try:
            return await within(LOOKUP_TIMEOUT_S, self._claim(keys))
        except Exception as error:
            self._failed(error, is_write=True)
            self._claimless_until_s = self._clock.now_s() + PAUSE.first_s
            return {}

    async def knows(self, node: str) -> bool:
        now_s = self._clock.now_s()
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

    async def encoding(self) -> Collection[str]:
        nodes, until_s = self._encoding
        if self._clock.now_s() < until_s or self._is_silent:
            return nodes
        try:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.eval(LIVING, 1, self._names.encoding, "", NODE_TTL_S, MAX_LISTED)
            [living] = await within(LOOKUP_TIMEOUT_S, pipeline.execute(raise_on_error=False))
            nodes = unpack_living(living)[1]
        except Exception as error:
            self._failed(error)
        self._encoding = nodes, self._clock.now_s() + NODE_CACHE_S
        return nodes

    @property
    def _is_silent(self) -> bool:
        """Whether Redis failed a moment ago, so that no lookup waits for it."""
        return self._clock.now_s() < self._silent_until_s

    def _nothing(self) -> Found | None:
        """The answer to a lookup without an answer from Redis."""
        now_s = self._clock.now_s()
        if self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        return None if now_s - self._unanswered_since_s < HICCUP_S else {}

    async def _look_at(self, node: str) -> bool:
        """Whether a node is reached there; the last answer, if Redis does not answer."""
        known = self._addresses.get(node, (False, 0.0))[0]
        try:
            asked = self._redis.exists(self._names.address(node))
            known = bool(await within(LOOKUP_TIMEOUT_S, asked))
        except Exception as error:
            self._failed(error)
        self._addresses[node] = known, self._clock.now_s() + NODE_CACHE_S
        return known

    async def _find(self, keys: Sequence[Key]) -> Found:
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.eval(SOME_OF_ROW, 1, self._names.row(key), MAX_CANDIDATES)
        rows = [
            {
                name.decode(): at
                for name, at in zip(row[::2], row[1::2], strict=True)
                if INCARNATION.fullmatch(name) and name.decode() != self._incarnation
            }
            for row in await execute(pipeline)
        ]
        nodes = await self._learn({name for row in rows for name in row})
        return {
            key: [
                Candidate(Hint(node.hint.node, *place), node.zone, node.load, metadata)
                for name, at in row.items()
                if (node := nodes[name]) is not None
                for place, metadata in (unpack_place(at),)
            ]
            for key, row in zip(keys, rows, strict=True)
            if row
        }

    async def _claim(self, keys: Mapping[Key, str]) -> Mapping[Key, Claimed]:
        pipeline = self._redis.pipeline(transaction=False)
        own, ttl_ms = self._incarnation, 1000 * NODE_TTL_S
        for key, void in keys.items():
            pipeline.eval(CLAIM, 1, self._names.claim(key), own, void, ttl_ms)
        makers = {
            key: by.decode()
            for key, by in zip(keys, await execute(pipeline), strict=True)
            if INCARNATION.fullmatch(by) and by.decode() != self._incarnation
        }
        nodes = await self._learn(set(makers.values()))
        claimed = {
            key: Claimed(node, by) for key, by in makers.items() if (node := nodes[by]) is not None
        }
        dead = {key: by for key, by in makers.items() if nodes[by] is None and keys[key] != by}
        return {**claimed, **await self._claim(dead)} if dead else claimed

    async def _learn(self, incarnations: set[str]) -> Mapping[str, Candidate | None]:
        """The node of each incarnation; None for one that is dead."""
        now_s = self._clock.now_s()
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
            pipeline.getrange(self._names.record(incarnation), 0, MAX_RECORD_BYTES)
        records = await execute(pipeline, or_else=b"")
        learned = dict(zip(unknown, map(unpack_record, records), strict=True))
        if len(self._nodes) + len(learned) > MAX_KNOWN:
            self._nodes = _fresh(self._nodes, now_s)
        for name, node in islice(learned.items(), MAX_KNOWN - len(self._nodes)):
            self._nodes[name] = node, now_s + NODE_CACHE_S
        return nodes | learned

    # -- writing -------------------------------------------------------------------------------

    @property
    def is_told(self) -> bool:
        return self._known and not self._unpublished and self._sweeping is None

    def publish(self, changes: Mapping[Key, bool]) -> None:
        if not changes:
            return
        self._unpublished.update(changes)
        if len(self._unpublished) > MAX_UNPUBLISHED:
            self._unpublished.clear()  # rows of evicted entries expire; until then they cost a miss
            self._sweeping = EntryId(0)
        self._oldest_s = self._clock.now_s() if self._oldest_s is None else self._oldest_s
        self._note_lag()
        self._changed.set()

    async def run(self) -> None:
        while True:
            try:
                await within(WRITE_TIMEOUT_S, self._beat())
                while self._unpublished or self._sweeping is not None:
                    await within(WRITE_TIMEOUT_S, self._write())
                    await within(WRITE_TIMEOUT_S, self._beat())
                self._changed.clear()
                self._worked()
                left_s = max(self._beat_s - self._clock.now_s(), 0.0)
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(left_s, self._changed.wait())
            except Exception as error:
                self._failed(error, is_write=True)
                await self._clock.sleep(self._pause_s)

    async def close(self) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for name in (self._names.record(self._incarnation), self._names.address(self._node)):
            pipeline.delete(name)
        for name in (self._names.nodes, self._names.encoding):
            pipeline.zrem(name, self._node)
        try:
            await within(LOOKUP_TIMEOUT_S, pipeline.execute())
        except Exception as error:
            said = answer_without_password(str(error), self._url)
            logger.debug("leaving without telling Redis: %s", said)
        await self._redis.aclose()

    async def _beat(self) -> None:
        """Renew this node's record, and its claims.

        If Redis had lost the record, it has lost our entries too.
        """
        now_s = self._clock.now_s()
        if now_s - self._swept_s > ROW_TTL_S / 2:
            self._sweeping, self._swept_s = EntryId(0), now_s
        if now_s < self._beat_s:
            return
        record = pack_record(self._node, self._zone, self._cache.views.leases)
        name = self._names.record(self._incarnation)
        pipeline = self._redis.pipeline(transaction=False)
        # Only where it stands: a record written by a beat whose answer is lost would hide the loss.
        pipeline.set(name, record, ex=NODE_TTL_S, xx=True)
        pipeline.set(self._names.address(self._node), self._incarnation, ex=NODE_TTL_S)
        pipeline.eval(LIVING, 1, self._names.nodes, self._node, NODE_TTL_S, MAX_LISTED)
        if self._encodes():
            pipeline.eval(LIVING, 1, self._names.encoding, self._node, NODE_TTL_S, 1)
        *answers, living = (await pipeline.execute(raise_on_error=False))[:3]
        existed, _ = checked(answers)
        self.state.lists(*unpack_living(living))
        if not existed:
            if self._known:
                logger.warning("the directory has forgotten this node: telling it all again")
                self._sweeping = EntryId(0)
            await self._redis.set(name, record, ex=NODE_TTL_S)
        self._known = True
        self._beat_s = now_s + BEAT_S
        made = list(self._lasting(BEAT_S))
        for start in range(0, len(made), BATCH):  # claim them again, before their claims expire
            await self.claim(dict.fromkeys(made[start : start + BATCH], ""))

    async def _write(self) -> None:
        """Write one batch of changes, or of all entries if they have to be published again."""
        batch = dict(islice(self._unpublished.items(), BATCH))
        sweeps = not batch and self._sweeping is not None
        start = after = self._sweeping
        if sweeps and start is not None:
            entries, after = self._cache.views.page(start, BATCH)
            batch = dict.fromkeys((entry.key for entry in entries), True)
        pipeline = self._redis.pipeline(transaction=False)
        for key, stored in batch.items():
            row = self._names.row(key)
            if stored:
                place = pack_place(self._cache.views.info(key))
                pipeline.hset(row, self._incarnation, place)
                pipeline.expire(row, ROW_TTL_S)
            else:
                pipeline.hdel(row, self._incarnation)
        if batch:
            await execute(pipeline)
        for key, stored in batch.items():
            if self._unpublished.get(key) is stored:
                del self._unpublished[key]
        if sweeps and self._sweeping == start:  # not begun anew meanwhile
            self._sweeping = after
        self._oldest_s = self._clock.now_s() if self._unpublished else None
        self._note_lag()

    # -- state ---------------------------------------------------------------------------------

    def _failed(self, error: BaseException, *, is_write: bool = False) -> None:
        """Note an error. A Redis that refuses writes, because it is full, is still asked."""
        was_quiet = self.state.up or not self.state.last_error
        said = answer_without_password(str(error) or type(error).__name__, self._url)
        self.state.failed(REFUSES + said if isinstance(error, ANSWERED) else said)
        if not isinstance(error, DOWN):
            logger.error("the directory cannot be understood", exc_info=error)
        elif was_quiet:
            silence = "" if isinstance(error, ANSWERED) else "does not answer: "
            logger.warning("the directory %s%s", silence, self.state.last_error)
        self.state.up = False
        now_s = self._clock.now_s()
        if self._down_since_s is None:
            self._down_since_s = now_s
        is_hiccup = now_s - self._down_since_s < HICCUP_S
        self._pause_s = PAUSE.after(0.0 if is_hiccup else self._pause_s)
        if not (is_write and isinstance(error, ResponseError)):
            self._silent_until_s = now_s + PAUSE.first_s
        self._beat_s = 0.0
        self._note_lag()

    def _worked(self) -> None:
        if self._down_since_s is not None:
            down_s = self._clock.now_s() - self._down_since_s
            logger.info("the directory works again, after %s", duration_text(down_s))
        self.state.up, self._pause_s, self._down_since_s = True, 0.0, None

    def _note_lag(self) -> None:
        self.state.unpublished = len(self._unpublished)
        self.state.lag_s = 0.0 if self._oldest_s is None else self._clock.now_s() - self._oldest_s


def _fresh(cached: dict[str, tuple[Any, float]], now_s: float) -> dict[str, tuple[Any, float]]:
    return {name: (value, until_s) for name, (value, until_s) in cached.items() if now_s < until_s}
