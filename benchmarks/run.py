"""put, get and contains between two processes: ecd beside its peers and a plain copy.

    python benchmarks/run.py [--table life|warm] [--peer NAME ...] [--rounds N] [--life-rounds N]
        [--processes N] [--output FILE.md] [--plot FILE.png] [--json]

One process writes, another reads, the peer lies between. The table of life has operations as an
engine does them, after pauses and on new memory (`life.py`), and what a client's first operation
takes. The warm table has loops (`warm.py`). Each cell is done by several processes in turn; the
medians of their medians are printed, and their ratio to a plain copy's in the same run. LMCache's
engine keeps what it has for its own process: there the writer reads.

A round of life takes 10 to 20 ms and its operation, a table two to four minutes for each peer.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import life
import typer
import warm
from common import PLAIN, PLAIN_WRITER, SIZES, machine, markdown, show, write_page
from peers import PEERS
from places import open_place
from rich.console import Console

POOL_BYTES = 1 << 30
MINUTES = 3
"""What a table takes for one peer, about."""
Sizes = dict[str, dict[str, float]]
"""Medians in microseconds by size, then by operation."""


class Table(str, Enum):
    life = "life"
    warm = "warm"


OPERATIONS: dict[Table, dict[str, str | None]] = {
    Table.life: {
        "put": PLAIN_WRITER,
        "get, private copy": life.PLAIN_NEW,
        life.INTO: PLAIN,
        "get, handle": life.PLAIN_SMALL,
        life.AT_ONCE: life.PLAIN_SMALL,
        life.PUT_TO_HANDLE: PLAIN_WRITER,
        "contains": life.PLAIN_SMALL,
    },
    Table.warm: {
        "put": PLAIN_WRITER,
        "get, private copy": PLAIN,
        "get, handle": None,
        "contains": None,
    },
}
"""The rows, and the plain copy that each is compared with."""
TITLES = {
    Table.life: "As an engine lives: before each operation 64 MiB of other memory written and 5 ms "
    "of sleep, new tensors, default clients, writer and reader in two processes. Medians; in "
    "brackets the ratio to a plain copy under the same conditions: of a put to a copy of the same "
    "bytes into touched shared memory, of a private copy to one into a new tensor, page faults "
    "included (malloc takes new pages for 128 KiB and more, as a new process does), of handles and "
    "contains to one of 64 KiB. Put to handle: from the start of a put to "
    "a handle in another process, which asks for it all the time.",
    Table.warm: "Warm loops, clients with their page tables filled. Medians; in brackets the ratio "
    "to a plain copy of the same bytes in the same run: of a put to a copy into touched shared "
    "memory, of a get to one into touched private memory.",
}
FIRST_TITLE = "The first operation of a client, of 64 KiB, after its imports and a pause. Medians."


def measure(
    table: Table, peer: str, rounds: int, processes: int, progress: Console
) -> tuple[Sizes, dict[str, float]]:
    """By size; and for life the first operations."""
    with open_place(peer, POOL_BYTES) as place:
        if table is Table.warm:
            return warm.measure(peer, place, rounds, processes, progress), {}
        first = life.measure_first(peer, place, progress)
        return life.measure(peer, place, rounds, processes, progress), first


def plot(results: dict[Table, dict[str, Sizes]], path: Path) -> None:
    """Each peer's put and private copy, as a ratio to the plain copy in its run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(results), 2, figsize=(11, 4 * len(results)), sharey="row", squeeze=False
    )
    for row, (table, peers) in zip(axes, results.items(), strict=True):
        width = 0.8 / len(peers)
        for axis, operation in zip(row, ("put", "get, private copy"), strict=True):
            plain = OPERATIONS[table][operation] or PLAIN
            for number, (peer, sizes) in enumerate(peers.items()):
                ratios = [medians[operation] / medians[plain] for medians in sizes.values()]
                places = [place + number * width for place in range(len(sizes))]
                axis.bar(places, ratios, width, label=peer)
            axis.set_xticks([i + 0.4 - width / 2 for i in range(len(SIZES))], SIZES)
            axis.set_yscale("log")
            axis.set_title(f"{table.value}, {operation}: times a plain copy")
            axis.axhline(1.0, color="grey", linewidth=0.8)
    axes[0][1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def cell(medians: dict[str, float], operation: str, plain: str | None) -> str:
    if operation not in medians:
        return "-"
    if plain is None:
        return f"{medians[operation]:,.1f} us"
    return f"{medians[operation]:,.0f} us ({medians[operation] / medians[plain]:.2f}x)"


def rows_of(table: Table, peers: dict[str, Sizes]) -> list[list[str]]:
    rows = [["", "", *SIZES]]
    for operation, plain in OPERATIONS[table].items():
        for peer, sizes in peers.items():
            cells = (cell(medians, operation, plain) for medians in sizes.values())
            rows.append([operation, peer, *cells])
    for name in dict.fromkeys(filter(None, OPERATIONS[table].values())):
        runs = [sizes for sizes in peers.values() if all(name in sizes[size] for size in SIZES)]
        of_size = [[sizes[size][name] for sizes in runs] for size in SIZES if runs]
        ends = (dict.fromkeys(f"{end(values):,.0f}" for end in (min, max)) for values in of_size)
        cells = (f"{' to '.join(both)} us" for both in ends)
        rows.append([name, "in each run", *cells])
    return rows


def first_rows(firsts: dict[str, dict[str, float]]) -> list[list[str]]:
    columns = list(next(iter(firsts.values())))
    rows = [[peer, *(f"{took[name]:,.0f} us" for name in columns)] for peer, took in firsts.items()]
    return [["", *columns], *rows]


def main(
    table: Annotated[Table | None, typer.Option(help="Only this one.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(help="Warm rounds for sizes up to 1 MiB.")] = 400,
    life_rounds: Annotated[int, typer.Option(help="Rounds of life in each process.")] = 28,
    processes: Annotated[int, typer.Option(help="Writers, and readers, one after another.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Write a PNG here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    out, progress = Console(highlight=False, width=150), Console(stderr=True)
    tables, peers = [table] if table else list(Table), peer or list(PEERS)
    progress.print(f"about {MINUTES * len(tables) * len(peers)} minutes")
    results: dict[Table, dict[str, Sizes]] = {each: {} for each in tables}
    firsts: dict[str, dict[str, float]] = {}
    for each in tables:
        for name in peers:
            count = life_rounds if each is Table.life else rounds
            results[each][name], first = measure(each, name, count, processes, progress)
            if first:
                firsts[name] = first
    parts = []
    for each in tables:
        parts.append((TITLES[each], rows_of(each, results[each])))
        if each is Table.life:
            parts.append((FIRST_TITLE, first_rows(firsts)))
    if as_json:
        medians = {each.value: of_table for each, of_table in results.items()}
        out.print_json(
            json.dumps({"machine": machine(), "medians_us": medians | {"first": firsts}})
        )
    else:
        for title, rows in parts:
            show(out, title, rows)
    if output is not None:
        texts = (f"{title}\n\n{markdown(rows)}" for title, rows in parts)
        write_page(output, "\n".join((f"{machine()}.\n", *texts)))
    if picture is not None:
        plot(results, picture)


if __name__ == "__main__":
    typer.run(main)
