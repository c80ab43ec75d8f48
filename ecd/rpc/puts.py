"""Puts that come without a call: a bell rings, what was written becomes an entry, the desk says so.

Which memory a client may write to ahead of need is decided here too: some times what it put last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ecd.core.cache import Cache
from ecd.core.clients import Put
from ecd.core.types import AlreadyStored, BeingWritten, Committed, NotReserved, SessionId
from ecd.rpc.sessions import Sessions
from ecd.wire import InvalidRequest, check_key, content_from
from ecd_proto.shm import BELL, DUPLICATE, REFUSED, STORED

logger = logging.getLogger(__name__)

GRANTED_PUTS, MIN_GRANT_BYTES, MAX_GRANT_BYTES = 8, 4 << 20, 64 << 20
KEPT_PUTS, KEPT_BYTES = (2, 8), 1 << 20
"""When less than this is left of a grant a new one takes its place: its client does not wait."""
MAX_GRANT_SHARE = 1 / 16
"""Of the pool, to one session."""
PUTS_AT_A_TIME = 16
"""Listed in one turn of the event loop, with those of their sessions: each takes some 40 us."""
MAX_RINGS = 1024
"""Taken at a time: more than the kernel keeps for one socket, unless it is told to."""
QUEUE_PATH = Path("/proc/sys/net/unix/max_dgram_qlen")


class Bell:
    """A datagram socket in the daemon's directory: clients say which page to look at."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: the path is too long, mostly."""
        self.path = path
        self._rings = max(MAX_RINGS, _longest_queue() + 1)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(str(path))
            os.chmod(path, 0o600)
        except OSError:
            self._socket.close()
            raise

    def listen(self, rung: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), rung)

    def take(self) -> dict[int, None]:
        """Pages that were named since the last call, in order: all that were before this one."""
        pages: dict[int, None] = {}
        with contextlib.suppress(BlockingIOError):
            for _ in range(self._rings):
                with contextlib.suppress(struct.error):  # anybody may send anything
                    pages[BELL.unpack(self._socket.recv(BELL.size + 1))[0]] = None
        return pages

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()


def _longest_queue() -> int:
    """How many datagrams the kernel keeps for a socket."""
    with contextlib.suppress(OSError, ValueError):
        return int(QUEUE_PATH.read_text())
    return 0


class Desks(Protocol):
    """Where clients say what they have written, and read what came of it."""

    def page_of(self, session: SessionId) -> int | None: ...

    def finished_puts(self, page: int) -> tuple[SessionId, list[Put]] | None: ...

    def answer(self, session: SessionId, put: Put, outcome: int) -> None: ...


class Puts:
    """One per daemon, on the event loop that owns the core."""

    def __init__(
        self,
        cache: Cache,
        desks: Desks,
        sessions: Sessions,
        bell: Bell,
        stored: Callable[[], None],
        observe: Callable[[str, float], None],
    ) -> None:
        """`stored` is told after something was; `observe` how long each put took here."""
        self._cache, self._desks, self._sessions = cache, desks, sessions
        self._bell, self._stored, self._observe = bell, stored, observe
        self._rung: dict[int, None] = {}  # pages to look at, the first to ring first
        self._to_grant: dict[SessionId, int] = {}  # bytes of what they put last
        self._looked = 0
        self._goes_on = False

    def listen(self) -> None:
        self._bell.listen(self.hear)

    def hear(self) -> None:
        """Take some of what has been put, the rest in the next turns of the loop."""
        self._rung |= self._bell.take()
        if not self._goes_on:
            self._look()

    async def catch_up(self) -> None:
        """Take all that had been put when this was called.

        Its pages are in the queue by now, and a page that rings again keeps its place there.
        """
        self.hear()
        target = self._looked + len(self._rung)
        while self._looked < target:
            await asyncio.sleep(0)

    def take_last(self, session: SessionId) -> None:
        """Take all that this session has put."""
        page = self._desks.page_of(session)
        if page is not None:
            self._look_at(page)

    def _look(self) -> None:
        self._goes_on = False
        puts = 0
        while self._rung and puts < PUTS_AT_A_TIME:
            page = next(iter(self._rung))
            del self._rung[page]
            self._looked += 1
            puts += self._look_at(page)
        if self._to_grant:
            session = next(iter(self._to_grant))  # it may have to evict: one a turn
            self.grant(session, self._to_grant.pop(session))
        if self._rung or self._to_grant:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._look)

    def grant(self, session: SessionId, nbytes: int) -> None:
        """Let the session have room for some more puts of this size, unless it has."""
        rounded = self._cache.allocator.rounded_bytes(nbytes)
        fewest, enough = KEPT_PUTS
        if self._cache.puts_left(session, nbytes) < max(fewest, min(enough, KEPT_BYTES // rounded)):
            most = min(MAX_GRANT_BYTES, int(MAX_GRANT_SHARE * self._cache.allocator.pool_bytes))
            puts = max(GRANTED_PUTS, MIN_GRANT_BYTES // rounded)
            most = min(puts, most // rounded)
            self._cache.grant(session, nbytes, fewest, most, time.monotonic())

    def _look_at(self, page: int) -> int:
        """How many puts it had."""
        session, puts = self._desks.finished_puts(page) or (None, [])
        if session is None or not puts:
            return 0
        for put in puts:
            started_s = time.perf_counter()
            outcome = self._store(session, put)
            self._desks.answer(session, put, outcome)
            if outcome != REFUSED:  # what is refused may be of any size
                self._to_grant[session] = put.content.nbytes
            self._observe("Put", time.perf_counter() - started_s)
        self._sessions.arm()
        self._stored()
        return len(puts)

    def _store(self, session: SessionId, put: Put) -> int:
        try:
            key, content = check_key(*put.key), content_from(put.content)
        except InvalidRequest as error:
            logger.warning("a put that makes no sense: %s", error)
            return REFUSED
        match self._cache.put(session, key, content, put.extent, time.monotonic()):
            case Committed(woken):
                self._sessions.deliver(woken)
                return STORED
            case AlreadyStored():
                return DUPLICATE
            case BeingWritten() | NotReserved():
                return REFUSED
