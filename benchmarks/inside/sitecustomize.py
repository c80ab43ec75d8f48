"""On a daemon's PYTHONPATH: write what it has allocated to a file, every second.

The file of the environment's `ECD_BENCHMARK_ALLOCATED` with the process id gets the bytes that
malloc has handed out (glibc's mallinfo2), and the number of Python's own blocks.
"""

import ctypes
import os
import sys
import threading
import time
from pathlib import Path


class _Mallinfo2(ctypes.Structure):
    _fields_ = (("fields", ctypes.c_size_t * 10),)


HBLKHD, UORDBLKS = 4, 7
"""Bytes in mappings of their own, and in the arenas."""


def _watch(file: Path) -> None:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    while True:
        told = mallinfo2().fields
        new = file.with_name(f"{file.name}.new")
        new.write_text(f"{told[HBLKHD] + told[UORDBLKS]} {sys.getallocatedblocks()}")
        new.replace(file)
        time.sleep(1.0)


if name := os.environ.pop("ECD_BENCHMARK_ALLOCATED", None):
    threading.Thread(target=_watch, args=(Path(f"{name}.{os.getpid()}"),), daemon=True).start()
