"""Who encodes an item that nobody has stored: one engine of a node at a time, by locks of keys.

An engine locks an item before it encodes it; others wait until the item is stored, a while at most.
An engine that waits holds no lock for the same request, so that no two wait for each other.
Across nodes the directory decides: the engine that has the lock says to its daemon that it makes
the item (`Makes`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from ecd_client.acquire import Makes
from ecd_client.client import Client
from ecd_client.errors import DaemonUnavailable
from ecd_client.vllm.stats import EcdStats
from ecd_client.vllm.wanted import WantedItem
from ecd_proto.contract import MAKING_S

SHARE_WAITED = 3 / 4
"""Share of a request's time that it waits for other engines: the daemon is asked in the rest."""
AGAIN_S = 0.002
"""Interval at which memory is looked at for an item that another engine encodes."""
RESTS_S = 10.0
"""How long this engine waits for no other, after it has waited in vain: perhaps ecd is full."""
MAX_AHEAD = 16
"""Missing items of one request that are locked; the engine encodes the others later."""


class Encodes:
    """This engine's share in encoding what the node lacks."""

    def __init__(self, client: Client, stats: EcdStats, *, is_producer: bool) -> None:
        """An engine that stores nothing waits for others, and lets nobody wait for it."""
        self._client, self._stats, self._is_producer = client, stats, is_producer
        self._rests_until_s = 0.0

    def take_on(self, absent: Sequence[WantedItem], deadline_s: float) -> Sequence[WantedItem]:
        """The items of one request that this engine is to encode: all, or none while it waits."""
        now_s = time.monotonic()
        locked: list[WantedItem] = []
        waits = False
        for wanted in absent[:MAX_AHEAD]:
            if wanted.encoded:
                continue
            if self._lock(wanted):
                locked.append(wanted)
            elif now_s >= self._rests_until_s and not self._is_over(wanted, now_s, deadline_s):
                waits = True
        if not waits:
            return absent
        if self._is_producer:
            with contextlib.suppress(DaemonUnavailable):  # then they have gone with the session
                for wanted in locked:
                    self._client.unlock(wanted.identifier)
        for wanted in absent:
            wanted.ask_again_s = now_s + AGAIN_S
        return ()

    def makes(self, absent: Sequence[WantedItem]) -> Makes:
        """What to tell the daemon of the missing items of one request, which this engine encodes.

        Several are not waited for: two engines that each have some would wait for each other.
        """
        if not self._is_producer:
            return Makes.NOTHING
        is_alone = len(absent) == 1 and time.monotonic() >= self._rests_until_s
        return Makes.ALONE if is_alone else Makes.ALWAYS

    def answered(self, asked_s: float, makes: Makes) -> None:
        """Note that the daemon found nothing: if it took so long, another node was waited for."""
        if makes is Makes.ALONE and time.monotonic() - asked_s > MAKING_S / 2:
            self._rest()

    def not_stored(self) -> None:
        """Let others encode: what this engine encoded was not stored."""
        if self._is_producer:
            with contextlib.suppress(DaemonUnavailable):
                self._client.unlock_all()

    def _lock(self, wanted: WantedItem) -> bool:
        try:
            if self._is_producer:
                return self._client.lock(wanted.identifier, MAKING_S)
            return not self._client.is_locked(wanted.identifier)
        except DaemonUnavailable:
            return True

    def _is_over(self, wanted: WantedItem, now_s: float, deadline_s: float) -> bool:
        """Whether the item was waited for long enough; the first question begins the wait."""
        if now_s >= deadline_s:
            return True
        if not wanted.awaited_until_s:
            self._stats.count("awaited")
            wanted.awaited_until_s = now_s + min(MAKING_S, SHARE_WAITED * (deadline_s - now_s))
        if now_s < wanted.awaited_until_s:
            return False
        self._rest()
        return True

    def _rest(self) -> None:
        self._rests_until_s = time.monotonic() + RESTS_S
