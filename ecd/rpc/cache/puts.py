"""Puts without a call: a client rings the doorbell, its finished puts become entries, its mailbox
holds the answers.

The size of a client's next grant is decided here too: room for a few puts like its last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from ecd.base.clock import Clock
from ecd.base.wire import InvalidRequest, check_content, check_key
from ecd.core.cache import Cache
from ecd.core.model.board import Put
from ecd.core.model.outcomes import AlreadyStored, BeingWritten, Committed, NotReserved, Wakeup
from ecd.core.model.types import SessionId
from ecd.live.intake import Taken
from ecd_proto.shm.barriers import STORES_IN_ORDER
from ecd_proto.shm.session_page import DOORBELL, DUPLICATE, GRANTED_POOL, REFUSED, STORED

logger = logging.getLogger(__name__)

GRANTED_PUTS, MIN_GRANT_BYTES, MAX_GRANT_BYTES = 8, 4 << 20, 64 << 20
FIRST_GRANT_BYTES, FIRST_PUT_BYTES = 1 << 20, 64 << 10
"""The first grant of a new client, in pieces of at least the second number."""
WELCOME_SHARE = 1 / 2
"""Share of all grants that clients without a put leave to the others."""
KEPT_PUTS, KEPT_BYTES = (2, 8), 1 << 20
"""A grant with less than this left is replaced, so that its client never waits for one."""
MAX_GRANT_SHARE = 1 / 16
"""Largest part of the pool that one session is granted."""
PUTS_AT_A_TIME = 16
"""Puts stored in one turn of the event loop, and the rest of their page: each takes some 40 us."""
MAX_RINGS = 1024
"""Rings received at a time: more than the kernel queues for one socket by default."""
BURST = 3
"""Rings received at a time above which the event loop listens: the kernel's queue is short."""
QUEUE_PATH = Path("/proc/sys/net/unix/max_dgram_qlen")


class Doorbell:
    """A datagram socket to which clients send the number of their page.

    A thread listens that preempts nobody as it wakes up (SCHED_BATCH), or a ring would take the
    core from its client: 0.3 ms of a put on a busy core. While somebody waits for a put, and where
    readers cannot read one before its row is there (Arm), the event loop listens itself.
    """

    def __init__(self, path: Path) -> None:
        """Bind the socket. Raises OSError: the path is too long, most likely."""
        self.path = path
        self._rings = max(MAX_RINGS, _longest_queue() + 1)
        self._rung: Callable[[], None] | None = None
        self._listener: threading.Thread | None = None
        self._is_urgent = False
        self.taken = 0
        """Number of rings that the last `take` received."""
        with contextlib.ExitStack() as opened:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            opened.callback(os.close, self._stop)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            opened.callback(self._socket.close)
            self._socket.bind(str(path))
            os.chmod(path, 0o600)
            self._files = opened.pop_all()

    def listen(self, rung: Callable[[], None]) -> None:
        """Have `rung` called on the running event loop when clients have rung."""
        self._rung = rung
        try:
            if not STORES_IN_ORDER:
                raise OSError("readers wait for a put's row here")
            epoll = select.epoll()
            self._files.callback(epoll.close)
            epoll.register(self._stop, select.EPOLLIN)
            epoll.register(self._socket, select.EPOLLIN | select.EPOLLET)  # once for each ring
            listener = threading.Thread(
                target=self._listen, args=(epoll, asyncio.get_running_loop()), name="doorbell"
            )
            listener.daemon = True
            listener.start()
            self._listener = listener
        except (OSError, RuntimeError) as error:  # no descriptor, no thread
            logger.info("the event loop listens to the doorbell: %s", error)
            self.hurry(True)

    def _listen(self, epoll: select.epoll, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
        while all(fd != self._stop for fd, _ in epoll.poll()):
            loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        if self._rung is not None:  # else it was closed meanwhile
            self._rung()

    def hurry(self, is_urgent: bool) -> None:
        """Wake the event loop by each ring, or stop doing so."""
        is_urgent = is_urgent or self._listener is None
        if is_urgent == self._is_urgent or self._rung is None:
            return
        self._is_urgent = is_urgent
        if is_urgent:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._hear)
        else:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())

    def take(self) -> Iterable[int]:
        """All pages that rang since the last call, each once, in order."""
        pages: dict[int, None] = {}
        self.taken = 0
        with contextlib.suppress(BlockingIOError):
            for _ in range(self._rings):
                ring = self._socket.recv(DOORBELL.size + 1)
                self.taken += 1
                with contextlib.suppress(struct.error):  # anybody may send anything
                    pages[DOORBELL.unpack(ring)[0]] = None
        return pages

    def close(self) -> None:
        self._rung = None
        os.eventfd_write(self._stop, 1)
        if self._listener is not None:
            self._listener.join()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._files.close()


