"""A call that follows an object's end by garbage collection, in place of `weakref.finalize`.

`weakref.finalize` keeps one dict for the whole process, over which an ending interpreter walks. A
thread that changes it meanwhile, as one that unmaps a pool does, makes the interpreter leave out
all finalizers, other libraries' too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

_awaited: dict[int, weakref.ref[object]] = {}
"""References to objects that live, by the references' ids: not all of them can be hashed."""


def when_collected(thing: object, call: Callable[..., object], *arguments: object) -> None:
    """Call once `thing` is collected, on the thread that lets go of it.

    Never as the interpreter ends, where other threads may still use what the call would undo.
    """

    def collected(
        reference: weakref.ref[object],
        is_ending: Callable[[], bool] = sys.is_finalizing,  # its module may be gone by then
        forget: Callable[..., object] = _awaited.pop,
    ) -> None:
        forget(id(reference), None)
        if not is_ending():
            call(*arguments)

    reference = weakref.ref(thing, collected)
    _awaited[id(reference)] = reference
