"""The choice of the one engine that encodes an item which nobody has stored, by locks of keys.

An engine locks what its next step may encode, and keeps the lock while that step runs; others wait
until the item is stored, a while at most. A request that waits holds no lock, so that no two wait
for each other. Across nodes the directory decides: the engine that has the lock tells its daemon
that it makes the item, and makes it for as long as it has the lock. A daemon that waits for another
node shows that, and its engines wait as for one of their own node.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from vllm.envs import VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS

from ecd_client import clock
from ecd_client.arguments import MAX_SECONDS
from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.shared.key_locks import MAX_LOCKS
from ecd_client.vllm.base.stats import EcdStats
from ecd_client.vllm.scheduler.request_items import RequestItems
from ecd_client.vllm.scheduler.wanted import WantedItem
from ecd_proto.contract import MAKING_S

SHARE_WAITED = 3 / 4
"""Share of the daemon's wait for another node for which a request waits: it is to know the end."""
AGAIN_S = 0.002
"""Interval between two looks into memory for an item that another engine encodes."""
NOTICED_S = 0.4
"""An answer of the daemon that takes longer has waited for another node: a look-up has 0.25 s. A
request whose time is over waits for one so long."""
STEP_S = min(float(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS), MAX_SECONDS)
"""Longest step: one that takes longer ends the engine."""
MAX_STEPS = 1024
"""Most steps whose end is waited for. Where workers report none the oldest are forgotten: the locks
of what they encode end by time."""
TIMES_WAITED = 5
"""A request's wait for other engines that encode, as a multiple of `ecd_load_timeout_s`."""
RESTS_S = 10.0
"""How long this engine does not wait for others after it has waited in vain: ecd may be full."""


class _Step(NamedTuple):
    """The items that a step encodes, and those that the daemon was asked for before it."""

    number: int
    begun: list[str]
    asked: list[WantedItem]


