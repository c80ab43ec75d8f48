"""A campaign: lanes of faults, drawn from a seed, act on a world for some minutes."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from campaign import client_faults, daemon_faults, engines, outside_faults
from campaign.bugs import BUGS, FOUND
from campaign.kinds import Kind, available, other_end
from campaign.side import Side, outages
from campaign.world import World

REST_EVERY_S = 60.0
LONGEST_FAULT_S = 120.0
MAX_VIOLATIONS = 20
"""So many end a campaign."""
FAULTS = daemon_faults, client_faults, outside_faults, engines
"""The modules whose import makes the kinds known."""
OWN_LANES, SHARED_LANES = ("daemon", "clients"), ("garbage", "network", "redis", "disk")
"""Lanes of each node, and lanes whose faults act on any node. Lanes run side by side."""


@dataclass
class Tally:
    """What one kind of fault has done."""

    faults: int = 0
    after_s: list[float] = field(default_factory=list)
    """From healing to the first request that works; not timed where a daemon was away."""
    whole_s: list[float] = field(default_factory=list)
    """The same from the fault's begin."""
    meanwhile_s: list[float] = field(default_factory=list)
    """What a put and a get on the same node took while the fault acted."""


class Lane:
    """Faults one after another, each drawn by a number of its own."""

    def __init__(
        self,
        name: str,
        world: World,
        sides: list[Side],
        kinds: list[Kind],
        tallies: dict[str, Tally],
    ) -> None:
        self.name, self._world, self._tallies = name, world, tallies
        self._kinds = [kind for kind in kinds if kind.lane == name.split()[0]]
        self._sides = sides
        self._chance = Random(f"{world.seed} {name}")
        self._aside = ThreadPoolExecutor(1)
        self.resting = threading.Lock()
        """Held while a fault acts."""
        self.is_over = False

    def run(self) -> None:
        number = 0
        while not self.is_over:
            with self.resting:
                number += 1
                side = self._chance.choice(self._sides)
                [kind] = self._chance.choices(self._kinds, [kind.weight for kind in self._kinds])
                try:
                    self._fault(number, kind, side)
                except Exception:
                    self._world.violation("the campaign", f"{kind.name}: {traceback.format_exc()}")
            time.sleep(self._chance.uniform(0.0, 0.03))

    def _fault(self, number: int, kind: Kind, side: Side) -> None:
        begun_s, label = time.monotonic(), f"{self.name} {number}"
        seed = f"{self._world.seed} {label}"
        chance, other = Random(seed), other_end(side, Random(seed))
        world = self._world
        world.log(f"{label}: {kind.name} on {side.name}")
        if kind.lane == "daemon":
            with side.acting(kind.probe == "outage"):
                begun_s = time.monotonic()
                healed_s = kind.act(side, chance)
                self._time(kind, side, other, label, begun_s, healed_s, lambda: True)
            return
        is_across = kind.probe in ("across", "redis")
        sides = [side, other] if is_across else [side]
        before = outages(*sides)

        def is_alone() -> bool:
            """Whether no daemon was away meanwhile."""
            return before is not None and before == outages(*sides)

        beside = None
        if kind.lane in ("network", "redis", "disk"):
            beside = self._aside.submit(self._meanwhile, side, label)
        healed_s = kind.act(side, chance)
        if beside is not None:
            took_s = beside.result(LONGEST_FAULT_S)
            if took_s is None:
                world.violation("no recovery", f"beside {label}: {kind.name} on {side.name}")
            elif is_alone():
                self._tallies[kind.name].meanwhile_s.append(took_s)
        self._time(kind, side, other, label, begun_s, healed_s, is_alone)

    def _meanwhile(self, side: Side, label: str) -> float | None:
        """How long a put and a get on the node take; None: they never work."""
        time.sleep(0.02)
        started_s = time.monotonic()
        worked_s = side.works(f"{label} beside")
        return None if worked_s < 0 else worked_s - started_s

    def _time(
        self,
        kind: Kind,
        side: Side,
        other: Side,
        label: str,
        begun_s: float,
        healed_s: float,
        is_alone: Callable[[], bool],
    ) -> None:
        """Wait until it works again, and say how long that took."""
        tally = self._tallies[kind.name]
        tally.faults += 1
        if kind.probe in ("local", "outage"):
            worked_s = side.works(label)
            if worked_s > 0:
                worked_s = min(at for at in [*side.worked_s, worked_s] if at >= healed_s)
        else:
            worked_s = side.found_across(other, label, hinted=kind.probe == "across")
        if worked_s < 0:
            self._world.violation("no recovery", f"{label}: {kind.name} on {side.name}")
        elif is_alone():
            tally.after_s.append(worked_s - healed_s)
            tally.whole_s.append(worked_s - begun_s)
            self._world.log(f"{label}: works {worked_s - healed_s:.3f} s after healing")


