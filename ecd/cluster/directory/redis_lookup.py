"""Lookups in Redis: the nodes that hold a key, make it, live or have encoders."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from ecd.base.clock import Clock
from ecd.cluster.directory.directory import Candidate, Found, OtherMaker
from ecd.cluster.directory.redis_health import HICCUP_S, LOOKUP_TIMEOUT_S, PAUSE, RedisHealth
from ecd.cluster.directory.redis_rows import (
    INCARNATION,
    LIVING,
    MAX_LISTED,
    MAX_RECORD_BYTES,
    NODE_TTL_S,
    NOTE_MAKER,
    SOME_OF_ROW,
    RowNames,
    execute,
    unpack_living,
    unpack_place,
    unpack_record,
)
from ecd.core.model.types import Key
from ecd.live.background import within
from ecd_proto.contract import Hint

NODE_CACHE_S = 2.0
MAX_CANDIDATES = 16
MAX_KNOWN = 4096
"""Nodes whose records are remembered, and addresses, each for NODE_CACHE_S."""


class RedisLookup:
    """Finds the entries of other nodes, and notes what this one makes. Caches what it has found."""

    def __init__(
        self, redis: Any, names: RowNames, incarnation: str, health: RedisHealth, clock: Clock
    ) -> None:
        self._redis, self._names, self._incarnation = redis, names, incarnation
        self._health, self._clock = health, clock
        self._unwritable_until_s = 0.0
        self._unanswered_since_s: float | None = None
        self._nodes: dict[str, tuple[Candidate | None, float]] = {}
        self._addresses: dict[str, tuple[bool, float]] = {}
        self._asking: dict[str, asyncio.Task[bool]] = {}  # by address
        self._encoding: tuple[Collection[str], float] = (), 0.0

    async def find(self, keys: Sequence[Key]) -> Found | None:
        """As `Directory.find`; so are the next three."""
        self._health.state.lookups += len(keys)
        if self._health.is_silent:
            self._health.state.skipped += 1
            return self._nothing()
        try:
            found = await within(LOOKUP_TIMEOUT_S, self._find(keys))
        except Exception as error:
            self._health.failed(error)
            return self._nothing()
        if not self._health.is_silent:
            self._unanswered_since_s = None
            self._health.answered()
        return found

    async def begin_making(self, keys: Mapping[Key, str]) -> Mapping[Key, OtherMaker]:
        if self._health.is_silent or self._clock.now_s() < self._unwritable_until_s:
            return {}
        try:
            return await within(LOOKUP_TIMEOUT_S, self._begin_making(keys))
        except Exception as error:
            self._health.failed(error, is_write=True)
            self._unwritable_until_s = self._clock.now_s() + PAUSE.first_s
            return {}

    async def knows(self, node: str) -> bool:
        now_s = self._clock.now_s()
        known, until_s = self._addresses.get(node, (False, 0.0))
        if now_s < until_s or self._health.is_silent:
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
        if self._clock.now_s() < until_s or self._health.is_silent:
            return nodes
        try:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.eval(LIVING, 1, self._names.encoding, "", NODE_TTL_S, MAX_LISTED)
            [living] = await within(LOOKUP_TIMEOUT_S, pipeline.execute(raise_on_error=False))
            nodes = unpack_living(living)[1]
        except Exception as error:
            self._health.failed(error)
        self._encoding = nodes, self._clock.now_s() + NODE_CACHE_S
        return nodes

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
            self._health.failed(error)
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

    async def _begin_making(self, keys: Mapping[Key, str]) -> Mapping[Key, OtherMaker]:
        pipeline = self._redis.pipeline(transaction=False)
        own, ttl_ms = self._incarnation, 1000 * NODE_TTL_S
        for key, void in keys.items():
            pipeline.eval(NOTE_MAKER, 1, self._names.making(key), own, void, ttl_ms)
        makers = {
            key: by.decode()
            for key, by in zip(keys, await execute(pipeline), strict=True)
            if INCARNATION.fullmatch(by) and by.decode() != self._incarnation
        }
        nodes = await self._learn(set(makers.values()))
        others = {
            key: OtherMaker(node, by)
            for key, by in makers.items()
            if (node := nodes[by]) is not None
        }
        dead = {key: by for key, by in makers.items() if nodes[by] is None and keys[key] != by}
        return {**others, **await self._begin_making(dead)} if dead else others

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


def _fresh(cached: dict[str, tuple[Any, float]], now_s: float) -> dict[str, tuple[Any, float]]:
    return {name: (value, until_s) for name, (value, until_s) in cached.items() if now_s < until_s}
