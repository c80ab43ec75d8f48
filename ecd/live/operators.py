"""Operators' requests to a running cache: evict entries, keep them, follow other rules."""

from __future__ import annotations

import math

from ecd.base.clock import Clock
from ecd.core.cache import Cache
from ecd.core.model.outcomes import Keeping
from ecd.core.model.rules import Rules
from ecd.core.model.types import EntryId, EvictionReport, Key, Selection
from ecd.live.background import Background
from ecd.live.effects import EVICTED_AT_A_TIME, Effects
from ecd.live.turns import Pace, Turns


class Operators:
    """The operators' part of `LiveCache`."""

    def __init__(self, cache: Cache, effects: Effects, turns: Turns, clock: Clock) -> None:
        self._cache, self._effects = cache, effects
        self._turns, self._clock = turns, clock
        self._background = Background()

    async def evict(self, selection: Selection, dry_run: bool, pace: Pace) -> EvictionReport:
        """Evict all selected entries. Afterwards the extents of those without a reader are free."""
        total = EvictionReport(0, 0, 0, EntryId(0))
        await self._scan_pins(pace)
        while (after := total.next_after) is not None:
            now_s = self._clock.now_s()
            some = self._cache.evictor.evict_selected(
                selection, now_s, EVICTED_AT_A_TIME, after, dry_run
            )
            total = EvictionReport(
                total.entries + some.entries,
                total.nbytes + some.nbytes,
                total.leased + some.leased,
                some.next_after,
                total.kept + some.kept,
            )
            self._effects.after(changed=True)
            await pace.turn()
            if not self._cache.pins.is_settled:
                await self._scan_pins(pace)
                await pace.turn()
        return total

    def keep(self, key: Key, for_s: float | None) -> Keeping:
        """As `Retention.keep`, for this long; None: without a limit."""
        outcome = self._cache.retention.keep(
            key, math.inf if for_s is None else self._clock.now_s() + for_s
        )
        self._effects.after()
        return outcome

    def use_rules(self, rules: Rules) -> None:
        """Set new rules at once, and apply them, in turns, to stored entries."""
        self._cache.retention.use(rules)
        self._background.spawn(self._reapply_rules())

    async def _reapply_rules(self) -> None:
        after: EntryId | None = EntryId(0)
        while after is not None:
            after = self._cache.retention.reapply(after, EVICTED_AT_A_TIME)
            await self._turns.next()
        self._effects.after_filling()

    async def _scan_pins(self, pace: Pace) -> None:
        """Scan pins until every evicted entry without a reader is free."""
        while not self._cache.pins.step():
            await pace.turn()
