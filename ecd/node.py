"""One node's cache on its event loop, without files, servers and peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ecd.base.clock import Clock
from ecd.base.identity import NodeIdentity
from ecd.core.cache import DEFAULT_LIMITS, NO_RULES, Cache
from ecd.core.model.rules import Rules
from ecd.core.policy.policy import Lru
from ecd.core.policy.value_density import ValueDensity, fingerprints
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.live.flights import Flights
from ecd.live.live import LiveCache
from ecd.live.slow_log import SlowLog
from ecd.memory.device import DevicePool
from ecd.memory.host import HostPool
from ecd.memory.shared_index import SharedIndex
from ecd.ops.trace import Recorder
from ecd.rpc.cache.cache_service import CacheService, Monitor, Observe
from ecd.rpc.cache.origins import DiskEntries, NoDisk, OtherNodes, Recovering
from ecd.rpc.cache.puts import Doorbell, PutIntake
from ecd.rpc.cache.sessions import OpenedFiles, SessionStreams
from ecd_proto.shm.files import GRANULE_BYTES


@dataclass(frozen=True)
class SharedBoard:
    """Memory and socket through which clients read and write without a call, as far as they exist.

    Without an index every get is a call; without a doorbell every put is one.
    """

    index: SharedIndex | None = None
    doorbell: Doorbell | None = None


def make_cache(
    memory: Mapping[int, HostPool],
    lease_ttl_s: float,
    board: SharedBoard,
    clock: Clock,
    devices: Mapping[int, DevicePool] = MappingProxyType({}),
    eviction: Literal["value", "lru"] = "value",
    recorder: Recorder | None = None,
    rules: Rules = NO_RULES,
) -> Cache:
    """The core over these pools, by their numbers, the nearest to readers first.

    `eviction` is the host pools' policy. Device pools keep what was read last: an entry there
    saves its copy alone, whatever it cost to encode. `recorder` traces the first pool.
    """
    assert len(memory) == 1 or not devices, "a copy must have one pool to come from"

    fingerprint = fingerprints(clock.secret(16))

    def pool(number: int, nbytes: int) -> Pool:
        policy = Lru() if eviction == "lru" else ValueDensity(nbytes, fingerprint)
        if recorder is not None and number == next(iter(memory)):
            place = number, nbytes, GRANULE_BYTES
            return recorder.pool(place, policy, eviction, fingerprint)
        return Pool(Allocator(number, nbytes, GRANULE_BYTES), policy=policy)

    pools = [pool(number, each.nbytes) for number, each in memory.items()]
    pools += [
        Pool(Allocator(number, each.nbytes, GRANULE_BYTES), "device", holds_replicas=True)
        for number, each in devices.items()
    ]
    return Cache(pools, lease_ttl_s, DEFAULT_LIMITS, board.index, rules)


def live_cache(cache: Cache, board: SharedBoard, observe: Observe, clock: Clock) -> LiveCache:
    """The core behind its front door; `observe` is told how long each put without a call took."""
    if board.index is None or board.doorbell is None:
        return LiveCache(cache, clock)
    intake = PutIntake(cache, board.index, board.doorbell, observe, clock)
    return LiveCache(cache, clock, intake)


class Node:
    """The live cache of one node, the flights to it, and the sessions of its clients."""

    def __init__(
        self,
        live: LiveCache,
        files: OpenedFiles,
        identity: NodeIdentity,
        slow_log: SlowLog | None = None,
    ) -> None:
        self.live, live.makings.locks = live, files
        self.flights = Flights(live, slow_log=slow_log)
        self.streams = SessionStreams(live, self.flights, files, identity)

    def service(
        self,
        others: OtherNodes,
        recovery: Recovering,
        monitor: Monitor,
        disk: DiskEntries | None = None,
    ) -> CacheService:
        """The service that engines on this node call."""
        return CacheService(
            self.live, self.streams, self.flights, others, recovery, disk or NoDisk(), monitor
        )
