"""Output of the command lines: tables without frames, whole lines in a pipe, stdout that fails."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table

PIPE_WIDTH = 400
"""Columns where no terminal says how many there are."""
UNWRITABLE = (errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class CannotPrint(Exception):
    """Standard output cannot be written; the message says why."""


def open_closed() -> None:
    """Open standard output and error if they are closed; output cannot be written all the same."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Run a command that writes no file, and write all that it prints. Raises CannotPrint.

    A reader that has ended, as of `| head -1`, ends the command without a message.
    """
    open_closed()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        is_over = isinstance(error, BrokenPipeError)
        if not is_over and (error.filename is not None or error.errno not in UNWRITABLE):
            raise
        # The interpreter's own flush must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_over:
            sys.exit(1)
        raise CannotPrint(f"standard output cannot be written: {error.strerror}") from None


def console() -> Console:
    """Standard output. Names such as `:cat:` are no emoji."""
    width = None if sys.stdout is not None and sys.stdout.isatty() else PIPE_WIDTH
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
