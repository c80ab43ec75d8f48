"""Draws docs/pictures/*.svg: sequences from text files, state diagrams from the core's tables.

A sequence's text has a title, its participants and one step a line:

    a | b       participants, from left to right
    a -> b: x   a stores to b, or sends it a message
    a .. b: x   a loads from b
    a => b: x   an entry's bytes go from a to b
    a: x        a step that a takes by itself
    --- x       a rule across the picture

`docs/reference.py` writes the pictures and checks that they are fresh.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from html import escape
from pathlib import Path
from typing import TypeVar

from ecd.core.model.states import ENTRY, SESSION, EntryState, SessionState

PICTURES = Path(__file__).parent / "pictures"
WIDTH = 840
STEP = 34
STYLE = """
  text { font: 13px sans-serif; fill: #1b2733 }
  .bold { font-weight: bold } .small { font-size: 12px; fill: #4a5866 }
  .label { paint-order: stroke; stroke: #fbfcfd; stroke-width: 5px }
  .box { fill: #e3edf7; stroke: #34618e } .life { stroke: #a9b8c6 }
  .line { stroke: #1b2733; stroke-width: 1.4; fill: none; marker-end: url(#head) }
  .load { stroke-dasharray: 5 4 }
  .bytes { stroke: #b4530a; stroke-width: 4; marker-end: url(#wide) }
  .rule { stroke: #34618e; stroke-dasharray: 2 3 }
"""
HEADS = """<defs>
  <marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">
    <path d="M0,0 L9,4 L0,8 z" fill="#1b2733"/></marker>
  <marker id="wide" markerUnits="userSpaceOnUse" markerWidth="13" markerHeight="14"
    refX="11" refY="7" orient="auto"><path d="M0,0 L13,7 L0,14 z" fill="#b4530a"/></marker>
</defs>"""
KINDS = {"->": "line", "..": "line load", "=>": "line bytes"}
STEP_LINE = re.compile(r"(?P<actor>.+?) (?P<kind>->|\.\.|=>) (?P<object>.+?): (?P<text>.+)")

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(kind: str, *points: tuple[float, float]) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>'


def box(x: float, y: float, width: float, height: float) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect class="box" x="{x:g}" y="{y:g}" {size} rx="5"/>'


def page(title: str, height: float, parts: list[str]) -> str:
    """An opaque card, legible on a light and a dark page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{HEADS}\n"
        f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="#fbfcfd" stroke="#c6d0da"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def sequence(source: str) -> str:
    title, names, *steps = [one.strip() for one in source.splitlines() if one.strip()]
    participants = [name.strip() for name in names.split("|")]
    column = WIDTH / len(participants)
    at = {name: column * (i + 0.5) for i, name in enumerate(participants)}
    bottom = 92 + STEP * len(steps)
    parts = [text(20, 28, title, "bold")]
    for name, x in at.items():
        parts += [line("life", (x, 72), (x, bottom)), box(x - column / 2 + 8, 44, column - 16, 28)]
        parts.append(text(x, 62, name, "bold", "middle"))
    for i, step in enumerate(steps):
        parts += one_step(step, at, 108 + STEP * i)
    legend = "solid: a store or a message.  dashed: a load.  thick: the entry's bytes."
    parts.append(text(20, bottom + 22, legend, "small"))
    return page(title, bottom + 36, parts)


def one_step(step: str, at: dict[str, float], y: float) -> Iterator[str]:
    if step.startswith("---"):
        yield text(20, y - 5, step.removeprefix("---").strip(), "small label")
        yield line("rule", (12, y), (WIDTH - 12, y))
    elif arrow := STEP_LINE.fullmatch(step):
        start, end = at[arrow["actor"]], at[arrow["object"]]
        words = arrow["text"]
        left, right = min(start, end) + 8, max(start, end) - 8
        yield label(left if fits(left, words) else right, y - 6, words)
        yield line(KINDS[arrow["kind"]], (start, y), (end, y))
    else:
        actor, words = step.split(": ", 1)
        x = at[actor]
        yield label(x + 22, y - 2, words) if fits(x + 22, words) else label(x - 8, y - 2, words)
        yield line("line", (x, y - 12), (x + 16, y - 12), (x + 16, y), (x + 2, y))


def fits(x: float, words: str) -> bool:
    return x + 6.6 * len(words) < WIDTH - 8


def label(x: float, y: float, words: str) -> str:
    """Text from `x` on, or up to it where it would leave the picture."""
    return text(x, y, words, "label", "start" if fits(x, words) else "end")


ENTRY_PLACES = {
    EntryState.RESERVED: (30, 50),
    EntryState.COMMITTED: (250, 50),
    EntryState.DOOMED: (470, 50),
    EntryState.GONE: (690, 50),
    EntryState.ORPHANED: (250, 130),
}
SESSION_PLACES = {
    SessionState.OPEN: (30, 50),
    SessionState.LEAVING: (360, 50),
    SessionState.CLOSED: (690, 50),
}


def states(title: str, table: dict[tuple[S, E], S], places: dict[S, tuple[int, int]]) -> str:
    """One box a state, one arrow a row of the table; a state without a place raises KeyError."""
    parts = [text(20, 28, title, "bold")]
    bottom = max(y for _, y in places.values()) + 60
    between = len({x for x, _ in places.values()}) - 1
    for (state, event), following in table.items():
        parts += transition(event.value, places[state], places[following], 660 / between, bottom)
    for state, (x, y) in places.items():
        parts += [box(x, y, 120, 36), text(x + 60, y + 23, state.value, "bold", "middle")]
    return page(title, bottom + 20, parts)


def transition(
    event: str, start: tuple[int, int], end: tuple[int, int], column: float, bottom: float
) -> Iterator[str]:
    (x, y), (to_x, to_y) = start, end
    if y < to_y:  # down, then right
        yield text(x + 108, to_y + 10, event, "label")
        yield line("line", (x + 100, y + 36), (x + 100, to_y + 18), (to_x, to_y + 18))
    elif y > to_y:  # right, then up
        yield text(x + 130, y + 10, event, "label")
        yield line("line", (x + 120, y + 18), (to_x + 40, y + 18), (to_x + 40, to_y + 36))
    elif to_x - x <= column:
        yield text((x + 120 + to_x) / 2, y + 10, event, "label", "middle")
        yield line("line", (x + 120, y + 18), (to_x, y + 18))
    else:  # past the states between, along the bottom
        ends = (x + 60, bottom), (to_x + 80, bottom)
        yield text(x + 70, bottom - 8, event, "label")
        yield line("line", (x + 60, y + 36), *ends, (to_x + 80, to_y + 36))


def pictures() -> dict[str, str]:
    """Every generated picture by its path below docs/."""
    drawn = {f"pictures/{f.stem}.svg": sequence(f.read_text()) for f in PICTURES.glob("*.txt")}
    drawn["pictures/entry.svg"] = states("An entry's states", ENTRY, ENTRY_PLACES)
    drawn["pictures/session.svg"] = states("A session's states", SESSION, SESSION_PLACES)
    return drawn
