"""The stand-in for CUDA's driver: how child processes find it, and how a test directs them.

`libcuda_standin.c` beside this file says how the stand-in behaves. A process loads one libcuda, so
that the test's own process, which may have another one, does not use it.
"""

from __future__ import annotations

import enum
import mmap
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
LIBRARY = ROOT / "build/standin/libcuda.so.1"
SOURCE = Path(__file__).with_name("libcuda_standin.c")

# The page's layout, which libcuda_standin.c has too: words of 8 bytes, then slots for failures.
ID, DELAY_US, REGISTER_DELAY_US, LOST, DEVICE_BYTES, HOLD = range(6)
FIRST_COUNTER = 8
FAILURES_AT, FAILURE_BYTES, FAILURES, NAME_BYTES = 1024, 64, 32, 48


class NotBuilt(Exception):
    """The library is missing or older than its source; the message says what to run."""


class Hold(enum.IntFlag):
    """What does not go on until the test changes it, for at most a minute."""

    NOTHING = 0
    START = 1
    """Copies, before their first half."""
    MIDDLE = 2
    """Copies and fills, between their halves."""
    FILLS = 4
    """Fills, before their first half."""


class Counters(NamedTuple):
    """What the processes with one control page did together.

    Numbers in force lack what a process did not undo before it ended or was killed: its contexts,
    registrations, streams and events stay counted.
    """

    copies: int
    """Copies asked for, in any direction."""
    pageable_copies: int
    """Those of them from or to host memory that is not registered."""
    split_copies: int
    """Copies refused because a part of the host memory, or each part by itself, is registered."""
    halfway: int
    """Copies whose first half is done."""
    finished: int
    """Copies done."""
    bytes_h2d: int
    bytes_d2h: int
    """From anywhere to the host."""
    bytes_d2d: int
    register_calls: int
    """Calls of cuMemHostRegister, refused ones included, from their start on."""
    registrations: int
    """In force."""
    registered_bytes: int
    """In force."""
    contexts: int
    """In force: devices whose primary context is retained, one by one for each process."""
    streams: int
    """In force, without default streams."""
    events: int
    """In force."""
    faults: int
    """Copies and fills that failed a context for good."""
    main_waits: int
    """Calls in a process's main thread that wait for its device: synchronizing, freeing, copies
    that block."""
    other_waits: int
    """The same in other threads."""
    register_waits: int
    """Calls that found a registration of their process under way, and waited for its end."""


class Control:
    """A control page in a file of its own, for any number of processes."""

    def __init__(self, path: Path) -> None:
        """Make the file, with a delay of 1 ms for each copy and nothing else asked for."""
        with path.open("xb") as file:
            file.truncate(mmap.PAGESIZE)
        self._open(path)
        self._words[ID] = self.id = secrets.randbits(63)
        self.delay_us = 1000

    @classmethod
    def of_this_process(cls) -> Control:
        """The page that directs this process, as `environment` has named it."""
        control = cls.__new__(cls)
        control._open(Path(os.environ["CUDA_STANDIN_CONTROL"]))
        control.id = control._words[ID]
        return control

    def _open(self, path: Path) -> None:
        self.path = path
        with path.open("rb+") as file:
            self._page = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE))
        self._words = self._page.cast("Q")

    @property
    def delay_us(self) -> int:
        """Time before each copy or fill; half of it passes between its halves."""
        return self._words[DELAY_US]

    @delay_us.setter
    def delay_us(self, value: int) -> None:
        self._words[DELAY_US] = value

    @property
    def register_delay_us(self) -> int:
        """Time that each cuMemHostRegister takes, in which its process queues no work."""
        return self._words[REGISTER_DELAY_US]

    @register_delay_us.setter
    def register_delay_us(self, value: int) -> None:
        self._words[REGISTER_DELAY_US] = value

    @property
    def lost(self) -> int:
        """The error that every call returns, as the device is lost; 0: it is not."""
        return self._words[LOST]

    @lost.setter
    def lost(self, error: int) -> None:
        self._words[LOST] = error

    @property
    def device_bytes(self) -> int:
        """Memory of each device, for all processes together; 0: any amount."""
        return self._words[DEVICE_BYTES]

    @device_bytes.setter
    def device_bytes(self, value: int) -> None:
        self._words[DEVICE_BYTES] = value

    @property
    def hold(self) -> Hold:
        return Hold(self._words[HOLD])

    @hold.setter
    def hold(self, value: Hold) -> None:
        self._words[HOLD] = value

    def fail(self, errors: Mapping[str, int], after: int = 0) -> None:
        """Have the calls of these names, without _v2, return these errors from now on.

        The first `after` calls of each still succeed. "copy" and "fill" are the work itself, whose
        error is the context's for good. Replaces what was asked for before; `{}` ends it.
        """
        assert len(errors) <= FAILURES
        slots = range(FAILURES_AT, FAILURES_AT + FAILURES * FAILURE_BYTES, FAILURE_BYTES)
        for slot in slots:
            self._words[slot // 8] = 0
        for slot, (name, error) in zip(slots, errors.items(), strict=False):
            self._words[slot // 8 + 1] = after
            text = slot + FAILURE_BYTES - NAME_BYTES
            self._page[text : text + NAME_BYTES] = name.encode().ljust(NAME_BYTES, b"\0")
            self._words[slot // 8] = error  # last, as processes read meanwhile

    def counters(self) -> Counters:
        return Counters(*self._words[FIRST_COUNTER : FIRST_COUNTER + len(Counters._fields)])


def environment(control: Control, devices: int = 1, afterlife: bool = False) -> dict[str, str]:
    """The variables that let a child process find the stand-in, to be added to the test's own.

    With `afterlife`, the copies of a process go on after it is killed. Raises NotBuilt.
    """
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < SOURCE.stat().st_mtime:
        library = LIBRARY.relative_to(ROOT)
        raise NotBuilt(f"{library} is missing or older than its source. Run: make {library}")
    return {
        "LD_LIBRARY_PATH": library_path(),
        "CUDA_STANDIN_CONTROL": str(control.path),
        "CUDA_STANDIN_DEVICES": str(devices),
        **({"CUDA_STANDIN_AFTERLIFE": "1"} if afterlife else {}),
    }


def library_path() -> str:
    """Where a process looks for the stand-in; it is read as a process starts."""
    return ":".join([str(LIBRARY.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def physical_bytes(control: Control) -> int:
    """Device memory that processes with this control page made and any process still keeps alive.

    Descriptors that are under way in a socket are not found.
    """
    name = f"memfd:cuda-standin:{control.id:x}:"
    found: dict[int, int] = {}  # by inode
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/maps") as maps:
                for line in maps:
                    if name in line:
                        span, _, _, _, inode, _ = line.split(maxsplit=5)
                        first, last = (int(part, 16) for part in span.split("-"))
                        found[int(inode)] = last - first
            for descriptor in os.scandir(f"/proc/{process}/fd"):
                if name in os.readlink(descriptor.path):
                    stat = descriptor.stat()
                    found[stat.st_ino] = stat.st_size
        except OSError:  # the process or descriptor is gone, or is another user's
            pass
    return sum(found.values())
