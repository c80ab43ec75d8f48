"""What `ecd replay` prints: a recorded run's evictions, or what other pools would have saved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ecd.replay.bounds import Bounds, bounds
from ecd.replay.exact import Comparison, Replay
from ecd.replay.policies import POLICIES
from ecd.replay.reading import Accesses, TraceError, accesses, is_trace, records
from ecd.replay.reading import Progress as Told
from ecd.replay.whatif import Disk, PoolOutcome, simulate
from ecd_proto import tables
from ecd_proto.contract import bytes_of, size_text

_out = Console(highlight=False, soft_wrap=True)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


def report(
    trace: Path,
    pool: str | None,
    policy: str | None,
    as_json: bool,
    plot: Path | None,
    disk: str | None,
    rates: dict[str, str],
) -> None:
    """Print what `ecd replay` is asked for; `rates` are the disk's two options. Raises Exit."""
    try:
        if pool is None and policy is None and plot is None and disk is None:
            _compare(trace, as_json)
        else:
            tier = None if disk is None else _disk(disk, rates)
            _try_others(trace, pool, policy, as_json, plot, tier)
    except TraceError as error:
        _fail(str(error), 2)


def _fail(why: str, code: int) -> NoReturn:
    _errors.print(why, markup=False)
    raise typer.Exit(code)


# -- the recorded pool -----------------------------------------------------------------------------


def _compare(trace: Path, as_json: bool) -> None:
    if not is_trace(trace):
        raise TraceError(f"{trace} is no trace of ECD_TRACE; a CSV needs --pool")
    with _shown_progress() as told:
        header, operations = records(trace, told("replaying"))
        found = Replay(header).run(operations)
    if as_json:
        _out.print_json(json.dumps(asdict(found)))
    else:
        _show_comparison(found)
    if found.difference is not None:
        raise typer.Exit(1)


def _show_comparison(found: Comparison) -> None:
    total = sum(found.evictions.values())
    of_reasons = ", ".join(f"{count:,} {reason}" for reason, count in found.evictions.items())
    if found.difference is not None:
        _out.print(f"the evictions differ. {found.difference}", markup=False)
        return
    _out.print(f"{total:,} evictions ({of_reasons}) in {found.operations:,} operations: the same")
    if found.missing:
        _out.print(f"{found.missing:,} records are missing then: nothing is compared after them")
    elif not found.is_whole:
        _out.print("the trace has no end: the daemon still runs, or was killed")


# -- other pools and policies ----------------------------------------------------------------------


def _try_others(
    trace: Path,
    pool: str | None,
    policy: str | None,
    as_json: bool,
    plot: Path | None,
    disk: Disk | None,
) -> None:
    names = list(POLICIES) if policy is None else [name.strip() for name in policy.split(",")]
    unknown = sorted(set(names) - POLICIES.keys())
    if unknown:
        _fail(f"no such policy: {', '.join(unknown)}. There are {', '.join(POLICIES)}", 2)
    if plot is not None:
        _need_matplotlib()
    with _shown_progress() as told:
        found = accesses(trace, told("reading"))
        if not found.order:
            raise TraceError(f"{trace} has no accesses")
        outcomes, limits = [], {}
        for size in _sizes(pool, found):
            limits[size] = bounds(found, size, told(f"bounds, {size_text(size)}"))
            for name in names:
                label = f"{name}, {size_text(size)}"
                tried = size, name, POLICIES[name], told(label), disk
                outcomes.append(simulate(found, *tried))
    if as_json:
        _out.print_json(json.dumps(_rows(outcomes, limits)))
    else:
        _show_outcomes(found, outcomes, limits, disk is not None)
    if plot is not None:
        from ecd.replay.plot import draw

        try:
            draw(plot, outcomes, limits)
        except (OSError, ValueError) as error:
            _fail(f"{plot} cannot be written: {error}", 1)


