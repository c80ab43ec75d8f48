"""Holds that end when the last copy that reads them is over, on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ecd_client import forks
from ecd_client.errors import DeviceError

if TYPE_CHECKING:
    from ecd_client.device.driver import Event

logger = logging.getLogger(__name__)

FAILED_S = 1.0
"""How long a GPU that reports an error may go on with copies, as after its process's end (D1)."""


class _Ends:
    """The thread, begun with the first hold that it ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._later: queue.SimpleQueue[tuple[list[Event], Callable[[], None]]]
        self._later = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed_s: float | None = None

    def add(self, events: list[Event], end: Callable[[], None]) -> None:
        self._later.put((events, end))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ecd-ends", daemon=True)
                forks.add(self)
                self._thread.start()

    def _run(self) -> None:
        while True:
            events, end = self._later.get()
            try:
                for event in events:
                    self._wait(event)
                end()
            except Exception:
                logger.exception("a hold could not be ended")
            del events, end

    def _wait(self, event: Event) -> None:
        try:
            event.wait()
        except DeviceError as error:
            if self._failed_s is None:
                self._failed_s = time.monotonic()
                logger.warning("the GPU has failed: %s", error)
            time.sleep(max(0.0, self._failed_s + FAILED_S - time.monotonic()))

    def cut_off(self) -> None:
        """In a forked child: the holds are the parent's."""
        self.__init__()  # type: ignore[misc]


_ends = _Ends()


def after(events: Iterable[Event], end: Callable[[], None]) -> None:
    """Call `end` once all events are over: now, or on the side."""
    if left := under_way(events):
        _ends.add(left, end)
    else:
        end()


def under_way(events: Iterable[Event]) -> list[Event]:
    """Those of the events that are not over, or of a device that has failed."""
    return [event for event in events if not _is_over(event)]


def _is_over(event: Event) -> bool:
    try:
        return event.is_over()
    except DeviceError:
        return False
