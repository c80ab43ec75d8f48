"""The counters by which sessions say what they read without a call."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from ecd.core.board import Uses
from ecd.memory.session_page import SessionPage
from ecd_proto.shm.session_page import PAGE_WORDS, USE_COUNTERS

MAX_USES = 1024
"""Entries ranked anew at a time."""
MAX_USED_PAGES = 128
"""Pages whose uses are taken at a time: each takes some 5 us."""
_NONE = (0, 0, 0, 0)


class UseCounters:
    """The counters in all pages, as last read."""

    def __init__(self, pages: memoryview, sessions: int) -> None:
        """`pages` are the words of all sessions' pages."""
        self._counters = [pages[word::PAGE_WORDS] for word in USE_COUNTERS]
        self._last = [_NONE] * sessions
        self._left: deque[Uses] = deque()  # of pages that were forgotten since
        self._next = 0  # the page whose uses come first the next time

    def take(self, used: int, page_at: Callable[[int], SessionPage | None]) -> Uses:
        """The new uses in some of the first `used` pages, in turns, so that no call takes long."""
        counted = list(zip(*(words[:used].tolist() for words in self._counters), strict=True))
        changed = [page for page in range(used) if counted[page] != self._last[page]]
        turn = bisect_left(changed, self._next)
        taken: list[Uses] = []
        known = 0
        while self._left and known < MAX_USES:
            taken.append(self._left.popleft())
            known += len(taken[-1].entries)
        for number in (changed[turn:] + changed[:turn])[:MAX_USED_PAGES]:
            self._last[number] = counted[number]
            page = page_at(number)
            if page is None:
                continue
            taken.append(page.drain_uses(counted[number]))
            known += len(taken[-1].entries)
            self._next = number + 1
            if known >= MAX_USES:
                break
        return Uses(
            tuple(entry for uses in taken for entry in uses.entries),
            sum(uses.hits for uses in taken),
            sum(uses.nbytes for uses in taken),
            sum(uses.misses for uses in taken),
            sum(uses.duplicates for uses in taken),
        )

    def forget(self, page: SessionPage) -> None:
        """Keep the last uses of a page, which is cleared next, for `take`."""
        number = page.number
        first, second, third, fourth = (words[number] for words in self._counters)
        self._left.append(page.drain_uses((first, second, third, fourth)))
        self._last[number] = _NONE
