"""Simulates clusters.

python -m simulation SEED            one run, shrunk if it fails
python -m simulation SEED --runs N   the seeds from SEED on; those that fail are printed
python -m simulation -               such runs, each a line of arguments between tabs
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import sys
import time
import traceback

from simulation.bugs import put_in
from simulation.run import shrink, simulate
from simulation.scenario import draw

PROGRESS_S = 10.0
ENDED = "ended: "
"""Begins the line after a run's output, which says how many seeds have failed."""
MANY = 255
"""Failed seeds, or a run that broke off."""


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":  # or the order in sets differs from run to run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
    if sys.argv[1:] == ["-"]:
        serve()
    else:
        sys.exit(1 if run_with(sys.argv[1:]) else 0)


def serve() -> None:
    """Run each line of standard input in a fork, so that no run changes another."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            failed = MANY
            try:
                failed = run_with(line.rstrip("\n").split("\t"))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(min(failed, MANY))
        _, status = os.waitpid(pid, 0)
        print(f"{ENDED}{os.waitstatus_to_exitcode(status)}", flush=True)


def run_with(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation")
    parser.add_argument("seed", type=int)
    parser.add_argument("--runs", type=int, default=1, help="run so many seeds, from this one on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--bug", help="put this bug in, and stop when it is found")
    said = parser.parse_args(arguments)
    with contextlib.nullcontext() if said.bug is None else put_in(said.bug):
        return run(said)


def run(said: argparse.Namespace) -> int:
    """Run the seeds; returns how many have failed."""
    started_s = told_s = time.monotonic()
    failed = steps = runs = 0
    for seed in range(said.seed, said.seed + said.runs):
        result = simulate(draw(seed))
        runs, steps = runs + 1, steps + result.steps
        if result.violation is not None:
            failed += 1
            print(f"seed {seed}: {result.violation}", flush=True)
            if said.runs == 1:
                show(seed)
        elif said.runs == 1:
            print(f"seed {seed}: {result.steps} steps, digest {result.digest}")
        now_s = time.monotonic()
        if now_s - started_s > said.seconds or (failed and said.bug):
            break
        if now_s - told_s > PROGRESS_S:
            told_s = now_s
            print(f"... {runs} runs", flush=True)
        if seed % 50 == 0:
            gc.collect()
    if said.runs > 1:
        took_s = time.monotonic() - started_s
        print(
            f"{runs} runs from seed {said.seed}, {steps} steps, {failed} violations, "
            f"{took_s:.0f} s, {60 * runs / took_s:.0f} a minute"
        )
    return failed


def show(seed: int) -> None:
    """Print the fewest actions with which the seed fails."""
    smallest = shrink(draw(seed), lambda scenario: simulate(scenario).violation is not None)
    print(f"with {smallest.nodes} nodes, directory {smallest.directory}, {smallest.weather}:")
    for action in smallest.actions:
        print(f"  {action}")
    print(f"  {simulate(smallest).violation}")


if __name__ == "__main__":
    main()
