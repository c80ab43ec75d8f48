"""The counters by which sessions report reads without a call."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ecd.core.model.board import Uses
from ecd.memory.session_page import MAX_GROWTH, SessionPage
from ecd_proto.shm.session_page import PAGE_WORDS, USE_COUNTERS

MAX_USES = 1024
"""Entries ranked anew at a time."""
MAX_USED_PAGES = 128
"""Pages whose uses are read at a time: each takes some 5 us."""
_NONE = (0, 0, 0, 0)
_WORD = 1 << 64
_NOTHING = 1 << 63
"""Value when all uses in the pages have been counted; 0 when that is unknown."""


def uncounted(said: Iterable[Sequence[int]], told: Sequence[int]) -> Uses:
    """The uses that a daemon that has ended had not counted.

    `said` is what its pages say, `told` what its index says of that, both in the order of
    USE_COUNTERS. None where they contradict each other: a client may have written anything.
    """
    sums = map(sum, zip(_NONE, *said, strict=True))
    hits, nbytes, misses, duplicates = (
        (total - counted + _NOTHING) % _WORD for total, counted in zip(sums, told, strict=True)
    )
    if max(hits, nbytes, misses, duplicates) > MAX_GROWTH:
        return Uses()
    return Uses((), hits, nbytes, misses, duplicates)


class UseCounters:
    """The counters in all pages, as last read."""

    def __init__(self, pages: memoryview, sessions: int, told: memoryview) -> None:
        """`pages` are the words of all sessions' pages, `told` those of FIRST_COUNTED_WORD."""
        self._told = told  # zeros, until `begin`
        self._counters = [pages[word::PAGE_WORDS] for word in USE_COUNTERS]
        self._last = [_NONE] * sessions
        self._left: deque[Uses] = deque()  # of pages that were forgotten since
        self._next = 0  # the page whose uses come first the next time

    def take(self, used: int, page_at: Callable[[int], SessionPage | None]) -> Uses:
        """The new uses in some of the first `used` pages, in turns, so that no call takes long."""
        counted = list(zip(*(words[:used].tolist() for words in self._counters), strict=True))
        changed = [page for page in range(used) if counted[page] != self._last[page]]
        if not changed and not self._left:
            return Uses()
        turn = bisect_left(changed, self._next)
        taken: list[Uses] = []
        known = done = 0
        while self._left and known < MAX_USES:
            taken.append(self._left.popleft())
            known += taken[-1].named
        for number in (changed[turn:] + changed[:turn])[:MAX_USED_PAGES]:
            if known >= MAX_USES:
                break
            self._last[number] = counted[number]
            self._next = number + 1
            page = page_at(number)
            if page is not None:
                taken.append(page.drain_uses(counted[number]))
                known += taken[-1].named
            done += 1
        total = Uses(
            hits=sum(uses.hits for uses in taken),
            nbytes=sum(uses.nbytes for uses in taken),
            misses=sum(uses.misses for uses in taken),
            duplicates=sum(uses.duplicates for uses in taken),
            is_all=done == len(changed) and not self._left,
            by_client=tuple(taken),
        )
        self._tell(_numbers(total))
        return total

    def forget(self, page: SessionPage) -> None:
        """Save the last uses of a page, which is cleared next, for `take`."""
        number = page.number
        first, second, third, fourth = (words[number] for words in self._counters)
        self._left.append(page.drain_uses((first, second, third, fourth)))
        self._last[number] = _NONE
        self._tell(page.taken, sign=-1)

    def begin(self, earlier: Uses) -> None:
        """Begin to tell the next daemon what has been counted.

        Uses of an earlier incarnation's pages are counted with the next `take`.
        """
        self._left.append(earlier)
        for word in range(len(self._told)):
            self._told[word] = _NOTHING
        self._tell(_numbers(earlier), sign=-1)

    def _tell(self, numbers: Sequence[int], sign: int = 1) -> None:
        """Record for the next daemon by how much the counted uses of the pages changed."""
        for word, number in enumerate(numbers):
            self._told[word] = (self._told[word] + sign * number) % _WORD


def _numbers(uses: Uses) -> tuple[int, int, int, int]:
    """The uses in the order of USE_COUNTERS."""
    return uses.hits, uses.nbytes, uses.misses, uses.duplicates
