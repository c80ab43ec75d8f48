"""The core's figures, read at scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ecd.core.counters import IDLE_BOUNDS_S, SIZE_BOUNDS_BYTES
from ecd.ops.metrics.families import (
    Loop,
    OnLoop,
    counter_by,
    counters,
    gauge_by,
    gauges,
    histogram,
)
from ecd_proto.contract import pool_names
from ecd_proto.v1 import cache_pb2 as pb

OTHERS = "other"
"""The label of all namespaces without one of their own."""


class CoreCollector(Collector):
    """The core's figures, one line of `ecd-cli status` at a time."""

    def __init__(self, status: Callable[[], pb.StatusReply], loop: Loop) -> None:
        self._figures = OnLoop(status, loop)

    def collect(self) -> Iterable[Metric]:
        status = self._figures.get()
        if status is None:
            return
        yield from _of_traffic(status.counters)
        yield _of_bench(status.bench)
        yield from _of_sizes(status.counters)
        yield from _of_namespaces(status)
        yield from _of_namespaces_traffic(status)
        yield from _of_pools(status)
        yield from _of_now(status)
        if status.HasField("disk"):
            yield from _of_disk(status.disk)


def _of_traffic(counted: pb.Counters) -> Iterable[Metric]:
    rows = (
        (
            "peer_leases",
            "Entries leased to other nodes, which count the hits.",
            counted.peer_leases,
        ),
        (
            "misses",
            "Lookups that found nothing: the engine encodes, or the request fails.",
            counted.misses,
        ),
        ("puts", "Entries stored by clients and by fetches.", counted.puts),
        ("recovered", "Entries taken over from an earlier incarnation.", counted.recovered),
        ("duplicates", "Puts of entries that were stored already.", counted.duplicates),
        ("aborts", "Writes that were given up, those of dead writers included.", counted.aborts),
        ("copies", "Copies of entries made in GPUs' pools.", counted.copies),
        ("bytes_in", "Bytes of the entries stored by clients and by fetches.", counted.bytes_in),
        ("bytes_out", "Bytes of the entries that lookups found.", counted.bytes_out),
        (
            "saved_seconds",
            "What the entries of the reused hits had cost to encode: as reported, else by the fit.",
            counted.saved_s,
        ),
        ("leases_expired", "Leases that expired without being renewed.", counted.leases_expired),
        (
            "waits_expired",
            "Waits for entries that ended without one, because their time was over.",
            counted.waits_expired,
        ),
        (
            "costs_forgotten",
            "Cost estimates dropped, because there are too many namespaces.",
            counted.costs_forgotten,
        ),
    )
    yield from counters(rows)
    uses = {"reused": counted.hits - counted.handed_over, "handed_over": counted.handed_over}
    for label, name, text, values in (
        (
            "use",
            "hits",
            "Lookups that found their entry: reused in place of an encode, or handed over to the "
            "engine for which it was encoded.",
            uses,
        ),
        ("reason", "evictions", "Evicted entries, by reason.", counted.evictions),
        ("reason", "evicted_bytes", "Bytes of evicted entries, by reason.", counted.evicted_bytes),
        ("cause", "refused", "Refused requests, by cause.", counted.refused),
    ):
        yield counter_by(label, f"ecd_{name}", text, values.items())


def _of_bench(counted: pb.Counters) -> Metric:
    events = {
        "puts": counted.puts,
        "evictions": sum(counted.evictions.values()),
        "duplicates": counted.duplicates,
        "hits": counted.hits,
        "misses": counted.misses,
        "refused": sum(counted.refused.values()),
    }
    text = "Events of `ecd-cli bench`, left out elsewhere."
    return counter_by("event", "ecd_bench", text, events.items())


