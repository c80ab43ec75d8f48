"""Figures that go by a real clock: printed beside the last ones, compared with nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LAST = Path(__file__).with_name("figures.json")
"""The figures of the last run of `make timing`, which writes it anew."""
Figure = Callable[[str, float, str, str], None]
_measured: dict[str, tuple[float, str, str]] = {}


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """`figure(name, value, unit, expected)`: `expected` says in words what it should be."""
    test = request.node.name

    def note(name: str, value: float, unit: str, expected: str) -> None:
        _measured[f"{test}: {name}"] = round(value, 6), unit, expected

    return note


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    last = json.loads(LAST.read_text()) if LAST.exists() else {}
    terminalreporter.section("figures: now, last, expected")
    for name, (value, unit, expected) in _measured.items():
        before = last.get(name, {}).get("value")
        was = "new" if before is None else f"{before:.4g}"
        terminalreporter.line(f"{name}: {value:.4g} {unit} (last {was}; expected {expected})")
    fresh = {
        name: {"value": value, "unit": unit, "expected": expected}
        for name, (value, unit, expected) in _measured.items()
    }
    LAST.write_text(json.dumps(dict(sorted((last | fresh).items())), indent=1) + "\n")
    return (yield)
