"""Draws what pools of several sizes would save. Needs matplotlib, which ecd does not install."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from ecd.replay.bounds import Bounds
from ecd.replay.whatif import PoolOutcome

GIB = 1 << 30


def draw(file: Path, outcomes: list[PoolOutcome], limits: dict[int, Bounds]) -> None:
    """Draw the share of the seconds that an infinite pool saves, a line a policy."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = sorted(limits)
    infinite_s = outcomes[0].infinite_s or 1.0
    for name in dict.fromkeys(outcome.policy for outcome in outcomes):
        own = (outcome for outcome in outcomes if outcome.policy == name)
        of_policy = sorted((outcome.pool_bytes / GIB, 100 * outcome.share) for outcome in own)
        axes.plot(*zip(*of_policy, strict=True), marker="o", label=name)
    feasible = [100 * limits[size].feasible_s / infinite_s for size in sizes]
    axes.plot([size / GIB for size in sizes], feasible, "k--", label="offline, feasible")
    axes.set(xlabel="pool, GiB", ylabel="encoder seconds saved, % of an infinite pool's")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 103)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file)
