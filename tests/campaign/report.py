"""One table of campaigns: faults, recoveries, what was watched."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from campaign.engines import SIDES


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
        "seconds": sum(result["seconds"] for result in results),
        "rests": sum(result["rests"] for result in results),
        "left_out": sorted({name for result in results for name in result["left_out"]}),
        "kinds": kinds,
        "engines": any(result["engines"] for result in results),
        "answers_s": [took_s for result in results for took_s in result["answers_s"]],
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
    lines = [
        f"{faults:,} faults of {kinds} kinds in {said['seconds'] / 60:.0f} minutes. "
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
        f"| puts just before a SIGKILL, all found after it | {total['kept']:,} |",
        f"| answers of lying peers: true / none / refused | {total['lies: hit']} / "
        f"{total['lies: miss']} / {total['lies: refused']} |",
        f"| starts refused, as the disk failed (see below) | {total['refused disks']} |",
        "| entries that a third node got from one that had fetched them / not, though there / "
        f"not, as evicted | {total['moved on']} / {total['not moved on']} / "
        f"{total['gone before it moved on']} |",
        f"| rests, each with every pool one free extent | {said['rests']} |",
        f"| starts of a daemon until it served, ms | {middle_and_worst(said['starts_s'])} |",
        f"| violations | {len(wrong)}{': ' if wrong else ''}{', '.join(sorted(set(wrong)))} |",
    ]
    if said["engines"]:
        lines[-1:-1] = [
            f"| engines' answers, each as without ecd | {total['engine answers']:,} |",
            f"| engines' requests that failed alone | {total['engine requests failed']:,} |",
            f"| pictures of these requests / of which engines encoded | "
            f"{total['pictures']:,} / {total['pictures encoded']:,} |",
            f"| three requests at an engine until all are answered, ms "
            f"| {middle_and_worst(said['answers_s'])} |",
            f"| engines lost | {total['engines lost']} |",
        ]
    lines += [
        "",
        "| seed | commit | nodes | engines | minutes | faults | violations |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        done = sum(tally["faults"] for tally in result["kinds"].values())
        lines.append(
            f"| {result['seed']} | {result['commit']} | {result['nodes']} | "
            f"{SIDES if result['engines'] else 0} | {result['seconds'] / 60:.1f} | {done:,} | "
            f"{len(result['violations'])} |"
        )
    if said["left_out"]:
        lines += ["", f"Not possible on this machine: {', '.join(said['left_out'])}."]
    return "\n".join(lines) + "\n"
