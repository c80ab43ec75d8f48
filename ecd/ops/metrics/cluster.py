"""The figures of other nodes, and of the events for routers, read at scrape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ecd.ops.metrics.families import Loop, OnLoop, counter_by, counters, gauge_by, gauges
from ecd_proto.contract import NEVER_ASKED
from ecd_proto.v1 import cache_pb2 as pb


class PeersCollector(Collector):
    """The figures of other nodes, one line of `ecd-cli peers` at a time."""

    def __init__(
        self,
        status: Callable[[], pb.PeersReply],
        hints: Callable[[], tuple[int, int]],
        never_reached: Callable[[], Collection[str]],
        loop: Loop,
    ) -> None:
        self._figures = OnLoop(lambda: (status(), hints(), never_reached()), loop)

    def collect(self) -> Iterable[Metric]:
        figures = self._figures.get()
        if figures is None:
            return
        status, (ignored, refused), never_reached = figures
        text = "Entries that were to come from another node."
        yield counter_by("outcome", "ecd_fetches", text, status.fetches.items())
        events = (
            ("hints_ignored", "Hints to nodes that nothing allows to ask.", ignored),
            (
                "hints_refused",
                "Hints and offers not followed: too many lead to nodes never reached.",
                refused,
            ),
            ("read_retries", "Reads that failed and were tried again.", status.read_retries),
            (
                "speculative_reads",
                "Speculative reads: begun by a hint, before their lease.",
                status.speculative_reads,
            ),
            (
                "speculative_reads_used",
                "Speculative reads that brought the entry.",
                status.speculative_reads_used,
            ),
            ("set_aside", "Reads given up while they were under way.", status.set_aside),
            ("directory_lookups", "Keys asked of the directory.", status.directory.lookups),
            (
                "directory_errors",
                "Questions the directory did not answer in time.",
                status.directory.errors,
            ),
        )
        yield from counters(events)
        figures_now = (
            ("flights", "Fetches under way.", status.flights),
            (
                "set_aside_bytes",
                "Bytes of fetches given up to which a read may still write.",
                status.set_aside_bytes,
            ),
            ("directory_up", "Whether the directory answers.", status.directory.up),
            (
                "directory_unpublished",
                "Changes the directory was not yet told.",
                status.directory.unpublished,
            ),
            (
                "directory_lag_seconds",
                "Age of the oldest change not yet told.",
                status.directory.lag_s,
            ),
            (
                "peers_never_reached",
                "Nodes that hints or the directory name, and that never answered.",
                len(never_reached),
            ),
        )
        yield from gauges(figures_now)
        yield from _of_each(
            peer
            for peer in status.peers
            if not (peer.state == NEVER_ASKED or peer.node in never_reached)
        )


def _of_each(peers: Iterable[pb.PeerStatus]) -> Iterable[Metric]:
    peers = list(peers)
    for name, text, field in (
        ("reads", "Entries read from a peer.", "reads"),
        ("read_bytes", "Bytes read from a peer.", "read_bytes"),
        (
            "failed_reads",
            "Reads from a peer that failed; most are tried again.",
            "failed_reads",
        ),
    ):
        values = [(peer.node, getattr(peer, field)) for peer in peers]
        yield counter_by("peer", f"ecd_peer_{name}", text, values)
    text = "Whether there is a link to the peer."
    connected = [(peer.node, peer.state == "connected") for peer in peers]
    yield gauge_by("peer", "ecd_peer_connected", text, connected)
    text = "Bandwidth of reads from a peer, as measured; 0 while it is unknown."
    bandwidths = [(peer.node, peer.bytes_per_s) for peer in peers]
    yield gauge_by("peer", "ecd_peer_read_bytes_per_second", text, bandwidths)


class EventsCollector(Collector):
    """The figures of the stream of stored and removed entries."""

    def __init__(self, figures: Callable[[], Mapping[str, int]], loop: Loop) -> None:
        self._figures = OnLoop(figures, loop)

    def collect(self) -> Iterable[Metric]:
        figures = self._figures.get()
        if figures is None:
            return
        rows = (
            ("events", "Keys published as stored or removed.", figures["events"]),
            ("event_batches", "Messages in which they were published.", figures["batches"]),
            (
                "event_losses",
                "Times that a slow subscriber began to lose messages.",
                figures["losses"],
            ),
            ("event_replays", "Requests for lost messages.", figures["replays"]),
            ("event_snapshots", "Requests for all entries.", figures["snapshots"]),
            (
                "event_requests_refused",
                "Requests without sense, or one too many.",
                figures["refused"],
            ),
            ("event_answers_given_up", "Answers that were not taken in time.", figures["given_up"]),
        )
        yield from counters(rows)
