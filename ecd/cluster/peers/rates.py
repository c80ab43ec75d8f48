"""Read rates: how long a read of a given size from one source takes, by recent reads."""

from __future__ import annotations

LEAST_BYTES = 1 << 20
"""Smaller reads do not show the bandwidth, and are always cheaper than encoding."""
LEAST_S = 5e-3
"""A read expected to take less is always made."""
SAMPLE_S = 1.0
"""A longer busy period counts as several."""
NEWEST = 1 / 2
"""The weight of the newest sample in the average."""
HALVED_IN_S = 60.0
"""The age at which a measured slowness counts half: the source may have become faster."""
EXPLORED = 32
"""One in so many reads that seem too slow is made all the same, to measure again."""


class ReadRate:
    """The bandwidth of one source: bytes read in a busy period, over its seconds, averaged (EWMA).

    Reads under way share the source, so that the time of one says little. The quickest answer of
    lately is taken off each period, so that small entries from afar do not spoil the bandwidth.
    """

    def __init__(self) -> None:
        self.under_way_bytes = 0
        self.too_slow = 0
        """Reads that seemed not worth making, including those of EXPLORED."""
        self._floor_s = 0.0
        self._s_per_byte: float | None = None
        self._measured_s = 0.0
        self._since_s = 0.0
        self._reads = self._bytes = 0  # ended since then
        self._is_whole = True

    def answered(self, took_s: float) -> None:
        """Note the time of an answer that brought no bytes."""
        self._floor_s = min(took_s, 1.05 * self._floor_s) if self._floor_s else took_s

    def began(self, nbytes: int, now_s: float) -> None:
        if not self.under_way_bytes:
            self._begin(now_s)
        self.under_way_bytes += nbytes

    def ended(self, nbytes: int, now_s: float, is_whole: bool) -> None:
        """Note the end of a read.

        `is_whole`: all bytes have come. Otherwise the measured bandwidth is an upper bound.
        """
        self.under_way_bytes -= nbytes
        self._reads += 1
        self._bytes += nbytes
        self._is_whole &= is_whole
        took_s = now_s - self._since_s
        if self.under_way_bytes and took_s < SAMPLE_S:
            return
        if self._bytes >= LEAST_BYTES * self._reads:
            self._measure(max(took_s - self._floor_s, took_s / 2) / self._bytes, now_s)
        self._begin(now_s)

    def bytes_per_s(self, now_s: float) -> float:
        """The measured bandwidth; 0 while unknown."""
        seconds = self._seconds_per_byte(now_s)
        return 1 / seconds if seconds else 0.0

    def seconds(self, nbytes: int, now_s: float) -> float | None:
        """How long a read takes alone; None while the bandwidth is unknown."""
        per_byte = self._seconds_per_byte(now_s)
        return None if per_byte is None else self._floor_s + nbytes * per_byte

    def is_slow(self, nbytes: int, now_s: float) -> bool:
        """Whether `is_slower` may be true of a read of this size."""
        expected_s = self.seconds(self.under_way_bytes + nbytes, now_s)
        return nbytes >= LEAST_BYTES and expected_s is not None and expected_s > LEAST_S

    def is_slower(self, nbytes: int, than_s: float, now_s: float) -> bool:
        """Whether a read is not worth making, because it takes longer than `than_s`."""
        expected_s = self.seconds(self.under_way_bytes + nbytes, now_s)
        if not self.is_slow(nbytes, now_s) or expected_s is None or expected_s <= than_s:
            return False
        self.too_slow += 1
        return self.too_slow % EXPLORED != 0

    def _begin(self, now_s: float) -> None:
        self._since_s, self._reads, self._bytes, self._is_whole = now_s, 0, 0, True

    def _measure(self, per_byte: float, now_s: float) -> None:
        known = self._seconds_per_byte(now_s)
        known = per_byte if known is None else known
        if self._s_per_byte is None or self._is_whole or per_byte > known:
            self._s_per_byte = known + NEWEST * (per_byte - known)
            self._measured_s = now_s

    def _seconds_per_byte(self, now_s: float) -> float | None:
        if self._s_per_byte is None:
            return None
        return float(self._s_per_byte * 0.5 ** ((now_s - self._measured_s) / HALVED_IN_S))