def _of_sizes(counted: pb.Counters) -> Iterable[Metric]:
    yield histogram(
        "ecd_eviction_idle_seconds",
        "How long entries that were evicted for room had not been used.",
        IDLE_BOUNDS_S,
        counted.idle_evictions,
        counted.idle_evictions_s,
    )
    yield histogram(
        "ecd_put_bytes",
        "Sizes of entries stored by clients and by fetches.",
        SIZE_BOUNDS_BYTES,
        counted.put_sizes,
        counted.bytes_in,
    )
    yield histogram(
        "ecd_hit_bytes",
        "Sizes of entries that readers found; of a client's burst the last 512 reads.",
        SIZE_BOUNDS_BYTES,
        counted.hit_sizes,
        counted.hit_sizes_bytes,
    )


def _of_namespaces(status: pb.StatusReply) -> Iterable[Metric]:
    """The namespaces' sizes; a namespace with the name OTHERS counts among the others."""
    named = [each for each in status.namespaces if each.namespace != OTHERS]
    entries, nbytes = status.entries, status.other_namespaces.nbytes
    nbytes += sum(each.nbytes for each in status.namespaces)
    entries -= sum(each.entries for each in named)
    nbytes -= sum(each.nbytes for each in named)
    by_entries = [(each.namespace, each.entries) for each in named]
    by_bytes = [(each.namespace, each.nbytes) for each in named]
    quotas = [(each.namespace, each.quota_bytes) for each in named if each.HasField("quota_bytes")]
    for name, text, values in (
        ("entries", "Entries of the namespace in memory.", [*by_entries, (OTHERS, entries)]),
        ("bytes", "Bytes of the namespace's entries in memory.", [*by_bytes, (OTHERS, nbytes)]),
        ("quota_bytes", "The namespace's quota, where it has one.", quotas),
    ):
        yield gauge_by("namespace", f"ecd_namespace_{name}", text, values)


def _of_namespaces_traffic(status: pb.StatusReply) -> Iterable[Metric]:
    """Lookups, evictions, refused puts and seconds saved, each a counter by namespace."""
    named = [each for each in status.traffic if each.namespace != OTHERS]
    rest = [status.other_traffic, *(each for each in status.traffic if each.namespace == OTHERS)]
    for name, text, field in (
        ("misses", "Lookups in the namespace that found nothing.", "misses"),
        ("evictions", "Evicted entries of the namespace.", "evictions"),
        ("refused", "Puts for which there was no room, by namespace.", "refused"),
        ("saved_seconds", "Seconds of encoding that the namespace's hits saved.", "saved_s"),
    ):
        values = [(each.namespace, getattr(each, field)) for each in named]
        others = sum(getattr(each, field) for each in rest)
        yield counter_by("namespace", f"ecd_namespace_{name}", text, [*values, (OTHERS, others)])
    hits = CounterMetricFamily(
        "ecd_namespace_hits",
        "Lookups in the namespace that found their entry; of a long burst an estimate.",
        labels=["namespace", "use"],
    )
    for name, parts in (*((each.namespace, [each]) for each in named), (OTHERS, rest)):
        for use in ("reused", "handed_over"):
            hits.add_metric([name, use], sum(getattr(each, use) for each in parts))
    yield hits


def _of_pools(status: pb.StatusReply) -> Iterable[Metric]:
    names = pool_names({pool.pool: pool.kind for pool in status.pools})
    for name, text, field in (
        ("bytes", "Size of the pool.", "pool_bytes"),
        (
            "populated_bytes",
            "Bytes of the pool that were allocated; 0 for a GPU without room.",
            "populated_bytes",
        ),
        ("used_bytes", "Bytes of entries and of what is being written.", "used_bytes"),
        ("granted_bytes", "Bytes granted to clients for their next puts.", "granted_bytes"),
        ("reserved_bytes", "Bytes of entries that are being written.", "reserved_bytes"),
        (
            "leased_bytes",
            "Bytes of entries that clients hold, so that they are not evicted.",
            "leased_bytes",
        ),
        (
            "worth_seconds",
            "Seconds to get the pool's entries back, by encoding or fetching.",
            "worth_s",
        ),
        (
            "frequency_exponent",
            "How much an entry's uses weigh in eviction; 0: not at all.",
            "frequency_exponent",
        ),
        (
            "density_exponent",
            "How much seconds per byte weigh in eviction; LRU if the uses' is 0, too.",
            "density_exponent",
        ),
        (
            "free_bytes",
            "Bytes that no entry takes, those granted to clients included.",
            "free_bytes",
        ),
        ("largest_free_bytes", "Bytes of the pool's largest free piece.", "largest_free_bytes"),
        ("kept_bytes", "Bytes of entries that operators keep.", "kept_bytes"),
    ):
        values = [(names[pool.pool], getattr(pool, field)) for pool in status.pools]
        yield gauge_by("pool", f"ecd_pool_{name}", text, values)
    for name, text, field in (
        ("evictions", "Entries and copies evicted from the pool.", "evictions"),
        (
            "given_up_seconds",
            "Seconds to get back what was evicted for room, whether or not it is wanted.",
            "given_up_s",
        ),
    ):
        values = [(names[pool.pool], getattr(pool, field)) for pool in status.pools]
        yield counter_by("pool", f"ecd_pool_{name}", text, values)


