"""How often evicted keys were used, in memory of fixed size."""

from __future__ import annotations

MAX_FREQUENCY = 15
_COUNTER_BYTES = 1 << 12
"""Bytes of the pool for which there is one counter."""
_COUNTERS = range(1 << 12, (1 << 22) + 1)
_SLICE = 1 << 12
_LINE = 64
_USES_PER_ENTRY = 10
_HALVED = bytes(value >> 1 for value in range(256))


class Frequencies:
    """A counting sketch (TinyLFU: Einziger, Friedman & Manes, ACM TOS 13(4), 2017), blocked as a
    Bloom filter may be (Putze, Sanders & Singler, ACM JEA 14, 2009).

    Instead of all counters at once, it halves a slice of them every so many uses: each is halved
    once in ten uses for each entry of the pool, or sooner if the sketch would fill up.
    """

    def __init__(self, pool_bytes: int) -> None:
        wanted = min(max(pool_bytes // _COUNTER_BYTES, _COUNTERS[0]), _COUNTERS[-1])
        self._counters = bytearray(1 << (wanted - 1).bit_length())
        self._mask = len(self._counters) - _LINE
        self._hand = 0
        self._left = 1  # uses until the next slice

    def recall(self, key: int) -> int:
        """The frequency of a key, 0 to 15; too high if others share all its counters."""
        counters = self._counters
        a, b, c, d = self._probes(key)
        return min(counters[a], counters[b], counters[c], counters[d])

    def remember(self, key: int, frequency: int) -> None:
        """Raise the key's counters to a frequency of at most 15."""
        counters = self._counters
        for probe in self._probes(key):
            if counters[probe] < frequency:
                counters[probe] = frequency

    def age(self, entries: int) -> None:
        """Count one use, in a pool of so many entries."""
        self._left -= 1
        if self._left <= 0:
            counters, hand = self._counters, self._hand
            counters[hand : hand + _SLICE] = counters[hand : hand + _SLICE].translate(_HALVED)
            self._hand = (hand + _SLICE) % len(counters)
            round_uses = min(_USES_PER_ENTRY * entries, len(counters) // 8)
            self._left = round_uses * _SLICE // len(counters)

    def _probes(self, key: int) -> tuple[int, int, int, int]:
        """Four counters in one line of the processor's cache, by bits of the key."""
        line, bits = key & self._mask, key >> 32
        return (
            line | bits & 63,
            line | bits >> 6 & 63,
            line | bits >> 12 & 63,
            line | bits >> 18 & 63,
        )
