"""The choice of the one engine that encodes an item which nobody has stored, by locks of keys.

An engine locks what its next step may encode, and keeps the lock while that step runs; others wait
until the item is stored, a while at most. A request that waits holds no lock, so that no two wait
for each other. Across nodes the directory decides: the engine that has the lock tells its daemon
that it makes the item.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence

from vllm.envs import VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS

from ecd_client.client import Client
from ecd_client.errors import DaemonUnavailable
from ecd_client.vllm.request_items import RequestItems
from ecd_client.vllm.stats import EcdStats
from ecd_client.vllm.wanted import WantedItem
from ecd_proto.contract import MAKING_S

SHARE_WAITED = 3 / 4
"""Share of a request's time that it waits for other nodes; the daemon has the rest to answer."""
AGAIN_S = 0.002
"""Interval at which memory is looked at for an item that another engine encodes."""
NOTICED_S = 0.4
"""An answer of the daemon that takes longer has waited for another node: a look-up has 0.25 s."""
STEP_S = float(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
"""Longest step: one that takes longer ends the engine."""
TIMES_WAITED = 5
"""How often `ecd_load_timeout_s` a request waits for engines of its node that encode."""
RESTS_S = 10.0
"""How long this engine waits for no other, after it has waited in vain: perhaps ecd is full."""


class Encodes:
    """This engine's share in encoding what the cluster lacks."""

    def __init__(
        self, client: Client, stats: EcdStats, wait_s: float, *, is_producer: bool
    ) -> None:
        """An engine that stores nothing waits for others of its node, and nobody waits for it.

        `wait_s` is how long a request may be held for its items.
        """
        self._client, self._stats, self._is_producer = client, stats, is_producer
        self._wait_s = wait_s
        self._rests_until_s = 0.0
        self._begun: list[str] = []  # in the step that is being scheduled
        self._steps: deque[tuple[int, list[str]]] = deque()  # what each encodes, by its number

    def take_on(self, absent: Sequence[WantedItem], request: RequestItems) -> bool:
        """Whether this engine goes on with all of these items of a request, or waits for one."""
        now_s = time.monotonic()
        if any(wanted.is_awaited and now_s < wanted.ask_again_s for wanted in absent):
            return False
        locked = []
        for wanted in absent:
            if wanted.encoded or now_s < wanted.locked_until_s:
                continue
            if self._lock(wanted):
                locked.append(wanted)
            elif self._waits_for(wanted, now_s, request):
                for each in locked:
                    self._unlock(each)
                return False
        for wanted in locked:
            wanted.locked_until_s = now_s + MAKING_S
        return True

    def begin(self, wanted: WantedItem) -> None:
        """Note that the step which is being scheduled encodes the item: its lock outlasts that."""
        wanted.encoded = True
        if wanted.locked_until_s:
            self._begun.append(wanted.identifier)
            self._lock_for(wanted.identifier, STEP_S)

    def begin_step(self, number: int) -> None:
        """Note the number of the step that was scheduled."""
        if self._begun:
            self._steps.append((number, self._begun))
            self._begun = []

    def end_steps(self, done: int) -> None:
        """Note that the workers have done the steps up to a number; saves are seen soon after."""
        while self._steps and self._steps[0][0] <= done:
            for identifier in self._steps.popleft()[1]:
                self._lock_for(identifier, MAKING_S)

    def is_overdue(self, wanted: WantedItem) -> bool:
        """Whether the engine has not encoded an item for so long that its lock has ended."""
        until_s = wanted.locked_until_s
        return bool(until_s) and not wanted.encoded and time.monotonic() >= until_s

    def makes_s(self, absent: Sequence[WantedItem], request: RequestItems) -> float | None:
        """How long the daemon is to wait for another node that makes these items of a request.

        None: this engine stores nothing, and so makes nothing for others. Several items are not
        waited for: two engines that each have some would wait for each other.
        """
        if not self._is_producer:
            return None
        now_s = time.monotonic()
        if len(absent) > 1 or now_s < self._rests_until_s:
            return 0.0
        return min(MAKING_S, SHARE_WAITED * max(0.0, request.deadline_s - now_s))

    def answered(self, wanted: WantedItem, *, found: bool) -> None:
        """Note that the daemon answered, or is given up: it may have waited for another node."""
        if wanted.makes_s and time.monotonic() - wanted.asked_s > NOTICED_S:
            self._waited(in_vain=not found)

    def stored(self, wanted: WantedItem) -> None:
        """Note that memory shows the item: it may have been waited for."""
        if wanted.is_awaited:
            self._waited(in_vain=False)

    def left(self, wanted: WantedItem) -> None:
        """Let others encode an item that no request needs any more."""
        if wanted.locked_until_s and not wanted.encoded:
            self._unlock(wanted)
            if wanted.makes_s is not None:
                with contextlib.suppress(DaemonUnavailable):
                    self._client.stop_making([wanted.identifier])

    def let_go(self) -> None:
        """Let others encode everything: what this engine encoded is not stored."""
        self._steps.clear()
        with contextlib.suppress(DaemonUnavailable):
            self._client.unlock_all()

    def _lock(self, wanted: WantedItem) -> bool:
        try:
            if self._is_producer:
                return self._client.lock(wanted.identifier, MAKING_S)
            return not self._client.is_locked(wanted.identifier)
        except DaemonUnavailable:
            return True

    def _lock_for(self, identifier: str, seconds: float) -> None:
        with contextlib.suppress(DaemonUnavailable):
            self._client.lock(identifier, seconds)

    def _unlock(self, wanted: WantedItem) -> None:
        wanted.locked_until_s = 0.0
        with contextlib.suppress(DaemonUnavailable):  # then the lock has gone with the session
            self._client.unlock(wanted.identifier)

    def _waits_for(self, wanted: WantedItem, now_s: float, request: RequestItems) -> bool:
        """Whether to wait for the engine that has the item's lock."""
        if now_s < self._rests_until_s:
            return False
        request.awaits_until_s = request.awaits_until_s or now_s + TIMES_WAITED * self._wait_s
        if now_s >= request.awaits_until_s:
            if wanted.is_awaited:
                self._waited(in_vain=True)
            return False
        wanted.is_awaited = True
        wanted.ask_again_s = now_s + AGAIN_S
        return True

    def _waited(self, *, in_vain: bool) -> None:
        self._stats.count("awaited_in_vain" if in_vain else "awaited")
        if in_vain:
            self._rests_until_s = time.monotonic() + RESTS_S