def _sizes(pool: str | None, found: Accesses) -> list[int]:
    """The pools to try, in bytes: the recorded one where none are given."""
    if pool is None:
        if found.recorded is None:
            _fail("a CSV does not say how large the pool is: give --pool", 2)
        return [found.recorded.pool_bytes]
    sizes = []
    for text in (part.strip() for part in pool.split(",")):
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?%", text):
            nbytes = int(float(text[:-1]) / 100 * found.footprint_bytes)
        else:
            nbytes = _size("--pool", text)
        if nbytes < found.granule_bytes:
            _fail(f"--pool: {text} is less than a granule, {size_text(found.granule_bytes)}", 2)
        sizes.append(nbytes)
    return sizes


def _size(option: str, text: str) -> int:
    try:
        return bytes_of(text)
    except ValueError as error:
        _fail(f"{option} {error}, got {text!r}", 2)


def _disk(size: str, rates: dict[str, str]) -> Disk:
    """The tier of a size, with the rates of its two options, whose names say the unit."""
    values = {"--disk": _size("--disk", size)} | {
        option: _size(option, f"{text}B" if text.isdecimal() else text)
        for option, text in rates.items()
    }
    for option, value in values.items():
        if not value:
            _fail(f"{option} must be more than 0", 2)
    return Disk(*values.values())


def _rows(outcomes: list[PoolOutcome], limits: dict[int, Bounds]) -> list[dict[str, Any]]:
    return [
        {
            **asdict(outcome),
            "share": outcome.share,
            "hit_ratio": outcome.hit_ratio,
            "byte_hit_ratio": outcome.byte_hit_ratio,
            **limits[outcome.pool_bytes]._asdict(),
        }
        for outcome in outcomes
    ]


def _show_outcomes(
    found: Accesses, outcomes: list[PoolOutcome], limits: dict[int, Bounds], has_disk: bool
) -> None:
    infinite_s = outcomes[0].infinite_s
    title = (
        f"{len(found.order):,} accesses of {len(found.items):,} keys, "
        f"{size_text(found.footprint_bytes)}; a pool of that size saves {infinite_s:,.1f} s"
    )
    table = tables.unframed(
        *("pool", "policy", "seconds saved", *(["of these from disk"] if has_disk else [])),
        *("of infinite", "hits", "bytes hit", "evictions", "moved in", "waste"),
    )
    _out.print(title)
    for column in table.columns[2:]:
        column.justify = "right"
    for size, (feasible_s, upper_s) in limits.items():
        for outcome in outcomes:
            if outcome.pool_bytes == size:
                table.add_row(size_text(size), *_cells(outcome, has_disk))
        for name, saved_s in (("offline, feasible", feasible_s), ("offline, bound", upper_s)):
            share = saved_s / infinite_s if infinite_s else 0.0
            cells = f"{saved_s:,.1f}", *([""] if has_disk else []), f"{share:.1%}"
            table.add_row(size_text(size), name, *cells)
    tables.show(tables.console(), table)
    if found.missing:
        _out.print(f"the trace misses {found.missing:,} records, accesses among them")
    refused = max(outcome.refused for outcome in outcomes)
    if refused:
        _out.print(f"up to {refused:,} puts found no room: the entries are larger than the pool")


def _cells(outcome: PoolOutcome, has_disk: bool) -> tuple[str, ...]:
    return (
        outcome.policy,
        f"{outcome.saved_s:,.1f}",
        *([f"{outcome.disk_saved_s:,.1f}"] if has_disk else []),
        f"{outcome.share:.1%}",
        f"{outcome.hit_ratio:.1%}",
        f"{outcome.byte_hit_ratio:.1%}",
        f"{sum(outcome.evictions.values()):,}",
        size_text(outcome.moved_in_bytes),
        f"{outcome.waste:.2f}",
    )


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        _fail("--plot needs matplotlib: pip install matplotlib", 1)


@contextmanager
def _shown_progress() -> Iterator[Any]:
    """Bars on stderr, where that is a terminal, for what takes longer than two seconds."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_errors, transient=True) as progress:

        def told(label: str) -> Told:
            task = progress.add_task(label)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield told
