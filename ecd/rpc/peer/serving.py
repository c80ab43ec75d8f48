"""Turns of the nodes that want one large entry: some read it at a time, the others wait.

Whenever a node has read it, some of those that wait are sent there, so that the readers double in
number every few reads, as in a binomial broadcast (Thakur et al., IJHPCA 19(1), 2005).

A node has one turn at an entry and one place among those that wait for it, however often it asks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ecd.base.clock import Clock
from ecd.core.model.types import EntryId
from ecd.live.turns import PIECE

MAX_WAITING = 4096
"""Turns in all queues; further nodes are told that the limit is reached."""
MAX_WAITING_OF_NODE = 64
"""Turns in queues of one node, each at another entry."""
TURN_S = 1.0
"""Maximum time that a turn may block others, so that a stopped node cannot block them for good."""


@dataclass(eq=False)
class Turn:
    """One node's question for an entry, which is leased to it."""

    entry: EntryId
    node: str
    begin: Callable[[], None]
    """Sends the node, which has waited, its lease."""
    leave: Callable[[str], None]
    """Redirects the node to another one, or nowhere (""), and gives its lease back."""
    or_elsewhere: bool = True
    """Whether the node may be redirected to another one."""
    begun_s: float = 0.0
    until_s: float = 0.0
    """When the node stops waiting."""
    timer: asyncio.TimerHandle | None = None

    def no_longer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


@dataclass
class _Line:
    """The turns at one entry, in order, by their nodes."""

    reading: dict[str, Turn] = field(default_factory=dict)
    waiting: dict[str, Turn] = field(default_factory=dict)

    def waits(self, turn: Turn) -> bool:
        return self.waiting.get(turn.node) is turn

    def following(self) -> Turn | None:
        """The first waiting turn whose node does not read under another turn."""
        turns = (turn for node, turn in self.waiting.items() if node not in self.reading)
        return next(turns, None)


class Serving:
    """All turns at one daemon, on its event loop."""

    def __init__(self, readers: int, refuse: Callable[[str, int], None], clock: Clock) -> None:
        """`readers` of one entry at a time; `refuse` counts refusals at a bound."""
        self.readers, self._refuse, self._clock = readers, refuse, clock
        self.lines: dict[EntryId, _Line] = {}
        self.waiting = 0
        self._waiting_of: Counter[str] = Counter()  # by node

    def ask(self, turn: Turn, wait_s: float) -> bool:
        """Whether the turn begins now; else it waits at most so long.

        An older question of the node, if it waits for the entry, is refused in favour of this one.
        """
        line = self.lines.setdefault(turn.entry, _Line())
        if len(line.reading) < self.readers and turn.node not in line.reading:
            self._begin(line, turn)
            return True
        if (older := line.waiting.get(turn.node)) is not None:
            self._refuse("peer_turns", 1)
            self._send(line, older, "")
        waiting = (self.waiting, MAX_WAITING), (self._waiting_of[turn.node], MAX_WAITING_OF_NODE)
        for limit in (limit for count, limit in waiting if count >= limit):
            self._refuse("peer_turns", limit)
            turn.leave("")
            return False
        line.waiting[turn.node] = turn
        self.waiting += 1
        self._waiting_of[turn.node] += 1
        turn.until_s = self._clock.now_s() + wait_s
        self._end_in(wait_s, turn)
        return False

    def end(self, turn: Turn, is_stored: bool = False) -> None:
        """End a turn, or a wait for it; `is_stored`: its node has the entry now."""
        turn.no_longer()
        line = self.lines.get(turn.entry, _Line())
        if line.waits(turn):
            self._send(line, turn, "")
            return
        if line.reading.get(turn.node) is turn:
            del line.reading[turn.node]
        if is_stored:
            _in_pieces(partial(self._send_on, line, turn.node), self._last(line, turn))
        now_s = self._clock.now_s()
        while len(line.reading) < self.readers and (following := line.following()) is not None:
            if now_s >= following.until_s:
                self._end_late(following)
                continue
            self._take(line, following)
            self._begin(line, following)
            following.begin()
        if not line.reading:
            self.lines.pop(turn.entry, None)

    def end_all(self, turns: Sequence[Turn]) -> None:
        """End turns of one node in pieces; waiting ones first, so that none of them begins."""
        reading = []
        for turn in turns:
            line = self.lines.get(turn.entry)
            if line is not None and line.waits(turn):
                self.end(turn)
            else:
                reading.append(turn)
        _in_pieces(self.end, reading)

    def _last(self, line: _Line, ended: Turn) -> list[Turn]:
        """Those that wait and may go where the entry has just been read.

        All nodes that have the entry, or most of it, get equal parts; the free turns stay here.
        """
        now_s = self._clock.now_s()
        took_s = max(now_s - ended.begun_s, 1e-6)
        parts = 2 + sum(min(1.0, (now_s - each.begun_s) / took_s) for each in line.reading.values())
        waiting = list(line.waiting.values())
        stay = self.readers - len(line.reading)
        leave = min(round(len(waiting) / parts), max(0, len(waiting) - stay))
        may_leave = [each for each in waiting[stay:] if each.or_elsewhere]
        return may_leave[len(may_leave) - leave :] if leave < len(may_leave) else may_leave

    def _begin(self, line: _Line, turn: Turn) -> None:
        line.reading[turn.node] = turn
        turn.begun_s = self._clock.now_s()
        self._end_in(TURN_S, turn)

    def _send_on(self, line: _Line, node: str, turn: Turn) -> None:
        if line.waits(turn):  # still
            self._send(line, turn, node)

    def _send(self, line: _Line, turn: Turn, node: str) -> None:
        self._take(line, turn)
        turn.leave(node)

    def _take(self, line: _Line, turn: Turn) -> None:
        turn.no_longer()
        del line.waiting[turn.node]
        self.waiting -= 1
        self._waiting_of[turn.node] -= 1
        if not self._waiting_of[turn.node]:
            del self._waiting_of[turn.node]

    def _end_in(self, seconds: float, turn: Turn) -> None:
        turn.timer = asyncio.get_running_loop().call_later(seconds, self._end_late, turn)

    def _end_late(self, turn: Turn) -> None:
        line = self.lines[turn.entry]
        if line.waits(turn):
            self._refuse("peer_turns", MAX_WAITING)
        elif line.waiting:
            self._refuse("long_peer_turns", self.readers)
        self.end(turn)


def _in_pieces(do: Callable[[Turn], None], turns: list[Turn]) -> None:
    """Apply it to all turns, from the last on, some in each turn of the event loop."""
    for turn in turns[-PIECE:]:
        do(turn)
    del turns[-PIECE:]
    if turns:
        asyncio.get_running_loop().call_soon(_in_pieces, do, turns)