def _longest_queue() -> int:
    """How many datagrams the kernel queues for a socket; 0 if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        return int(QUEUE_PATH.read_text())
    return 0


class Mailboxes(Protocol):
    """The memory where clients describe what they have written and read the daemon's answers."""

    def page_of(self, session: SessionId) -> int | None: ...

    def finished_puts(self, page: int) -> tuple[SessionId, list[Put]] | None: ...

    def answer(self, session: SessionId, put: Put, outcome: int) -> None: ...


class PutIntake:
    """Stores what clients put without a call: the `Intake` of a daemon with a doorbell."""

    def __init__(
        self,
        cache: Cache,
        mailboxes: Mailboxes,
        doorbell: Doorbell,
        observe: Callable[[str, float, Put], None],
        clock: Clock,
    ) -> None:
        """`observe` is told how long each put took here, as for calls.

        Grants lie in the cache's pool of number GRANTED_POOL, whichever others it has.
        """
        self._cache, self._mailboxes, self._clock = cache, mailboxes, clock
        [self._pool] = (pool for pool in cache.pools if pool.number == GRANTED_POOL)
        self._doorbell, self._observe = doorbell, observe
        self._rung: dict[int, None] = {}  # pages to empty, the first to ring first
        self._to_grant: dict[SessionId, int] = {}  # bytes of the session's last put
        self.taken = 0

    @property
    def is_pending(self) -> bool:
        return bool(self._rung or self._to_grant)

    @property
    def collected(self) -> int:
        """A page that rings again before it is emptied keeps its place, and counts once."""
        return self.taken + len(self._rung)

    def listen(self, rung: Callable[[], None]) -> None:
        self._doorbell.listen(rung)

    def collect(self) -> None:
        self._rung |= dict.fromkeys(self._doorbell.take())
        cache, is_busy = self._cache, self._doorbell.taken >= BURST
        self._doorbell.hurry(is_busy or cache.views.waits > 0 or cache.views.is_reserving)

    def hurry(self) -> None:
        self._doorbell.hurry(True)

    def step(self, now_s: float) -> Taken:
        woken: list[Wakeup] = []
        puts = 0
        while self._rung and puts < PUTS_AT_A_TIME:
            page = next(iter(self._rung))
            del self._rung[page]
            self.taken += 1
            puts += self._empty(page, now_s, woken)
        return Taken(puts, woken)

    def grant_next(self, now_s: float) -> None:
        if self._to_grant:
            session = next(iter(self._to_grant))
            self.grant(session, self._to_grant.pop(session), now_s)

    def take_last(self, session: SessionId, now_s: float) -> Taken:
        woken: list[Wakeup] = []
        page = self._mailboxes.page_of(session)
        return Taken(0 if page is None else self._empty(page, now_s, woken), woken)

    def welcome(self, session: SessionId, now_s: float) -> None:
        pool, limits = self._pool, self._pool.limits
        granted = pool.granted_bytes + FIRST_GRANT_BYTES
        filled = pool.used_bytes + granted
        if (
            granted <= WELCOME_SHARE * limits.granted_share * pool.nbytes
            and filled <= limits.low_watermark * pool.nbytes
        ):
            puts = FIRST_GRANT_BYTES // pool.rounded_bytes(FIRST_PUT_BYTES)
            self._cache.granted.grant(session, FIRST_PUT_BYTES, 0, puts, now_s, pool)

    def grant(self, session: SessionId, nbytes: int, now_s: float) -> None:
        cache, pool = self._cache, self._pool
        rounded = pool.rounded_bytes(nbytes)
        fewest, enough = KEPT_PUTS
        kept = max(fewest, min(enough, KEPT_BYTES // rounded))
        if cache.granted.room(session, nbytes, pool) < kept:
            most = min(MAX_GRANT_BYTES, int(MAX_GRANT_SHARE * pool.nbytes))
            puts = max(GRANTED_PUTS, MIN_GRANT_BYTES // rounded)
            cache.granted.grant(session, nbytes, fewest, min(puts, most // rounded), now_s, pool)

    def _empty(self, page: int, now_s: float, woken: list[Wakeup]) -> int:
        """Store and answer the page's puts, adding the ended waits; returns the number of puts."""
        session, puts = self._mailboxes.finished_puts(page) or (None, [])
        if session is None:
            return 0
        for put in puts:
            started_s = self._clock.now_s()
            outcome = self._store(session, put, now_s, woken)
            self._mailboxes.answer(session, put, outcome)
            if outcome != REFUSED:  # a refused put may claim any size
                self._to_grant[session] = put.content.nbytes
            self._observe("Put", self._clock.now_s() - started_s, put)
        return len(puts)

    def _store(self, session: SessionId, put: Put, now_s: float, woken: list[Wakeup]) -> int:
        try:
            key, content = check_key(*put.key), check_content(put.content)
        except InvalidRequest as error:
            logger.warning("a put that makes no sense: %s", error)
            self._cache.granted.refuse(session, put.key, put.content, put.extent)
            return REFUSED
        match self._cache.granted.put(session, key, content, put.extent, now_s):
            case Committed(ended):
                woken += ended
                return STORED
            case AlreadyStored():
                return DUPLICATE
            case BeingWritten() | NotReserved():
                return REFUSED
