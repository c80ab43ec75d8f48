"""Tables of the command lines: columns without frames, and whole lines in a pipe."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType
from rich.table import Table

PIPE_WIDTH = 400
"""Columns where no terminal says how many there are."""


def console() -> Console:
    """Standard output. Names such as `:cat:` are no emoji."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, emoji=False, width=width)


def unframed(*heads: str) -> Table:
    """A table with these columns; without heads its columns have none."""
    return Table(*heads, box=None, pad_edge=False, show_header=bool(heads))


def show(out: Console, table: RenderableType) -> None:
    """Print a table: in a pipe without the blanks that fill its lines."""
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    out.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