def _of_now(status: pb.StatusReply) -> Iterable[Metric]:
    rows = (
        ("entries", "Entries in memory that clients can read.", status.entries),
        (
            "unlisted_entries",
            "Entries that do not fit into the mapped index: each read of them is a call.",
            status.unlisted,
        ),
        ("sessions", "Sessions of clients, those that are ending included.", status.sessions),
        ("leases", "Leases and pins of entries, at present.", status.leases),
        ("waits", "Clients' waits for entries, at present.", status.waits),
        (
            "sessions_waiting_for_dma",
            "Sessions of dead clients to whose memory a device may still write.",
            status.waiting_for_dma,
        ),
        (
            "pinning_sessions",
            "Sessions whose clients have pinned the pool for their GPUs.",
            status.pinning,
        ),
    )
    return gauges(rows)


def _of_disk(disk: pb.DiskStatus) -> Iterable[Metric]:
    events = (
        ("reads", "Entries that were read from disk into memory.", disk.reads),
        ("read_bytes", "Bytes of entries that were read from disk into memory.", disk.read_bytes),
        ("read_seconds", "Time that reading entries from disk into memory took.", disk.read_s),
        ("writes", "Entries written to disk.", disk.writes),
        (
            "written_bytes",
            "Bytes written to disk, which count against the write budget.",
            disk.written_bytes,
        ),
        ("write_seconds", "Time that writing entries to disk took.", disk.write_s),
        ("evictions", "Files that the disk tier removed to make room.", disk.evictions),
        ("kept", "Entries evicted from memory that the disk tier still has.", disk.kept),
        ("lost", "Entries evicted from memory that the disk tier does not have.", disk.lost),
        (
            "expired",
            "Files that the disk tier removed because their entries' TTL was over.",
            disk.expired,
        ),
    )
    yield from counters(events, "ecd_disk_")
    text = "Failed operations of the disk tier, by kind."
    yield counter_by("kind", "ecd_disk_failures", text, disk.failures.items())
    text = "Reads and writes that the disk tier left out, by cause."
    yield counter_by("cause", "ecd_disk_skipped", text, disk.skipped.items())
    figures = (
        ("pool_bytes", "Size of the disk tier.", disk.pool_bytes),
        ("used_bytes", "Bytes of the disk tier's files.", disk.used_bytes),
        ("entries", "Entries in the disk tier.", disk.entries),
        ("write_bytes_per_second", "The disk tier's write budget.", disk.write_bytes_per_s),
    )
    yield from gauges(figures, "ecd_disk_")
    resting = {"reads": disk.reads_rest, "writes": disk.writes_rest}
    text = "Whether the disk tier's reads, or its writes, are suspended after failures."
    yield gauge_by("of", "ecd_disk_resting", text, resting.items())


class TraceCollector(Collector):
    """The figure of the trace of evictions."""

    def __init__(self, lost: Callable[[], float]) -> None:
        self._lost = lost

    def collect(self) -> Iterable[Metric]:
        text = "Records that the trace lacks, because they came too quickly."
        yield from counters([("trace_lost_records", text, self._lost())])
