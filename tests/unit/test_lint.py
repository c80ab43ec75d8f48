"""The rules of tests as `tests/lint.py` sees them: what breaks one, however it is written."""

from __future__ import annotations

import ast

import pytest

from lint import STARTS, TESTS, faults

BROKEN = [
    "import time; nap = time.sleep",
    "import time as t; nap = t.sleep",
    "from time import sleep as nap; nap(1)",
    "import asyncio as a; nap = a.sleep",
    "from asyncio import sleep as nap; nap(0.1)",
    "from ecd_client import clock; nap = clock.sleep",
    "import ecd_client.clock; nap = ecd_client.clock.sleep",
    "from ecd.base.clock import REAL; nap = REAL.block",
    "PROGRAM = 'import time; time.sle' 'ep(1)'",
    "import time; began_s = time.monotonic()",
    "import time; now_s = time.monotonic",
    "import time as t; t.perf_counter_ns()",
    "from time import monotonic; monotonic()",
    "import time; time.clock_gettime(time.CLOCK_BOOTTIME)",
    "from ecd_client import clock; clock.now_s()",
    "from ecd_client.clock import now_s as now; now()",
    "from ecd.base import clock; clock.REAL.now_s()",
    "import subprocess; subprocess.run(['true'])",
    "import subprocess as sp; sp.Popen(['true'])",
    "from subprocess import Popen; Popen(['true'])",
    "import subprocess; subprocess.getoutput('true')",
    "import asyncio; asyncio.create_subprocess_exec('true')",
    "from asyncio import create_subprocess_shell as sh; sh('true')",
    "import os; os.fork()",
    "from os import fork; begin = fork",
    "import os; os.system('true')",
    "import os; os.popen('true')",
    "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "import multiprocessing; multiprocessing.Process(target=print)",
    "import multiprocessing as mp; mp.get_context('spawn').Process(target=print)",
    "from concurrent.futures import ProcessPoolExecutor; ProcessPoolExecutor(3)",
    "import concurrent.futures; concurrent.futures.ProcessPoolExecutor(3)",
    "thread.join(10)",
    "process.communicate(timeout=10.0)",
]
KEPT = [
    "import asyncio; asyncio.sleep(0)",
    "from asyncio import sleep; sleep(0)",
    "import subprocess; process: subprocess.Popen[str] | None = None",
    "import subprocess; assert isinstance(process, subprocess.Popen)",
    "clock.now_s()",
    "def test(clock): nap = clock.sleep",
    "import time; time.strftime('%Y')",
    "thread.join(HANG_S)",
    "client.get('k', timeout=0.1)",
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_rule_that_is_broken_is_seen(text: str) -> None:
    assert len(list(faults(ast.parse(text), is_timed=False, may_start=False))) == 1


@pytest.mark.parametrize("text", KEPT)
def test_a_rule_that_is_kept_is_no_fault(text: str) -> None:
    assert not list(faults(ast.parse(text), is_timed=False, may_start=False))


@pytest.mark.parametrize("file", STARTS)
def test_a_program_that_starts_others_by_itself_still_does(file: str) -> None:
    tree = ast.parse((TESTS / file).read_text())
    assert list(faults(tree, is_timed=True, may_start=False))
