"""Holds that end when the last copy that reads them is over, on a thread of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ecd_client import clock
from ecd_client.errors import RETRY_S, DeviceBusy, DeviceError

if TYPE_CHECKING:
    from ecd_client.device.driver import Event

logger = logging.getLogger(__name__)

FAILED_S = 1.0
"""How long a GPU that reports an error may continue copies, as after its process's end (D1)."""
GATHER_S = 0.0005
"""How long the thread waits once a hold has woken it: further holds of a step then wake nobody."""
MAX_GATHERED = 64
"""Holds that are kept back for `gathering` before the thread gets them: pins are some hundred."""
MAX_INTERRUPTIONS = 100
"""Errors that are not the driver's in one wait for copies, each after a pause of RETRY_S."""


Added = tuple[list["Event"], Callable[[], None], float]
"""Events of copies, the function to call once all of them are over, and the time of the request."""


class _Gathering(threading.local):
    """One thread's part of `gathering`."""

    gathered: deque[Added] | None = None
    """Holds kept from the ending thread until this thread's step is over; None outside a step."""


class _Ends:
    """A queue of work to do after copies, and its thread."""

    def __init__(self) -> None:
        self._later: queue.SimpleQueue[deque[Added]] = queue.SimpleQueue()
        self.own = _Gathering()
        self._failing_s: float | None = None  # since when each wait has failed
        self._has_thread = self._has_failed = False

    def start(self) -> None:
        """Start the thread, unless it runs, or none can be started."""
        if not self._has_thread:
            with contextlib.suppress(RuntimeError):  # no more threads
                threading.Thread(target=self._run, name="ecd-ends", daemon=True).start()
                self._has_thread = True  # perhaps the second, which does no harm

    def add(self, events: list[Event], end: Callable[[], None]) -> None:
        added, gathered = (events, end, clock.now_s()), self.own.gathered
        if gathered is None:
            self.give(deque([added]))
        else:
            gathered.append(added)
            if len(gathered) >= MAX_GATHERED:
                self.give(gathered)

    def give(self, gathered: deque[Added]) -> None:
        """Have the thread do what was gathered, or do it here if there can be none.

        What is given twice is done once.
        """
        self._later.put(gathered)
        self.start()
        if not self._has_thread:
            came: BaseException | None = None
            while not self._later.empty():
                try:
                    self._end_all(self._later.get_nowait())
                except BaseException as error:
                    came = came or error
            if came is not None:
                raise came

    def _run(self) -> None:
        while True:
            self._end_next()

    def _end_next(self) -> None:
        try:
            gathered = self._later.get_nowait()
        except queue.Empty:
            gathered = self._later.get()
            clock.sleep(GATHER_S)
        with contextlib.suppress(Exception):  # the wait will say so, or there is none
            gathered[0][0][0].stay_on_device()
        self._end_all(gathered)

    def _end_all(self, gathered: deque[Added]) -> None:
        """End each of these holds, in turn; then raise the first error that came of one."""
        came: BaseException | None = None
        with contextlib.suppress(IndexError):
            while True:
                added = gathered.popleft()
                try:
                    self._end(*added)
                except BaseException as error:
                    came = came or error
        if came is not None:
            raise came

    def _end(self, events: list[Event], end: Callable[[], None], added_s: float) -> None:
        def left_s() -> float:
            if self._failing_s is None:
                self._failing_s = clock.now_s()
            return _left_s(max(self._failing_s, added_s))

        came = outlast(lambda: _wait(events), left_s)
        if events and came is None:
            self._failing_s = None
        if isinstance(came, Exception) and not self._has_failed:
            self._has_failed = True
            logger.warning("the GPU has failed: %s", came)
        try:
            end()
        except Exception:
            logger.exception("a hold could not be ended")
        if came is not None and not isinstance(came, Exception):
            raise came  # Ctrl-C, where the caller has to wait by itself


def _wait(events: list[Event]) -> None:
    for event in events:
        event.wait()


def _left_s(failed_s: float) -> float:
    """Seconds for which a GPU that failed at this time may still continue copies."""
    return max(0.0, failed_s + FAILED_S - clock.now_s())


def outlast(
    wait: Callable[[], object], left_s: Callable[[], float] = lambda: FAILED_S
) -> BaseException | None:
    """Call `wait`, which returns once copies are over, until it does; return what it raised first.

    Neither an exception of a signal's handler nor a refusal of the driver ends the copies: `wait`
    is called again. A device that has failed is given `left_s`, and so is one for which `wait`
    raises MAX_INTERRUPTIONS other errors, which cannot all come from signals.
    """
    came: BaseException | None = None
    pause_s, interruptions, has_failed = 0.0, 0, False
    while True:
        try:
            if pause_s:
                clock.sleep(pause_s)
            if not has_failed:
                wait()
            return came
        except DeviceBusy:
            pause_s = RETRY_S
        except DeviceError as error:
            came, pause_s, has_failed = came or error, left_s(), True
        except Exception as error:
            came, interruptions = came or error, interruptions + 1
            has_failed = has_failed or interruptions >= MAX_INTERRUPTIONS
            pause_s = left_s() if has_failed else RETRY_S
        except BaseException as error:
            came = came or error


_ends = _Ends()


def _in_child() -> None:
    global _ends
    _ends = _Ends()


os.register_at_fork(after_in_child=_in_child)  # the holds are the parent's


def after(events: Iterable[Event], end: Callable[[], None]) -> None:
    """Call `end` on the thread once all events are over; at once if there is none.

    The driver is not asked here whether they are: most were queued a moment ago.
    """
    if left := list(events):
        _ends.add(left, end)
    else:
        end()


def after_failure(end: Callable[[], None]) -> None:
    """Call `end` on the thread once a GPU that reports errors has had its time."""
    failed_s = clock.now_s()

    def end_late() -> None:
        clock.sleep(_left_s(failed_s))
        end()

    _ends.add([], end_late)


@contextlib.contextmanager
def gathering() -> Iterator[None]:
    """Give the thread what the caller adds in the body when that is over, so as not to wake it.

    Woken before, it would compete with the body for the interpreter.
    """
    ends, gathered = _ends, deque[Added]()  # a forked child has others: these are the parent's
    outer = ends.own.gathered
    try:
        if outer is None:
            ends.own.gathered = gathered
        yield
    finally:
        try:
            if gathered:
                ends.give(gathered)
        except BaseException:  # of a signal's handler, perhaps before it was given
            ends.give(gathered)
            raise
        finally:
            ends.own.gathered = outer


def start() -> None:
    """Start the thread now, so that `aside` starts none."""
    _ends.start()


def aside(do: Callable[[], None]) -> None:
    """Call `do` on the thread, later: it may take locks that the caller's finalizers hold."""
    _ends.add([], do)


def under_way(events: Iterable[Event]) -> list[Event]:
    """Those of the events that are not over, or of a device that has failed."""
    return [event for event in events if not _is_over(event)]


def _is_over(event: Event) -> bool:
    try:
        return event.is_over()
    except DeviceError:
        return False
