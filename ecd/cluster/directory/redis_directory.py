"""A directory in Redis, that of one server or of a Redis Cluster. Rows: `redis_rows.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ecd.base.clock import Clock
from ecd.base.identity import NodeIdentity
from ecd.cluster.directory import redis_publisher
from ecd.cluster.directory.directory import Found, OtherMaker
from ecd.cluster.directory.redis_health import RedisHealth
from ecd.cluster.directory.redis_lookup import RedisLookup
from ecd.cluster.directory.redis_publisher import RedisPublisher
from ecd.cluster.directory.redis_rows import RowNames, connect
from ecd.core.cache import Cache
from ecd.core.model.types import Key
from ecd.settings.config import Config


class RedisDirectory:
    """Publishes this node's entries in Redis, and finds those of others; one per daemon."""

    def __init__(
        self,
        config: Config,
        identity: NodeIdentity,
        cache: Cache,
        clock: Clock,
        connect: Callable[[str, float], Any] = connect,
        lasting: Callable[[float], Iterable[Key]] = lambda _: (),
        encodes: Callable[[], bool] = lambda: False,
    ) -> None:
        """`connect` makes a client of the Redis at a URL, with a timeout in seconds.

        `lasting` has the keys that this node has been making for some seconds, and still makes.
        `encodes` says whether it has encoders.
        """
        assert config.directory is not None
        names, health = RowNames(config.cluster), RedisHealth(config.directory, clock)
        self._redis: Any = connect(config.directory, redis_publisher.WRITE_TIMEOUT_S)
        self._lookup = RedisLookup(self._redis, names, identity.incarnation, health, clock)
        self._publisher = RedisPublisher(
            self._redis,
            names,
            config,
            identity,
            cache,
            health,
            clock,
            begin_making=self._lookup.begin_making,
            lasting=lasting,
            encodes=encodes,
        )
        self.state = health.state

    async def find(self, keys: Sequence[Key], all_within_s: float | None = None) -> Found | None:
        return await self._lookup.find(keys)

    async def knows(self, node: str) -> bool:
        return await self._lookup.knows(node)

    async def encoding(self) -> Collection[str]:
        return await self._lookup.encoding()

    async def begin_making(self, keys: Mapping[Key, str]) -> Mapping[Key, OtherMaker]:
        return await self._lookup.begin_making(keys)

    @property
    def is_told(self) -> bool:
        return self._publisher.is_told

    def publish(self, changes: Mapping[Key, bool]) -> None:
        self._publisher.publish(changes)

    async def run(self) -> None:
        await self._publisher.run()

    async def close(self) -> None:
        await self._publisher.leave()
        await self._redis.aclose()

    def reload(self, nodes: Sequence[str]) -> None:
        """Change nothing: nodes are known only from Redis."""
