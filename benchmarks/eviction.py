"""Eviction policies on eight workloads: what each saves of the encoder's seconds.

    python benchmarks/eviction.py [--quick] [--output FILE.md] [--plot FILE.svg]

Runs the accesses of `workloads.py` through the daemon's core (`ecd.replay.whatif`), in contiguous
memory with its watermarks, at 5, 10 and 20 % of all keys' bytes, with three seeds, under the
policies of ecd and those of `policies.py`. The clairvoyant is PFOO's feasible packing
(`ecd.replay.bounds`), which knows the future and no fragmentation. Two processes, some ten minutes.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Annotated, NamedTuple

import typer
from common import markdown, show, write_page
from matplotlib.figure import Figure
from policies import COMPARED
from rich.console import Console
from rich.progress import track
from workloads import ACCESSES, WORKLOADS, workload

from ecd.replay.bounds import bounds
from ecd.replay.policies import POLICIES
from ecd.replay.whatif import PoolOutcome, simulate

SHARES = (0.05, 0.10, 0.20)
SEEDS = (1, 2, 3)
LRU, VALUE, CLAIRVOYANT = "lru", "value", "clairvoyant"
ALL = {**POLICIES, **COMPARED}
COLUMNS = (LRU, *COMPARED, VALUE)


class Run(NamedTuple):
    """The shares of an infinite pool's seconds that one pool saved, and its other figures."""

    saved: dict[str, float]  # by policy, the clairvoyant included
    figures: dict[str, tuple[float, float, int, float, float]]
    """Hit ratio, byte hit ratio, evictions, GiB moved in and waste, by policy."""


def run(name: str, seed: int, share: float) -> Run:
    found = workload(name, seed)
    size = int(share * found.footprint_bytes)
    outcomes = [simulate(found, size, policy, ALL[policy]) for policy in COLUMNS]
    return run_of(outcomes, bounds(found, size).feasible_s)


def run_of(outcomes: list[PoolOutcome], feasible_s: float) -> Run:
    """The figures of one pool, under each policy of COLUMNS."""
    saved = {outcome.policy: outcome.share for outcome in outcomes}
    saved[CLAIRVOYANT] = feasible_s / outcomes[0].infinite_s
    figures = {
        outcome.policy: (
            outcome.hit_ratio,
            outcome.byte_hit_ratio,
            sum(outcome.evictions.values()),
            outcome.moved_in_bytes / (1 << 30),
            outcome.waste,
        )
        for outcome in outcomes
    }
    return Run(saved, figures)


Runs = dict[tuple[str, float], list[Run]]
"""By workload and share, one for each seed."""


def saved(runs: Runs, name: str, share: float, policy: str) -> float:
    """The mean over the seeds."""
    return mean(each.saved[policy] for each in runs[name, share])


def table_of(runs: Runs, share: float) -> list[list[str]]:
    head = ["workload", *COLUMNS, CLAIRVOYANT, "value : lru", "value : clairvoyant"]
    rows = [head]
    against: dict[str, list[float]] = defaultdict(list)
    for name in WORKLOADS:
        of = {policy: saved(runs, name, share, policy) for policy in (*COLUMNS, CLAIRVOYANT)}
        for policy, value in of.items():
            against[policy].append(value / of[LRU])
        cells = [f"{value:.2f}" for value in of.values()]
        ratios = [f"{of[VALUE] / of[LRU]:.2f}", f"{of[VALUE] / of[CLAIRVOYANT]:.2f}"]
        rows.append([name, *cells, *ratios])
    means = [f"{geometric_mean(values):.3f}" for values in against.values()]
    return [*rows, ["geometric mean : lru", *means, "", ""]]


def figures_of(runs: Runs, share: float) -> list[list[str]]:
    rows = [["workload", *COLUMNS]]
    for name in WORKLOADS:
        row = [name]
        for policy in COLUMNS:
            columns = zip(*(each.figures[policy] for each in runs[name, share]), strict=True)
            hits, byte_hits, evictions, gib, waste = map(mean, columns)
            row.append(f"{hits:.2f} / {byte_hits:.2f} / {evictions:.0f} / {gib:.0f} / {waste:.2f}")
        rows.append(row)
    return rows


def draw(file: Path, runs: Runs) -> None:
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots(2, 4, sharex=True, sharey=True)
    shown = {LRU: "C0", "GDSF": "C2", "S3-FIFO": "C4", VALUE: "C3", CLAIRVOYANT: "k"}
    for name, plot in zip(WORKLOADS, axes.flat, strict=True):
        for policy, colour in shown.items():
            values = [100 * saved(runs, name, share, policy) for share in SHARES]
            style = "--" if policy == CLAIRVOYANT else "-"
            places = [100 * share for share in SHARES]
            plot.plot(places, values, style, color=colour, marker=".", label=policy)
        plot.set_title(name, fontsize=10)
        plot.set_xticks([100 * share for share in SHARES])
        plot.set_ylim(0, 103)
        plot.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.supxlabel("pool, % of all keys' bytes", fontsize=10)
    figure.supylabel("encoder seconds saved, % of an infinite pool's", fontsize=10)
    figure.savefig(file, metadata={"Date": None})


def show_all(runs: Runs, seeds: tuple[int, ...], output: Path | None, plot: Path | None) -> None:
    out = Console(highlight=False, width=160)
    text = f"{ACCESSES:,} accesses, {len(seeds)} seeds. "
    text += "Seconds saved, as a share of what a pool that evicts nothing saves.\n"
    tables = {f"Pool of {share:.0%} of all keys' bytes.": table_of(runs, share) for share in SHARES}
    figures = "Hit ratio / byte hit ratio / evictions / GiB moved in / waste, pool of 10%."
    for title, rows in {**tables, figures: figures_of(runs, 0.10)}.items():
        show(out, title, rows)
        text += f"\n{title}\n\n{markdown(rows)}"
    if output is not None:
        write_page(output, text)
    if plot is not None:
        draw(plot, runs)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="One seed.")] = False,
    output: Annotated[Path | None, typer.Option(help="A page for the tables.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of them.")] = None,
) -> None:
    seeds = SEEDS[:1] if quick else SEEDS
    runs: Runs = defaultdict(list)
    with ProcessPoolExecutor(2) as workers:
        jobs = {
            workers.submit(run, name, seed, share): (name, share)
            for name in WORKLOADS
            for share in SHARES
            for seed in seeds
        }
        for job, place in track(jobs.items(), "simulating", console=Console(stderr=True)):
            runs[place].append(job.result())
    show_all(runs, seeds, output, plot)


if __name__ == "__main__":
    typer.run(main)
