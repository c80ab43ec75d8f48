"""A gRPC server that listens again when a caller has ended it.

grpcio (seen with 1.85) ends a server for good when the path of a call is not UTF-8, and tells
nobody: whoever can connect could make the daemon deaf. Calls that are open go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from ecd.base.clock import Clock
from ecd_proto.backoff import Backoff

logger = logging.getLogger(__name__)

TERMINATION_S = 0.1
"""Pause between checks that the server is still there."""
PAUSES = Backoff(0.01, 1.0)
"""First and longest pause between attempts to bind again: each is twice the one before.

The old server releases its address a moment after its end.
"""
KEPT_ENDED = 8
"""Ended servers that are kept for their open calls: grpcio cancels them with the server object."""


class Listener:
    """One address, and the server that listens there now."""

    def __init__(self, make: Callable[[], Any], clock: Clock) -> None:
        """`make` makes a bound server; its exceptions are raised here."""
        self._make, self._server, self._clock = make, make(), clock
        self._ended: deque[Any] = deque(maxlen=KEPT_ENDED)
        self._keeping: asyncio.Future[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        await self._server.start()
        self._keeping = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while not self._stopping:
            try:
                # Without a timeout this would wait for the end of all calls that are open.
                await self._server.wait_for_termination(TERMINATION_S)
            except Exception as error:
                logger.warning("a caller ended the server, which listens again: %s", error)
                self._ended.append(self._server)
                await self._listen_again()

    async def _listen_again(self) -> None:
        """Try until it works; a failure that lasts is logged once."""
        pause_s, told = PAUSES.after(), False
        while not self._stopping:
            try:
                self._server = self._make()
                await self._server.start()
            except Exception as error:
                if pause_s == PAUSES.longest_s and not told:
                    told = True
                    logger.error("nobody can connect, the server cannot listen again: %s", error)
                await self._clock.sleep(pause_s)
                pause_s = PAUSES.after(pause_s)
            else:
                if told:
                    logger.warning("the server listens again")
                return

    async def stop(self, grace_s: float) -> None:
        """Let calls in flight finish, for `grace_s` at most."""
        self._stopping = True
        servers = [self._server, *self._ended]
        stopping = [server.stop(grace_s) for server in servers]
        await asyncio.gather(*stopping, return_exceptions=True)
        if self._keeping is not None:
            await asyncio.gather(self._keeping, return_exceptions=True)
