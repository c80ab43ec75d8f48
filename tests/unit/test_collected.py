"""What is called when an object is garbage."""

import subprocess
import sys

from ecd_proto.collected import when_collected
from support.processes import run

ENDS_AMID = """
import sys, threading, weakref
from ecd_proto.mapped_file import MappedFile

class Thing: pass

many = [Thing() for _ in range(100_000)]  # so that the interpreter takes its time over them
for each in many:
    weakref.finalize(each, id, 0).atexit = False
weakref.finalize(many[0], print, "another library's")

def map_and_unmap():
    while True:
        begun.set() if MappedFile.of_memory(4096) else None

begun = threading.Event()
threading.Thread(target=map_and_unmap, daemon=True).start()
begun.wait()
sys.setswitchinterval(1e-6)
"""


class Equal(list[int]):
    """Which has no hash either."""


def test_it_is_called_once_and_not_before() -> None:
    called: list[str] = []
    one, other = Equal(), Equal()
    when_collected(one, called.append, "one")
    when_collected(other, called.append, "other")
    assert called == []
    del one
    assert called == ["one"]
    del other
    assert called == ["one", "other"]


def test_others_finalizers_run_though_a_thread_unmaps_as_the_interpreter_ends() -> None:
    done = run([sys.executable, "-c", ENDS_AMID], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "another library's\n", "")


def test_nothing_is_called_by_an_interpreter_that_ends() -> None:
    kept = (
        "import sys; from ecd_proto.collected import when_collected\n"
        "class Thing: pass\n"
        "thing = Thing(); when_collected(thing, print, 'called')"
    )
    command = [sys.executable, "-c", kept]
    done = run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (done.returncode, done.stdout) == (0, "")
