"""Messages to systemd of the daemon's state, where systemd runs it: sd_notify(3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from systemd_watchdog.systemd_watchdog import WatchDog

from ecd.base.clock import Clock

STATUS_PERIOD_S = 5.0


def is_supervised() -> bool:
    """Whether systemd or Kubernetes runs this daemon, and so restarts it."""
    return any(map(os.environ.get, ("NOTIFY_SOCKET", "KUBERNETES_SERVICE_HOST")))


class ServiceManager:
    """Sends states to the service manager; does nothing where none listens."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        to_manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        to_manager.setblocking(False)  # a manager that does not read holds nothing up
        self._watchdog = WatchDog(to_manager)
        self._is_ready_told = False

    def say(self, status: str) -> None:
        """Set the line that `systemctl status` shows."""
        with contextlib.suppress(OSError):
            self._watchdog.status(status)

    def ready(self) -> None:
        """Say that the daemon serves, unless the manager's queue is full."""
        with contextlib.suppress(OSError):
            self._watchdog.ready()
            self._is_ready_told = True

    async def keep_alive(self, status: Callable[[], str]) -> None:
        """Say that the event loop runs, as often as the watchdog wants, until cancelled.

        Says first that the daemon serves, if `ready` could not.
        """
        if not self._watchdog.is_enabled:
            await asyncio.Event().wait()
        period_s = min(STATUS_PERIOD_S, self._watchdog.timeout_td.total_seconds() / 3)
        while True:
            if not self._is_ready_told:
                self.ready()
            self.say(status())
            with contextlib.suppress(OSError):
                self._watchdog.notify()
            await self._clock.sleep(period_s)
