"""Memory barriers across processes: membarrier(2)."""

from __future__ import annotations

import ctypes
import os
import platform

STORES_IN_ORDER = platform.machine() == "x86_64"
"""Stores reach other processors in program order, after the loads before them.

Sewell et al., x86-TSO, CACM 53(7), 2010.
"""

_MEMBARRIER = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_QUERY, _BARRIER, _REGISTER = 0, 1 << 1, 1 << 2  # MEMBARRIER_CMD_..._GLOBAL_EXPEDITED
_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: the call takes 2 us


def _membarrier(command: int) -> int:
    if _MEMBARRIER is None:
        return -1
    result: int = _libc.syscall(_MEMBARRIER, command, 0, 0)
    return result


def has_barriers() -> bool:
    """Whether the kernel, and the sandbox around this process, allow membarrier(2)."""
    commands = _membarrier(_QUERY)
    return commands > 0 and bool(commands & _BARRIER) and bool(commands & _REGISTER)


def join_barriers() -> bool:
    """Make every `barrier` on this machine a barrier in this process too. False if refused."""
    return _membarrier(_REGISTER) == 0


def barrier() -> None:
    """Issue a full memory barrier in every thread of every process that joined. Raises OSError."""
    if _membarrier(_BARRIER) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "membarrier")
