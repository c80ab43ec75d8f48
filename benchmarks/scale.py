"""Ten thousand nodes and one hot picture: who is refused a link, and what Redis has to do.

    python benchmarks/scale.py [--output FILE.md]

The simulated cluster of hot.py, links of 1.25 GB/s, 2 readers at a time. One run takes some minutes
and 5 GB of memory. The page is written anew after each run.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from common import markdown, write_page
from hot import LINKS, MESSAGE_S, WAYS, bound_s, hot, row


class Case(NamedTuple):
    nodes: int
    way: str
    over_s: float = 0.0
    """In which all nodes ask, one after the other; else at one time."""
    message_s: float = 0.0


CASES = (
    Case(1000, "directory"),
    Case(1000, "directory", over_s=1.0),
    Case(10_000, "directory"),
    Case(10_000, "directory", over_s=1.0),
    Case(10_000, "directory", over_s=1.0, message_s=MESSAGE_S),
    Case(10_000, "hints"),
)
HEAD = ["nodes", "the picture is", "asked", "a message costs"]
SPREAD = ["have it within 5 s", "half", "last", "tree's bound", "copies from the producer"]
LOAD = ["links refused", "lookups too late", "commands to Redis", "a second, at the peak"]
LOAD += ["Redis busy", "longest wait for a command"]


def main(
    output: Annotated[Path | None, typer.Option(help="A Markdown page for the tables.")] = None,
) -> None:
    """Measure one hot picture in the largest clusters."""
    logging.getLogger("ecd").setLevel(logging.CRITICAL)  # what is late or refused is counted
    spread, load = [[*HEAD, *SPREAD]], [[*HEAD, *LOAD]]
    for nodes, way, over_s, message_s in CASES:
        outcome = hot(nodes, LINKS[0], 2, way, message_s, over_s)
        about = [f"{nodes:,}", WAYS[way], f"over {over_s:g} s" if over_s else "at once"]
        about.append(f"{1e3 * message_s:g} ms" if message_s else "nothing")
        figures = row(nodes, bound_s(nodes, LINKS[0], message_s), 2, outcome)
        spread.append([*about, *figures[1:5], figures[7]])
        load.append(
            [
                *about,
                f"{outcome.refused:,}",
                f"{outcome.late_lookups:,}",
                f"{outcome.redis_commands:,}",
                f"{outcome.redis_peak:,.0f}",
                f"{outcome.redis_s:.2f} s",
                f"{1e3 * outcome.redis_longest_s:,.0f} ms",
            ]
        )
        typer.echo(f"{spread[-1]}, {load[-1]}")
        if output is not None:
            write_page(output, f"\n{markdown(spread)}\n{markdown(load)}")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # or the order in sets differs from run to run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    typer.run(main)
