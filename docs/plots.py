"""Draws plots of the tables in docs/benchmarks/*.md: a picture never differs from its table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import log10
from pathlib import Path

from pictures import WIDTH, line, page, text

BENCHMARKS = Path(__file__).parent / "benchmarks"
FILLS = ("#34618e", "#b4530a", "#8796a5", "#5b8a3c", "#c9a227")
LEFT = 190
RIGHT = WIDTH - 90
BAR = 18

Series = dict[str, list[float]]


def tables(name: str) -> list[list[list[str]]]:
    """Every table of a benchmark's page: its rows, the head first."""
    lines = (BENCHMARKS / f"{name}.md").read_text().split("\n\n")
    found = [part.strip().splitlines() for part in lines if part.strip().startswith("|")]
    return [
        [[c.strip() for c in row[1:-1].split("|")] for row in (rows[0], *rows[2:])]
        for rows in found
    ]


def number(cell: str, unit: str) -> float:
    """The figure before `unit` in a cell such as "1,920 us, 0.03 GB/s"; ValueError without one."""
    if found := re.search(rf"([\d.,]+) ?{re.escape(unit)}\b", cell):
        return float(found[1].replace(",", ""))
    raise ValueError(f"{cell!r} has no figure in {unit}")


def picked(table: list[list[str]], rows: list[str], unit: str, columns: slice) -> Series:
    by_name = {row[0]: row for row in table[1:]}
    return {name: [number(c, unit) for c in by_name[name][columns]] for name in rows}


def shown(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def bars(title: str, unit: str, groups: list[str], series: Series, log_from: float = 0) -> str:
    """Groups of horizontal bars, one a series; on a scale of powers of ten from `log_from`."""
    most = max(max(values) for values in series.values())

    def width(value: float) -> float:
        share = log10(value / log_from) / log10(most / log_from) if log_from else value / most
        return (RIGHT - LEFT) * max(share, 0.004)

    parts = [text(20, 28, title, "bold"), *legend(list(series), unit)]
    y = 68.0
    for at, group in enumerate(groups):
        middle = y + BAR * len(series) / 2 + 5
        parts.append(text(LEFT - 10, middle, group, "", "end"))
        for fill, values in zip(FILLS, series.values(), strict=False):
            long = width(values[at])
            parts.append(rectangle(LEFT, y, long, BAR - 3, fill))
            parts.append(text(LEFT + long + 6, y + 12, shown(values[at]), "small"))
            y += BAR
        y += 14
    if log_from:
        parts.append(text(20, y + 12, "The scale is logarithmic.", "small"))
        y += 20
    return page(title, y + 6, parts)


def curves(title: str, unit: str, xs: list[str], series: Series) -> str:
    """One curve a series over evenly spaced `xs`, with powers of ten upwards."""
    low = min(min(values) for values in series.values())
    high = max(max(values) for values in series.values())
    floor, top, bottom = 10 ** int(log10(low) - 1), 76, 340

    def height(value: float) -> float:
        return bottom - (bottom - top) * log10(value / floor) / log10(high / floor)

    step = (RIGHT - 70) / (len(xs) - 1)
    parts = [text(20, 28, title, "bold"), *legend(list(series), unit)]
    power = floor
    while power <= high:
        parts.append(line("life", (70, height(power)), (RIGHT, height(power))))
        parts.append(text(60, height(power) + 4, f"{power:g}", "small", "end"))
        power *= 10
    for i, x in enumerate(xs):
        parts.append(text(70 + step * i, bottom + 22, x, "small", "middle"))
    for fill, values in zip(FILLS, series.values(), strict=False):
        points = " ".join(f"{70 + step * i:g},{height(v):.1f}" for i, v in enumerate(values))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{fill}" stroke-width="2.5"/>'
        )
        for i, value in enumerate(values):
            parts.append(
                f'<circle cx="{70 + step * i:g}" cy="{height(value):.1f}" r="3.5" fill="{fill}"/>'
            )
    return page(title, bottom + 40, parts)


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    size = f'width="{width:.1f}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} fill="{fill}"/>'


def legend(names: list[str], unit: str) -> Iterator[str]:
    x = 20.0
    for fill, name in zip(FILLS, names, strict=False):
        yield rectangle(x, 40, 12, 12, fill)
        yield text(x + 18, 51, name, "small")
        x += 40 + 6.6 * len(name)
    yield text(WIDTH - 20, 28, unit, "small", "end")


def plots() -> dict[str, str]:
    """Every plot by its path below docs/."""
    names = "ttft", "fetch", "load", "growth", "serve"
    first, fetch, load, grown, served = map(tables, names)
    ways = ["ecd", "ECExampleConnector", "nothing"]
    speeds = [
        "ecd, all gets at a time",
        "ecd, one get at a time",
        "engine, four in flight",
        "raw TCP, one stream",
    ]
    percentiles = ["p50", "p99", "p99.9"]
    columns = slice(2, 5)
    paced = picked(load[1], ["get", "put", "miss"], "us", columns)
    free = picked(load[0], ["get", "put", "miss"], "us", columns)
    operations = [row[0] for row in grown[0][1:] if row[1]]
    return {
        "pictures/ttft.svg": bars(
            "Time to the first token, by the picture's size",
            "ms, less is better",
            first[0][0][1:5],
            picked(first[0], ways, "ms", slice(1, 5)),
        ),
        "pictures/serve.svg": bars(
            "Time to the first token, pictures that come back",
            "ms, less is better",
            ["median", "p90", "p99"],
            {
                row[0].replace(" behind the", "").replace(" by", ""): [
                    number(cell, "ms") for cell in row[1:4]
                ]
                for row in served[-2][1:]
            },
        ),
        "pictures/fetch-speed.svg": curves(
            "Fetches from another node, by the entry's size",
            "GB/s, more is better",
            fetch[0][0][1:7],
            picked(fetch[0], speeds, "GB/s", slice(1, 7)),
        ),
        "pictures/load.svg": bars(
            "Latency with four clients",
            "us, less is better",
            [f"{name}, {p}" for name in free for p in percentiles],
            {
                "all they can": [us for name in free for us in free[name]],
                "held back": [us for name in paced for us in paced[name]],
            },
            log_from=1,
        ),
        "pictures/growth.svg": bars(
            "A client's operations",
            "us, less is better",
            operations,
            {
                head: [number(row[at], "us") for row in grown[0][1:] if row[1]]
                for at, head in ((1, grown[0][0][1]), (2, grown[0][0][2]))
            },
        ),
    }
