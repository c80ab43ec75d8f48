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
        text = "Fetches of entries from other nodes, by outcome."
        yield counter_by("outcome", "ecd_fetches", text, status.fetches.items())
        events = (
            ("hints_ignored", "Hints to nodes that hint_networks does not allow.", ignored),
            (
                "hints_refused",
                "Hints and offers not followed: too many lead to nodes that were never reached.",
                refused,
            ),
            (
                "read_retries",
                "Reads from other nodes that failed and were tried again.",
                status.read_retries,
            ),
            (
                "speculative_reads",
                "Reads from other nodes that began by a hint, before the entry was leased.",
                status.speculative_reads,
            ),
            (
                "speculative_reads_used",
                "Speculative reads whose bytes were the entry's.",
                status.speculative_reads_used,
            ),
            (
                "set_aside",
                "Reads from other nodes that were abandoned while under way.",
                status.set_aside,
            ),
            (
                "directory_lookups",
                "Keys that were looked up in the directory.",
                status.directory.lookups,
            ),
            (
                "directory_errors",
                "Questions that the directory did not answer in time.",
                status.directory.errors,
            ),
        )
        yield from counters(events)
        figures_now = (
            (
                "flights",
                "Fetches from other nodes and from disk that are under way.",
                status.flights,
            ),
            (
                "set_aside_bytes",
                "Bytes of memory of abandoned fetches, to which a read may still write.",
                status.set_aside_bytes,
            ),
            ("directory_up", "Whether the directory answers.", status.directory.up),
            (
                "directory_unpublished",
                "Changes that the directory has not received yet.",
                status.directory.unpublished,
            ),
            (
                "directory_lag_seconds",
                "Age of the oldest change that the directory has not received yet.",
                status.directory.lag_s,
            ),
            (
                "peers_never_reached",
                "Nodes that hints or the directory name and that have never answered.",
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
    text = "Whether there is a connection to the other node."
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
            (
                "events",
                "Keys that were published to subscribers as stored or removed.",
                figures["events"],
            ),
            ("event_batches", "Messages in which events were published.", figures["batches"]),
            (
                "event_losses",
                "How often a slow subscriber of events began to lose messages.",
                figures["losses"],
            ),
            (
                "event_replays",
                "Requests of events' subscribers for lost messages.",
                figures["replays"],
            ),
            (
                "event_snapshots",
                "Requests of events' subscribers for all entries.",
                figures["snapshots"],
            ),
            (
                "event_requests_refused",
                "Requests of events' subscribers that were malformed, or too many.",
                figures["refused"],
            ),
            (
                "event_answers_given_up",
                "Answers to subscribers of events that these did not read in time.",
                figures["given_up"],
            ),
        )
        yield from counters(rows)
