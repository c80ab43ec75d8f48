"""One table of campaigns: faults, recoveries, what was watched."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def added(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several campaigns as one: counts and times are joined, by kind."""
    kinds: dict[str, dict[str, Any]] = {}
    total: dict[str, int] = {}
    for result in results:
        for name, tally in result["kinds"].items():
            mine = kinds.setdefault(
                name, {"faults": 0, "after_s": [], "whole_s": [], "meanwhile_s": []}
            )
            for key, value in tally.items():
                mine[key] += value
        for count, number in result["total"].items():
            total[count] = total.get(count, 0) + number
    return {
        "seeds": [result["seed"] for result in results],
        "seconds": sum(result["seconds"] for result in results),
        "rests": sum(result["rests"] for result in results),
        "left_out": sorted({name for result in results for name in result["left_out"]}),
        "kinds": kinds,
        "starts_s": [took_s for result in results for took_s in result["starts_s"]],
        "total": total,
        "violations": [wrong for result in results for wrong in result["violations"]],
    }


def middle_and_worst(times_s: Sequence[float]) -> str:
    if not times_s:
        return "-"
    return f"{median(times_s) * 1e3:,.0f} / {max(times_s) * 1e3:,.0f}"


def markdown(results: Sequence[dict[str, Any]]) -> str:
    said = added(results)
    total = said["total"]
    faults = sum(tally["faults"] for tally in said["kinds"].values())
    kinds = sum(tally["faults"] > 0 for tally in said["kinds"].values())
    seeds = ", ".join(map(str, said["seeds"]))
    lines = [
        f"{faults:,} faults of {kinds} kinds in {said['seconds'] / 60:.0f} minutes, seeds {seeds}. "
        "Times are in ms, median / worst: from the fault's end, and from its begin, until a put "
        "and a get have worked (for the network and Redis, from one node to the other), and a put "
        "and a get on the node while the fault acted.",
        "",
        "| fault | times | after its end | from its begin | meanwhile |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, tally in said["kinds"].items():
        times = (tally["after_s"], tally["whole_s"], tally["meanwhile_s"])
        lines.append(
            f"| {name} | {tally['faults']:,} | {' | '.join(map(middle_and_worst, times))} |"
        )
    wrong = [each["kind"] for each in said["violations"]]
    lines += [
        "",
        "| what was watched | |",
        "| --- | --- |",
        f"| requests | {total['requests']:,} |",
        f"| of which failed with an error of ecd's | {total['refused']:,} |",
        f"| items compared whole | {total['checks']:,} |",
        f"| MiB compared | {total['verified_bytes'] / (1 << 20):,.0f} |",
        f"| puts just before a SIGKILL, all found after it | {total.get('kept', 0):,} |",
        f"| answers of lying peers: true / none / refused | {total.get('lies: hit', 0)} / "
        f"{total.get('lies: miss', 0)} / {total.get('lies: refused', 0)} |",
        f"| tracebacks of grpcio's at a close (see below) | {total.get('grpcio at a close', 0)} |",
        f"| starts refused, as the disk failed (see below) | {total.get('refused disks', 0)} |",
        f"| rests, each with every pool one free extent | {said['rests']} |",
        f"| starts of a daemon until it served, ms | {middle_and_worst(said['starts_s'])} |",
        f"| violations | {len(wrong)}{': ' if wrong else ''}{', '.join(sorted(set(wrong)))} |",
    ]
    if said["left_out"]:
        lines += ["", f"Not possible on this machine: {', '.join(said['left_out'])}."]
    return "\n".join(lines) + "\n"
