"""The rules of tests, as far as a program can see them (docs/testing.md has all): `make check`.

Outside `tests/timing` no test reads a clock, so none asserts on one. No test sleeps. What must come
is awaited with one bound, HANG_S. Every process is started by `support.processes`, which ends it.

Of the product: only its clocks read the time of an event loop, which no contract of imports shows.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PRODUCT = "client", "ecd", "proto"
READ_THE_TIME = {
    "client/ecd_client/clock.py",
    "ecd/base/clock.py",
    "proto/ecd_proto/leftovers.py",  # as pyproject.toml says
}
TIMED = "timing", "campaign", "simulation"
"""Real figures, faults at a pace drawn by lot, and virtual time."""
PACED = {
    "shake.py": "halts other programs",
    "support/citizen.py": "a client that goes on at a pace",
    "support/cuda/dma_stress.py": "a load of its own",
    "support/limits.py": "the limit of a run",
    "support/node_client.py": "reports seconds to tests/timing",
    "support/pin_stress.py": "a load of its own",
    "support/waiting.py": "the one place that waits",
}
"""Programs that go by the clock, and why. What they find is checked, how long they take is not."""
STARTS = {"support/processes.py", "support/daemon.py"}

CLOCKS = {
    *("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"),
    *("process_time", "thread_time"),
}
STARTERS = {"Popen", "call", "check_call", "check_output", "run"}
WAITS = {"communicate", "join", "result", "run", "wait", "wait_for"}
"""Functions whose time limit is for what must come. A `get` with one may be meant to miss."""


class Fault(NamedTuple):
    line: int
    text: str


def faults(tree: ast.AST, is_timed: bool, may_start: bool) -> Iterator[Fault]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node, is_timed, may_start)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_timed:
            if re.search(r"\bsleep\((?!0\))", node.value):
                yield Fault(node.lineno, "a program that sleeps: have it wait for a state")
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "subprocess"):
            yield Fault(node.lineno, f"import {node.module} itself, so that its uses are seen")


def _of_call(call: ast.Call, is_timed: bool, may_start: bool) -> Iterator[Fault]:
    name = ast.unparse(call.func)
    owner, _, function = name.rpartition(".")
    if owner in ("time", "asyncio") and function == "sleep" and not is_timed:
        if not (owner == "asyncio" and ast.unparse(call.args[0]) == "0"):
            yield Fault(call.lineno, f"{name}: wait for a state (support.waiting)")
    elif owner == "time" and function in CLOCKS and not is_timed:
        yield Fault(call.lineno, f"{name}: a figure, so it belongs into tests/timing")
    elif owner == "subprocess" and function in STARTERS and not may_start:
        yield Fault(call.lineno, f"{name}: start it by support.processes, which ends it")
    if function in WAITS and not is_timed:
        limits = [each.value for each in call.keywords if each.arg in ("timeout", "timeout_s")]
        if function in ("join", "result", "wait") and len(call.args) == 1:
            limits += call.args
        for limit in limits:
            if isinstance(limit, ast.Constant) and isinstance(limit.value, (int, float)):
                yield Fault(call.lineno, f"{name}: what must come is awaited with HANG_S")


def readings(tree: ast.AST) -> Iterator[Fault]:
    """Faults of the product: `loop.time()`, however the loop is reached."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "time":
            yield Fault(node.lineno, f"{ast.unparse(node)}: read the clock that was handed down")


def main() -> int:
    found = 0
    for path in sorted(path for part in PRODUCT for path in (ROOT / part).rglob("*.py")):
        within = path.relative_to(ROOT).as_posix()
        if within in READ_THE_TIME:
            continue
        for fault in readings(ast.parse(path.read_text())):
            print(f"{within}:{fault.line}: {fault.text}")
            found += 1
    for path in sorted(TESTS.rglob("*.py")):
        within = path.relative_to(TESTS).as_posix()
        is_timed = within.split("/")[0] in TIMED or within in PACED
        for fault in faults(ast.parse(path.read_text()), is_timed, within in STARTS):
            print(f"tests/{within}:{fault.line}: {fault.text}")
            found += 1
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
