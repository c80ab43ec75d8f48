"""A pool with little room: the rest is being written, so that nothing can evict it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ecd_client import Client
from ecd_client.shared.puts import NewEntry
from support.waiting import HANG_S


@contextlib.contextmanager
def being_written(address: str, nbytes: int) -> Iterator[None]:
    """Somebody's put of so many bytes has begun, and ends with the context."""
    copying, go_on = threading.Event(), threading.Event()

    def copy_to(*_: object) -> None:
        copying.set()
        go_on.wait()

    entry = NewEntry("somebody's", "x", "uint8", (nbytes,), nbytes, b"", 0.0)
    with Client(address) as client:
        thread = threading.Thread(target=client._writer.put, args=(entry, copy_to, 5.0))
        thread.start()
        try:
            assert copying.wait(HANG_S), "there was no room for it"
            yield
        finally:
            go_on.set()
            thread.join(HANG_S)
