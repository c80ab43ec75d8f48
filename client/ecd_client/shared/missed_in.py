"""A client's misses in each namespace, counted in its session's page."""

from __future__ import annotations

from ecd_proto.shm.session_page import FIRST_MISSED_WORD, MISSED_WORDS, OTHER_NAMESPACES

_PAIRS = MISSED_WORDS // 2


class MissedIn:
    """Counts in pairs of words: a namespace takes the next free pair with its first miss.

    The last pair is for all namespaces that come later. Not thread-safe.
    """

    def __init__(self, page: memoryview) -> None:
        self._page = page
        self._pairs: dict[int, int] = {}

    def count(self, number: int) -> None:
        """Count a miss in the namespace with this number in the index."""
        if number not in self._pairs and len(self._pairs) >= _PAIRS - 1:
            number = OTHER_NAMESPACES
        pair = self._pairs.get(number)
        if pair is None:
            pair = self._pairs[number] = FIRST_MISSED_WORD + 2 * len(self._pairs)
            self._page[pair] = number
        self._page[pair + 1] += 1