def lanes_of(world: World, kinds: list[Kind], tallies: dict[str, Tally]) -> list[Lane]:
    on = [(f"{what} {side.name}", [side]) for what in OWN_LANES for side in world.sides]
    on += [(what, world.sides) for what in SHARED_LANES]
    if world.engines is not None:
        on.append(("engine", [served.side for served in world.engines.served]))
    return [Lane(name, world, sides, kinds, tallies) for name, sides in on]


def campaign(
    directory: Path, seed: int, minutes: float, with_engines: bool, bug: str | None
) -> dict[str, Any]:
    """Start it, run it for so long, and return what happened, as JSON has it.

    With a bug in the daemons it ends when that is found.
    """
    world = World(directory, seed, "" if bug is None else BUGS[bug])
    try:
        world.begin(with_engines)
        return faults_of(world, time.monotonic() + 60 * minutes, bug is not None)
    finally:
        world.close()


def faults_of(world: World, until_s: float, has_bug: bool) -> dict[str, Any]:
    """Act on the world until then, or until enough is found; returns what happened."""
    kinds, left_out = available(world.engines is not None)
    tallies = {kind.name: Tally() for kind in kinds}
    lanes = lanes_of(world, kinds, tallies)
    for lane in lanes:
        threading.Thread(target=lane.run, daemon=True).start()
    started_s = rested_s = time.monotonic()
    rests = 0
    is_over = False
    while not is_over:
        time.sleep(0.2)
        try:
            world.watch()
        except Exception:
            world.violation("the campaign", traceback.format_exc())
        is_late = time.monotonic() > until_s
        wrong = [violation["kind"] for violation in world.violations]
        is_over = is_late or (FOUND in wrong if has_bug else len(wrong) >= MAX_VIOLATIONS)
        if is_over or time.monotonic() > rested_s + REST_EVERY_S:
            rest(world, lanes, is_over)
            rested_s = time.monotonic()
            rests += 1
            if not is_over:
                world.go_on()
                for lane in lanes:
                    lane.resting.release()
    seconds = time.monotonic() - started_s
    if world.engines is not None and seconds > engines.LIMIT_S:
        world.engines.check()
    world.close()
    return {
        "seed": world.seed,
        "seconds": seconds,
        "left_out": left_out,
        "kinds": {name: vars(tally) for name, tally in tallies.items()},
        "starts_s": [took_s for side in world.sides for took_s in side.starts_s],
        "rests": rests,
        "total": world.total(),
        "nodes": len(world.sides),
        "engines": world.engines is not None,
        "answers_s": [] if world.engines is None else world.engines.took_s(),
        "violations": world.violations,
    }


def rest(world: World, lanes: list[Lane], is_over: bool) -> None:
    """Take each lane at the end of its fault, and see that nothing has leaked."""
    for lane in lanes:
        lane.is_over = is_over
        if not lane.resting.acquire(timeout=LONGEST_FAULT_S):
            world.violation("a fault does not end", lane.name)
    world.rest()
