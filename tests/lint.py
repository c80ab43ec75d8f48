"""The rules of tests, as far as a program can see them (docs/testing.md has all): `make check`.

Outside `tests/timing` no test reads a clock, so none asserts on one. No test sleeps. What must come
is awaited with one bound, HANG_S. Every process is started by `support.processes`, which ends it.

Clocks, sleeps and starts are seen under whatever name a file imports them, called or not.

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
    "e2e/pauses.py": "has vLLM's own loops pause",
}
"""Programs that go by the clock, and why. What they find is checked, how long they take is not."""
STARTS = {
    "campaign/asked.py": "a client's child, as an engine forks one",
    "campaign/worker.py": "clients, which the kernel ends with it",
    "e2e/models/matrix.py": "engines, each in a process with vLLM imported",
    "gpu/scenarios.py": "children of a client, which are awaited",
    "integration/crashing_client.py": "clients that crash",
    "simulation/__main__.py": "runs of seeds, which change nothing of each other",
    "support/cuda/dma_stress.py": "engines that are killed, and begin quickly",
    "support/pin_stress.py": "children of a client",
    "support/processes.py": "the one place that starts",
    "support/sglang_process.py": "schedulers, as SGLang has them",
    "support/warm_interpreter.py": "programs, each with its libraries imported",
}
"""Programs that start others by themselves, and what for: `support.processes` started each of
these, and ends its whole session, or it is that place."""

CLOCKS = {
    *(f"time.{name}" for name in ("time", "monotonic", "perf_counter", "process_time")),
    *(f"time.{name}_ns" for name in ("time", "monotonic", "perf_counter", "process_time")),
    *("time.thread_time", "time.thread_time_ns", "time.clock_gettime", "time.clock_gettime_ns"),
    *(f"ecd_client.clock.{name}" for name in ("now_s", "unix_s", "now_text", "booted_s")),
    *("ecd.base.clock.REAL.now_s", "ecd.base.clock.REAL.unix_s"),
}
SLEEPS = {
    *("time.sleep", "asyncio.sleep", "ecd_client.clock.sleep"),
    *("ecd.base.clock.REAL.sleep", "ecd.base.clock.REAL.block"),
}
STARTERS = {
    *(f"subprocess.{name}" for name in ("Popen", "call", "check_call", "check_output", "run")),
    *("subprocess.getoutput", "subprocess.getstatusoutput"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    *(f"os.{name}" for name in ("fork", "forkpty", "popen", "system", "posix_spawn")),
    *("os.posix_spawnp", "pty.fork", "pty.spawn"),
    *(f"os.spawn{how}" for how in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *(f"multiprocessing.{name}" for name in ("Manager", "Pool", "Process", "get_context")),
    "concurrent.futures.ProcessPoolExecutor",
}
TYPES = {"subprocess.Popen"}
"""Starters that annotations name, too: a fault where they are called."""
WAITS = {"communicate", "join", "result", "run", "wait", "wait_for"}
"""Functions whose time limit is for what must come. A `get` with one may be meant to miss."""


class Fault(NamedTuple):
    line: int
    text: str


def faults(tree: ast.AST, is_timed: bool, may_start: bool) -> Iterator[Fault]:
    nodes = list(ast.walk(tree))
    imported = dict(each for node in nodes for each in _imports(node))
    called = {node.func: node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Call) and not is_timed:
            yield from _of_wait(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_timed:
            if re.search(r"\bsleep\((?!0\))", node.value):
                yield Fault(node.lineno, "a program that sleeps: have it wait for a state")
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name, call = _full_name(node, imported), called.get(node)
            if name in SLEEPS and not is_timed and not (call and _is_a_turn(call)):
                yield Fault(node.lineno, f"{name}: wait for a state (support.waiting)")
            elif name in CLOCKS and not is_timed:
                yield Fault(node.lineno, f"{name}: a figure, so it belongs into tests/timing")
            elif name in STARTERS and not may_start and (call or name not in TYPES):
                yield Fault(node.lineno, f"{name}: start it by support.processes, which ends it")


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that a statement imports, and what each is of."""
    if isinstance(node, ast.Import):
        for each in node.names:
            first = each.name.partition(".")[0]
            yield (each.asname, each.name) if each.asname else (first, first)
    elif isinstance(node, ast.ImportFrom):
        for each in node.names:
            yield each.asname or each.name, f"{node.module}.{each.name}"


def _full_name(node: ast.expr, imported: dict[str, str]) -> str:
    """What the name or attribute is of by the file's imports; empty if they do not say."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := _full_name(node.value, imported)):
        return f"{owner}.{node.attr}"
    return ""


def _is_a_turn(call: ast.Call) -> bool:
    """Whether it gives others a turn of the event loop, and no time."""
    return [ast.unparse(each) for each in call.args] == ["0"]


def _of_wait(call: ast.Call) -> Iterator[Fault]:
    name = ast.unparse(call.func)
    function = name.rpartition(".")[2]
    if function in WAITS:
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
