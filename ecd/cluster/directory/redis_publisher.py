"""This node's entries in Redis, written behind, in pipelines.

Rows that are lost on either side, by a Redis that restarts empty for example, are written again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from ecd.base.clock import Clock
from ecd.base.identity import NodeIdentity
from ecd.cluster.directory.redis_health import LOOKUP_TIMEOUT_S, RedisHealth
from ecd.cluster.directory.redis_rows import (
    LIVING,
    MAX_LISTED,
    NODE_TTL_S,
    ROW_TTL_S,
    RowNames,
    checked,
    execute,
    pack_place,
    pack_record,
    unpack_living,
)
from ecd.core.cache import Cache
from ecd.core.model.types import EntryId, Key
from ecd.live.background import within
from ecd.settings.config import Config
from ecd.settings.redaction import answer_without_password

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 2.0
BEAT_S = NODE_TTL_S / 3
"""How often a node's record is written, and each note of what it makes for longer."""
BATCH = 512
MAX_UNPUBLISHED = 1 << 18
"""Changes that wait for Redis; with more, all entries are published again instead."""


class RedisPublisher:
    """Publishes this node, its entries and the keys that it makes for longer."""

    def __init__(
        self,
        redis: Any,
        names: RowNames,
        config: Config,
        identity: NodeIdentity,
        cache: Cache,
        health: RedisHealth,
        clock: Clock,
        begin_making: Callable[[Mapping[Key, str]], Awaitable[object]],
        lasting: Callable[[float], Iterable[Key]],
        encodes: Callable[[], bool],
    ) -> None:
        """`begin_making` renews notes; `lasting` and `encodes` are as in `RedisDirectory`."""
        self._redis, self._names = redis, names
        self._node, self._incarnation = identity.node, identity.incarnation
        self._url, self._zone = config.directory or "", config.zone
        self._cache, self._health, self._clock = cache, health, clock
        self._begin_making, self._lasting, self._encodes = begin_making, lasting, encodes
        self._unpublished: dict[Key, bool] = {}
        self._oldest_s: float | None = None
        self._sweeping: EntryId | None = EntryId(0)
        self._swept_s = clock.now_s()
        self._beat_s = 0.0
        self._known = False  # Redis was seen to have our node
        health.on_failure = self._beat_next

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
        self._health.has_work.set()

    async def run(self) -> None:
        while True:
            try:
                await within(WRITE_TIMEOUT_S, self._beat())
                while self._unpublished or self._sweeping is not None:
                    await within(WRITE_TIMEOUT_S, self._write())
                    await within(WRITE_TIMEOUT_S, self._beat())
                self._health.has_work.clear()
                self._health.worked()
                left_s = max(self._beat_s - self._clock.now_s(), 0.0)
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(left_s, self._health.has_work.wait())
            except Exception as error:
                self._health.failed(error, is_write=True)
                await self._clock.sleep(self._health.pause_s)

    async def leave(self) -> None:
        """Remove this node's record, with which all its rows are void."""
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

    async def _beat(self) -> None:
        """Renew this node's record, and its notes of what it makes.

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
        self._health.state.lists(*unpack_living(living))
        if not existed:
            if self._known:
                logger.warning("the directory has forgotten this node: telling it all again")
                self._sweeping = EntryId(0)
            await self._redis.set(name, record, ex=NODE_TTL_S)
        self._known = True
        self._beat_s = now_s + BEAT_S
        made = list(self._lasting(BEAT_S))
        for start in range(0, len(made), BATCH):  # note them again, before they expire
            await self._begin_making(dict.fromkeys(made[start : start + BATCH], ""))

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

    def _beat_next(self) -> None:
        """After a failure: the next attempt to write begins with this node's record."""
        self._beat_s = 0.0
        self._note_lag()

    def _note_lag(self) -> None:
        state = self._health.state
        state.unpublished = len(self._unpublished)
        state.lag_s = 0.0 if self._oldest_s is None else self._clock.now_s() - self._oldest_s
