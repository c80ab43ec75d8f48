"""The network between simulated nodes: its delays, what is cut, and the connections that break."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.clock import OUTSIDE, Process, VirtualLoop

if TYPE_CHECKING:
    from simulation.stream import Stream

KEEPALIVE_S = (10.0, 13.0)


@dataclass
class Weather:
    """How bad the network is; all zero is a good one."""

    delay_s: tuple[float, float] = (0.0001, 0.0005)
    spike_s: float = 0.0
    spikes: float = 0.0  # share of messages that take up to `spike_s` longer
    breaks: float = 0.0  # share of messages with which the stream breaks
    rogue: float = 0.0  # share of messages that are lost, doubled or swapped
    failed_reads: float = 0.0
    hung_reads: float = 0.0
    bytes_per_s: float = 2e8


class Network:
    """All nodes' addresses, the streams between them, and what is cut."""

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self.loop, self.rng = loop, rng
        self.weather = Weather()
        self.cut: set[tuple[str, str]] = set()
        """Directions, by the names of both nodes, in which nothing arrives."""
        self.listening: dict[str, tuple[Process, Any]] = {}
        """The process and Peer service that answer at each node's address."""
        self.streams: list[Stream] = []

    def delay_s(self) -> float:
        delay_s = self.rng.uniform(*self.weather.delay_s)
        if self.rng.random() < self.weather.spikes:
            delay_s += self.rng.uniform(0.0, self.weather.spike_s)
        return delay_s

    def cut_off(self, source: str, target: str) -> None:
        self.cut.add((source, target))
        for stream in self.streams:
            if {stream.client, stream.server} == {source, target}:
                later_s = self.rng.uniform(*KEEPALIVE_S)
                self.loop.call_later(later_s, stream.break_if_cut, context=OUTSIDE)

    def heal(self) -> None:
        self.cut.clear()
        for stream in self.streams:
            stream.up.flush()
            stream.down.flush()

    def end_of(self, process: Process, node: str, silently: bool) -> None:
        """The process has died: its kernel breaks its connections, unless that died, too."""
        if self.listening.get(node, (None,))[0] is process:
            del self.listening[node]
        for stream in list(self.streams):
            if process in stream.processes:
                side = stream.processes.index(process)
                if silently:
                    later_s = self.rng.uniform(*KEEPALIVE_S)
                    self.loop.call_later(later_s, stream.lose, side, context=OUTSIDE)
                else:
                    stream.lose(side)

    def stop_serving(self, process: Process) -> None:
        """Cancel the calls that are left, as a server does after its grace."""
        for stream in list(self.streams):
            if stream.processes[1] is process:
                stream.break_now()
