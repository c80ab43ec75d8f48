"""The daemon's state and figures, read once for `ecd-cli status` and for metrics alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from ecd.base.clock import Clock
from ecd.base.identity import NodeIdentity
from ecd.core.cache import Cache
from ecd.core.pool.pool import Pool
from ecd.ops.history import Figures
from ecd.rpc.cache.sessions import SessionStreams
from ecd_proto.contract import CONTRACT_VERSION, POPULATING
from ecd_proto.v1 import cache_pb2 as pb

MAX_NAMESPACES = 50
"""Namespaces that status and metrics show separately, as each is a time series."""
State = pb.StatusReply.State


class PooledMemory(Protocol):
    """The memory of one pool, as operators see it."""

    path: Path
    nbytes: int
    huge_bytes: int
    device_bytes: int
    problem: str

    @property
    def populated_bytes(self) -> int: ...


class ClientIndex(Protocol):
    """The index that clients read without a call."""

    @property
    def unlisted(self) -> int:
        """Entries that are not in the index."""

    @property
    def pinning_sessions(self) -> int:
        """Sessions whose clients have pinned the pools for their GPUs."""


class Status:
    """The state of one daemon, from its start to its end."""

    def __init__(
        self,
        identity: NodeIdentity,
        cache: Cache,
        memory: Mapping[int, PooledMemory],
        index: ClientIndex | None,
        streams: SessionStreams,
        clock: Clock,
    ) -> None:
        """`memory` holds each pool's, by its number. Without an `index` every entry is unlisted."""
        self._identity, self._cache, self._memory = identity, cache, memory
        self._index, self._streams, self._clock = index, streams, clock
        self.events = "", ""
        """Where changes are published and replayed, host:port."""
        self.disk: Callable[[], pb.DiskStatus] | None = None
        """The figures of the disk tier, where there is one."""
        self.idle: Callable[[], pb.Idle] | None = None
        """The state of each part that works in the background."""
        self.peers: Callable[[], Mapping[str, int]] | None = None
        """How many other nodes have each state, where the daemon has peers."""
        self._state = State.STATE_POPULATING
        self._started_s = self._clock.now_s()

    def serving(self) -> None:
        self._state = State.STATE_SERVING

    def stopping(self) -> None:
        self._state = State.STATE_STOPPING

    def unavailable(self) -> str | None:
        """Why calls are refused now; None: they are not."""
        if self._state == State.STATE_SERVING:
            return None
        if self._state == State.STATE_STOPPING:
            return "the daemon is stopping"
        pools = [self._memory[pool.number] for pool in self._cache.pools if not pool.holds_replicas]
        populated_bytes = sum(pool.populated_bytes for pool in pools)
        percent = 100 * populated_bytes // sum(pool.nbytes for pool in pools)
        return f"{POPULATING}: {percent} %"

    def read(self) -> pb.StatusReply:
        cache = self._cache
        named, others = cache.views.namespaces(MAX_NAMESPACES)
        rules = cache.retention.rules
        return pb.StatusReply(
            incarnation=self._identity.incarnation,
            name=self._identity.name,
            version=self._identity.daemon,
            contract_version=CONTRACT_VERSION,
            pid=os.getpid(),
            state=self._state,
            uptime_s=self._clock.now_s() - self._started_s,
            pools=[self._read_pool(pool) for pool in cache.pools],
            node=self._identity.node,
            events=self.events[0],
            events_replay=self.events[1],
            entries=cache.views.entries,
            unlisted=cache.views.entries if self._index is None else self._index.unlisted,
            sessions=self._streams.clients,
            leases=cache.views.leases,
            waits=cache.views.waits,
            waiting_for_dma=self._streams.waiting_for_dma,
            pinning=0 if self._index is None else self._index.pinning_sessions,
            counters=pb.Counters(**cache.counters.figures()),
            bench=pb.Counters(**cache.bench.figures()),
            namespaces=[
                pb.NamespaceStatus(
                    namespace=name,
                    quota_bytes=rules.quota_bytes(name),
                    ttl_s=rules.ttl_s(name),
                    **total._asdict(),
                )
                for name, total in named.items()
            ],
            other_namespaces=pb.NamespaceStatus(**others._asdict()),
            disk=None if self.disk is None else self.disk(),
            idle=None if self.idle is None else self.idle(),
            engines=self._streams.engines.statuses(),
            peers=None if self.peers is None else self.peers(),
            traffic=[
                pb.NamespaceCounters(
                    namespace=name,
                    quota_bytes=rules.quota_bytes(name),
                    ttl_s=rules.ttl_s(name),
                    **vars(counted),
                )
                for name, counted in cache.counters.namespaces.items()
            ],
            other_traffic=pb.NamespaceCounters(**vars(cache.counters.other_namespaces)),
        )

    def figures(self) -> Figures:
        """The figures that history keeps; cheap."""
        told, pools = self._cache.counters, self._cache.pools
        used_bytes = sum(pool.used_bytes for pool in pools if not pool.holds_replicas)
        lookups = told.hits, told.handed_over, told.misses
        return Figures(*lookups, told.saved_s, used_bytes, told.refused)

    def _read_pool(self, pool: Pool) -> pb.PoolStatus:
        """The pool's figures; granted memory counts as free."""
        memory = self._memory[pool.number]
        return pb.PoolStatus(
            pool=pool.number,
            kind=pool.kind,
            path=str(memory.path),
            populated_bytes=memory.populated_bytes,
            huge_bytes=memory.huge_bytes,
            problem=memory.problem,
            pool_bytes=pool.nbytes,
            used_bytes=pool.used_bytes,
            granted_bytes=pool.granted_bytes,
            reserved_bytes=pool.reserved_bytes,
            leased_bytes=pool.leased_bytes,
            free_bytes=pool.free_bytes + pool.granted_bytes,
            largest_free_bytes=pool.largest_free_bytes,
            fragmentation=pool.fragmentation,
            evictions=sum(pool.evictions.values()),
            worth_s=pool.worth_s,
            given_up_s=pool.given_up_s,
            frequency_exponent=pool.policy.weighing.frequency,
            density_exponent=pool.policy.weighing.density,
            kept=pool.kept,
            kept_bytes=pool.kept_bytes,
            kept_most_bytes=pool.kept_most_bytes,
            device_bytes=memory.device_bytes,
        )
