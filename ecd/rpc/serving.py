"""Turns of the nodes that want one large entry: some read it at a time, the others wait.

Whenever a node has read it, some of those that wait are sent there, so that the readers double in
number every few reads, as in a binomial broadcast (Thakur et al., IJHPCA 19(1), 2005).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ecd.core.types import EntryId

MAX_WAITING = 4096
"""Nodes that wait for their turns; more are told that the limit is reached."""
TURN_S = 1.0
"""How long a turn may keep others waiting: a node that has stopped must not keep them for good."""
SENT_AT_ONCE = 32
"""Nodes that are sent away in one turn of the event loop, each with a message of its own."""


@dataclass(eq=False)
class Turn:
    """One node's question for an entry, which is leased to it."""

    entry: EntryId
    node: str
    begin: Callable[[], None]
    """Tells the node, which has waited, its lease."""
    leave: Callable[[str], None]
    """Sends the node to another one, or nowhere (""), and gives its lease back."""
    or_elsewhere: bool = True
    """Whether the node may be sent to another one."""
    begun_s: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def no_longer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


@dataclass
class _Line:
    """The turns at one entry, in order."""

    reading: dict[Turn, None] = field(default_factory=dict)
    waiting: dict[Turn, None] = field(default_factory=dict)


class Serving:
    """All turns at one daemon, on its event loop."""

    def __init__(self, readers: int, refuse: Callable[[str, int], None]) -> None:
        """`readers` of one entry at a time; `refuse` counts what meets a bound."""
        self.readers, self._refuse = readers, refuse
        self.lines: dict[EntryId, _Line] = {}
        self.waiting = 0

    def ask(self, turn: Turn, wait_s: float) -> bool:
        """Whether the turn begins now; else it waits at most so long."""
        line = self.lines.setdefault(turn.entry, _Line())
        if len(line.reading) < self.readers:
            self._begin(line, turn)
            return True
        if self.waiting >= MAX_WAITING:
            self._refuse("peer_turns", MAX_WAITING)
            turn.leave("")
            return False
        line.waiting[turn] = None
        self.waiting += 1
        self._end_in(wait_s, turn)
        return False

    def end(self, turn: Turn, is_stored: bool = False) -> None:
        """End a turn, or stop waiting for it; `is_stored`: its node has the entry now."""
        turn.no_longer()
        line = self.lines.get(turn.entry, _Line())
        if turn in line.waiting:
            self._send(line, turn, "")
            return
        line.reading.pop(turn, None)
        if is_stored:
            self._send_all(line, self._last(line, turn), turn.node)
        while line.waiting and len(line.reading) < self.readers:
            following = next(iter(line.waiting))
            self._take(line, following)
            self._begin(line, following)
            following.begin()
        if not line.reading:
            self.lines.pop(turn.entry, None)

    def _last(self, line: _Line, ended: Turn) -> list[Turn]:
        """Those that wait and may go where the entry has just been read.

        All nodes that have the entry, or most of it, get equal parts; the free turns stay here.
        """
        now_s = asyncio.get_running_loop().time()
        took_s = max(now_s - ended.begun_s, 1e-6)
        parts = 2 + sum(min(1.0, (now_s - each.begun_s) / took_s) for each in line.reading)
        waiting = list(line.waiting)
        stay = self.readers - len(line.reading)
        leave = min(round(len(waiting) / parts), max(0, len(waiting) - stay))
        may_leave = [each for each in waiting[stay:] if each.or_elsewhere]
        return may_leave[len(may_leave) - leave :] if leave < len(may_leave) else may_leave

    def _begin(self, line: _Line, turn: Turn) -> None:
        line.reading[turn] = None
        turn.begun_s = asyncio.get_running_loop().time()
        self._end_in(TURN_S, turn)

    def _send_all(self, line: _Line, turns: list[Turn], node: str) -> None:
        for turn in turns[-SENT_AT_ONCE:]:
            if turn in line.waiting:  # still
                self._send(line, turn, node)
        del turns[-SENT_AT_ONCE:]
        if turns:
            asyncio.get_running_loop().call_soon(self._send_all, line, turns, node)

    def _send(self, line: _Line, turn: Turn, node: str) -> None:
        self._take(line, turn)
        turn.leave(node)

    def _take(self, line: _Line, turn: Turn) -> None:
        turn.no_longer()
        del line.waiting[turn]
        self.waiting -= 1

    def _end_in(self, seconds: float, turn: Turn) -> None:
        turn.timer = asyncio.get_running_loop().call_later(seconds, self._end_late, turn)

    def _end_late(self, turn: Turn) -> None:
        line = self.lines[turn.entry]
        if turn in line.waiting:
            self._refuse("peer_turns", MAX_WAITING)
        elif line.waiting:
            self._refuse("long_peer_turns", self.readers)
        self.end(turn)