class Encodes:
    """This engine's share in encoding the items that the cluster lacks."""

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
        self._asked: list[WantedItem] = []
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS)

    def take_on(self, absent: Sequence[WantedItem], request: RequestItems) -> bool:
        """Whether this engine continues with all of these items of a request, or waits for one."""
        now_s = clock.now_s()
        if any(wanted.is_awaited and now_s < wanted.ask_again_s for wanted in absent):
            return False
        if len(absent) == 1 and self._waits_for_node(absent[0], now_s, request):
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
        """Count the miss of an item that the next step encodes: its lock outlasts that step."""
        self._stats.count("misses")
        self._client.count_miss()
        wanted.encoded, wanted.is_told, wanted.gave_way = True, False, False
        if wanted.locked_until_s:
            self._begun.append(wanted.identifier)
            self._lock_for(wanted.identifier, STEP_S)

    def ask(self, wanted: WantedItem) -> None:
        """Note that the daemon is asked: its answer is looked at when the next step has ended."""
        if wanted.locked_until_s and self._is_producer and not wanted.gave_way:
            self._asked.append(wanted)

    def begin_step(self, number: int) -> None:
        """Note the number of the step that was scheduled."""
        if self._begun or self._asked:
            for wanted in self._asked:
                self._lock_asked(wanted, STEP_S)
            self._steps.append(_Step(number, self._begun, self._asked))
            self._begun, self._asked = [], []

    def end_steps(self, done: int) -> None:
        """Note that the workers have done the steps up to a number; saves are seen soon after."""
        while self._steps and self._steps[0].number <= done:
            step = self._steps.popleft()
            for wanted in step.asked:
                self._lock_asked(wanted, MAKING_S)
            for identifier in step.begun:
                self._lock_for(identifier, MAKING_S)

    def give_way(self, wanted: WantedItem) -> bool:
        """Let others encode an item that this engine has not encoded for as long as its lock lasts.

        Whether it did so. It takes no lock of the item until it begins, as where there is room for
        the request's KV again.
        """
        until_s = wanted.locked_until_s
        if not until_s or wanted.encoded or clock.now_s() < until_s:
            return False
        self._unlock(wanted)
        wanted.gave_way = True
        return True

    def makes_s(self, absent: Sequence[WantedItem], request: RequestItems) -> float | None:
        """How long the daemon is to wait for another node that makes these items of a request.

        That is longer than the request waits. None: this engine stores nothing, and so makes
        nothing for others. Several items are not waited for: two engines that each have some would
        wait for each other.
        """
        if not self._is_producer:
            return None
        now_s = clock.now_s()
        if len(absent) > 1 or now_s < self._rests_until_s:
            return 0.0
        return max(0.0, self._awaits_until_s(request, now_s) - now_s) / SHARE_WAITED

    def found(self, wanted: WantedItem) -> None:
        """Note that the daemon has found the item: it may have waited for another node."""
        if wanted.makes_s and clock.now_s() - wanted.asked_s > NOTICED_S:
            self._waited(in_vain=False)

    def is_made_elsewhere(self, wanted: WantedItem) -> bool:
        """Whether the daemon waits for another node that encodes the item."""
        with contextlib.suppress(EcdError):
            return self._client.is_made_elsewhere(wanted.identifier)
        return False

    def wait_on(self, wanted: WantedItem) -> None:
        """Watch memory for the item, which this engine does not encode for now."""
        self._unlock(wanted)
        wanted.start_over("another node encodes it")
        wanted.is_awaited = True

    def stored(self, wanted: WantedItem) -> None:
        """Note that memory shows the item, for which a request may have waited."""
        if wanted.is_awaited:
            self._waited(in_vain=False)

    def left(self, wanted: WantedItem) -> None:
        """Let others encode an item that no request needs any more."""
        if wanted.encoded:
            return
        if wanted.locked_until_s:
            self._unlock(wanted)
        if wanted.is_told:
            wanted.is_told = False
            with contextlib.suppress(EcdError):
                self._client.stop_making([wanted.identifier])

    def let_go(self) -> None:
        """Let others encode everything: this engine's outputs are not stored."""
        begun = [*self._begun, *(each for step in self._steps for each in step.begun)]
        self._steps.clear()
        self._asked.clear()
        with contextlib.suppress(EcdError):
            self._client.unlock_all()
            if begun and self._is_producer:
                self._client.stop_making(begun[-MAX_LOCKS:])

    def _lock(self, wanted: WantedItem) -> bool:
        try:
            if self._is_producer and not wanted.gave_way:
                return self._client.lock(wanted.identifier, MAKING_S)
            return not self._client.is_locked(wanted.identifier)
        except EcdError:
            return True

    def _lock_for(self, identifier: str, seconds: float) -> None:
        with contextlib.suppress(EcdError):
            self._client.lock(identifier, seconds)

    def _lock_asked(self, wanted: WantedItem, seconds: float) -> None:
        if wanted.locked_until_s and not wanted.encoded:  # else it was left, or has begun
            wanted.locked_until_s = clock.now_s() + seconds
            self._lock_for(wanted.identifier, seconds)

    def _unlock(self, wanted: WantedItem) -> None:
        wanted.locked_until_s = 0.0
        with contextlib.suppress(EcdError):  # then the lock has gone with the session
            self._client.unlock(wanted.identifier)

    def _waits_for_node(self, wanted: WantedItem, now_s: float, request: RequestItems) -> bool:
        """Whether to wait for another node that makes the item."""
        may_be = wanted.may_come and not wanted.encoded
        return may_be and self.is_made_elsewhere(wanted) and self._waits_for(wanted, now_s, request)

    def _waits_for(self, wanted: WantedItem, now_s: float, request: RequestItems) -> bool:
        """Whether to wait for the engine that encodes the item."""
        if now_s < self._rests_until_s:
            return False
        if now_s >= self._awaits_until_s(request, now_s):
            if wanted.is_awaited:
                self._waited(in_vain=True)
            return False
        wanted.is_awaited = True
        wanted.ask_again_s = now_s + AGAIN_S
        return True

    def _awaits_until_s(self, request: RequestItems, now_s: float) -> float:
        """When the request's patience with other engines ends, from its first question or wait."""
        request.awaits_until_s = request.awaits_until_s or now_s + TIMES_WAITED * self._wait_s
        return request.awaits_until_s

    def _waited(self, *, in_vain: bool) -> None:
        self._stats.count("awaited_in_vain" if in_vain else "awaited")
        if in_vain:
            self._rests_until_s = clock.now_s() + RESTS_S
