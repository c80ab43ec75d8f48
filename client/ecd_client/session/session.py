"""A client's life as the daemon sees it, from Welcome to the end of the stream.

Leases and pins belong to a session. Its memory and files live on after the stream, for as long as
an item or a put refers to them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ecd_client import forks
from ecd_client.device.attach import introduce
from ecd_client.device.dma import SessionDma
from ecd_client.errors import DaemonUnavailable, EcdError
from ecd_client.files import open_file
from ecd_client.pools import MappedPools
from ecd_client.session.calls import Calls
from ecd_client.session.leases import Hold, Lease, Pin
from ecd_client.shared.board import MappedBoard
from ecd_client.shared.index import AskDaemon, IndexReader, OnMiss
from ecd_client.shared.key_locks import KeyLocks
from ecd_client.shared.puts import PutWriter
from ecd_client.values import Extent
from ecd_proto.contract import MAX_BATCH
from ecd_proto.encoders import RegisteredEncoder
from ecd_proto.engines import Engine
from ecd_proto.shm.files import lock_byte
from ecd_proto.shm.rows import Row
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from ecd_client.device.pool import DevicePool

logger = logging.getLogger(__name__)

Outbox = queue.SimpleQueue[Any]
WaitEnded = Callable[[pb.AcquireOutcome | None], None]
"""Called with a wait's outcome, or with None when the session ended first."""
_in_use: set[Session] = set()
"""Sessions with a stream, an item or a put. Python's collector would unmap the page of one that it
finds together with such an item, before it lets the item end its pin there."""


class Session:
    """One session: its stream, its memory, its leases, pins and waits."""

    def __init__(
        self,
        calls: Calls,
        stream: Any,
        outbox: Outbox,
        first: pb.SessionEvent,
        sent_s: float,
        uid: int,
    ) -> None:
        """Take part in what `first`, the Welcome to the Hello of `sent_s`, names.

        Raises OSError where a file is missing or not user `uid`'s.
        """
        welcome = first.welcome
        self.token = welcome.session
        self.incarnation = first.incarnation
        self.lease_ttl_s = welcome.lease_ttl_s
        self.node = welcome.node
        self.may_bring = bool(welcome.node) or welcome.has_disk
        """Whether the daemon may know of entries that are not in its memory."""
        self._takes_engine, self.takes_looks = welcome.takes_engine, welcome.takes_looks
        self._takes_encoder, self._is_old = welcome.takes_encoder, False
        self._on_apart: Callable[[Engine], None] | None = None
        self.calls = calls
        self._stream, self._outbox = stream, outbox
        # Added to the daemon's times it makes them ours, early by the time Welcome took.
        self._clock = sent_s - welcome.now_s
        self._lock = threading.RLock()  # a garbage-collected item may release within it
        self._leases: dict[int, Lease] = {}
        self._renewing: deque[list[int]] = deque()
        self._waits: dict[int, WaitEnded] = {}
        self._answered: dict[int, pb.AcquireOutcome] = {}  # before their tickets were known
        self._releases: list[int] = []
        self._releasing = False
        self._refs = 1  # the stream's; each item and each put in flight adds one
        self._over = False
        self.abandoned = self.is_cut_off = False
        self.index: IndexReader | None = None
        self.puts: PutWriter | None = None
        with forks.steady, contextlib.ExitStack() as opened:
            lock_fd = open_file(welcome.lock_path, os.O_RDWR, uid)
            opened.callback(os.close, lock_fd)
            lock_byte(lock_fd, welcome.lock_offset)
            self.key_locks = KeyLocks(lock_fd)
            opened.callback(self.key_locks.end)
            board = MappedBoard.open(welcome.index, uid) if welcome.HasField("index") else None
            self._dma: SessionDma | None = None
            if board is not None:
                devices = {file.device: file for file in welcome.pools if file.kind == "device"}
                self._dma = SessionDma(welcome.attach_path, self.token, board, devices, uid)
                opened.callback(self._dma.end)  # as the last thing but for the lock
            self.pools = MappedPools(welcome.pools, uid, self._dma)
            opened.callback(self.pools.close)
            if board is not None:
                self.index = IndexReader(board)
                if welcome.index.doorbell_path:
                    self.puts = PutWriter(
                        board, self.index, self.pools.granted, welcome.index.doorbell_path
                    )
                    opened.callback(self.puts.close)
            self._files = opened.pop_all()
            forks.add(self)
        _in_use.add(self)
        introduce(welcome.attach_path, self.token, uid)
        self.pools.populate_soon()  # by threads, which must not be started within `steady`

    # -- calls ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_or_abandoned(self) -> Iterator[None]:
        """Abandon the session if the body is interrupted: its state is unknown then."""
        try:
            yield
        except Exception as error:
            if isinstance(error, DaemonUnavailable):
                self.abandon()
            raise
        except BaseException:
            self.abandon()
            raise

    # -- life ----------------------------------------------------------------------------------

    def ref(self) -> bool:
        """Keep the session's lock, and so its memory, until `unref`. False: the stream is over."""
        with self._lock:
            if self._over:
                return False
            self._refs += 1
            return True

    def unref(self) -> None:
        with self._lock:
            self._refs -= 1
            last = self._refs == 0
        if last:
            self._close_files()

    def _close_files(self) -> None:
        try:
            with forks.steady:
                self._files.close()
        finally:
            _in_use.discard(self)

    def abandon(self) -> None:
        """End the stream: the daemon reclaims all that the session owns."""
        if self.is_cut_off or forks.is_uncut():
            return
        self.abandoned = True
        self._stream.cancel()
        self.calls.end()

    def end(self) -> None:
        """Act on the end of the stream."""
        with self._lock:
            self._over = True
            waits, self._waits = self._waits, {}
            self._answered.clear()
        if self.puts is not None:
            self.puts.session_is_over = True
        self.key_locks.end()
        self.calls.end()
        for ended in waits.values():
            ended(None)
        self.unref()

    def cut_off(self) -> None:
        """In a forked child: the session is the parent's, and this process does not keep it alive.

        Extents that the parent has pinned stay mapped, for views made before the fork: they are
        right for as long as the parent keeps their items.
        """
        self._lock = threading.RLock()
        self._over = self.abandoned = self.is_cut_off = True
        self.calls.cut_off()
        self.pools.cut_off()
        self.key_locks.cut_off()
        if self._dma is not None:
            self._dma.cut_off()
        if self.index is not None:
            self.index.cut_off()
        if self.puts is not None:
            self.puts.cut_off()
        self._close_files()

    # -- leases and pins -----------------------------------------------------------------------

    def lease(self, leased: pb.Leased) -> Hold | None:
        """Hold an entry that was leased, by a pin if one is to be had: it outlives the daemon.

        None: the stream ended meanwhile. Raises EcdError where this process has not mapped the
        entry's pool.
        """
        try:
            pool = self.pools.of(leased.extent)
        except EcdError:
            self._release(leased.lease)
            raise
        if not self.ref():
            return None
        expires_s = leased.expires_s + self._clock
        of_entry = leased.content, leased.extent, expires_s, leased.entry
        lease = Lease(leased.lease, self, pool, *of_entry)
        with self._lock:
            self._leases[lease.id] = lease
        return self._pin_leased(lease, leased.entry) or lease

    def _pin_leased(self, lease: Lease, entry: int) -> Pin | None:
        """Pin a leased entry in place of its lease. None: the lease stays."""
        index = self.index
        if index is None or not entry or not self.ref():
            return None
        try:
            pin = index.pin_leased(entry)
        except AskDaemon:
            self.unref()
            return None
        extent, content = lease.extent, lease.content
        try:
            place = extent.pool, extent.offset, extent.nbytes
            shape, metadata, cost_s = tuple(content.shape), content.metadata, content.cost_s
            row = Row(0, *place, content.dtype, shape, metadata, cost_s, False)
            held = Pin(self, index, row, pin, lease.pool, lease.number)
            if lease.holds:  # or the daemon may have looked for pins before this one
                lease.end()
                return held
        except BaseException:  # Ctrl-C
            index.unpin(pin)
            self.unref()
            raise
        held.end()
        return None

    def pin(self, namespace: str, mm_hash: str, on_miss: OnMiss, is_use: bool = True) -> Pin | None:
        """Hold an entry without a call. None: it is not stored. Raises AskDaemon."""
        index = self.index
        if index is None or not self.ref():
            raise AskDaemon
        try:
            found = index.pin(namespace, mm_hash, on_miss, is_use)
        except BaseException:  # Ctrl-C too
            self.unref()
            raise
        if found is None:
            self.unref()
            return None
        row, pin = found
        try:
            pool = self.pools.by_number.get(row.pool)  # `of`, without its call: every hit is here
            if pool is None or row.offset + row.nbytes > pool.nbytes:
                raise AskDaemon
            return Pin(self, index, row, pin, pool)
        except BaseException:
            index.unpin(pin)
            self.unref()
            raise

    def pin_own(self, extent: Extent) -> Pin | None:
        """Hold memory that this session writes, before the put is done. None: it cannot."""
        index, pool = self.index, self.pools.by_number.get(extent.pool)
        if index is None or pool is None or not self.ref():
            return None
        try:
            pin = index.pin_own(extent.pool, extent.offset)
        except AskDaemon:
            self.unref()
            return None
        row = Row(0, extent.pool, extent.offset, extent.nbytes, "", (), b"", 0.0, False)
        return Pin(self, index, row, pin, pool)

    @property
    def near(self) -> DevicePool | None:
        """The device pool of the process's GPU, once copies of it have begun and it is mapped."""
        return None if self._dma is None else self._dma.near

    def release(self, lease: Lease) -> None:
        """End a lease, without waiting for the daemon's answer."""
        with self._lock:
            lease.expires_s = 0.0
            is_kept = self._leases.pop(lease.id, None) is not None
        if is_kept:
            self._release(lease.id)
        self.unref()

    def _release(self, lease_id: int) -> None:
        with self._lock:
            self._releases.append(lease_id)
        self._flush_releases()

    def _flush_releases(self) -> None:
        with self._lock:
            if self._releasing or not self._releases or self._over:
                return
            self._releasing = True
            leases, self._releases = self._releases[:MAX_BATCH], self._releases[MAX_BATCH:]
        request = pb.ReleaseRequest(session=self.token, leases=leases)
        self.calls.later("release", request).add_done_callback(self._released)

    def _released(self, _: Any) -> None:
        with self._lock:
            self._releasing = False
        self._flush_releases()

    # -- waits ---------------------------------------------------------------------------------

    def on_wait_ended(self, ticket: int, ended: WaitEnded) -> None:
        with self._lock:
            outcome = self._answered.pop(ticket, None)
            if outcome is None and not self._over:
                self._waits[ticket] = ended
                return
        ended(outcome)

    def cancel_wait(self, ticket: int) -> None:
        """End a wait early; its outcome still comes, as every wait's does."""
        self._outbox.put(pb.SessionRequest(cancel_waits=pb.CancelWaits(tickets=[ticket])))

    def stop_making(self, keys: Sequence[pb.Key]) -> None:
        """Tell the daemon that the client does not make these keys after all."""
        for start in range(0, len(keys), MAX_BATCH):
            message = pb.StopMaking(keys=keys[start : start + MAX_BATCH])
            self._outbox.put(pb.SessionRequest(stop_making=message))

    # -- the engine ----------------------------------------------------------------------------

    def describe(self, engine: Engine, on_apart: Callable[[Engine], None] | None) -> None:
        """Describe this client's engine to the daemon, unless it is too old for such messages."""
        self._on_apart = on_apart
        if self._takes_engine:
            self._outbox.put(pb.SessionRequest(engine=engine.message))

    def register(self, encoder: RegisteredEncoder) -> None:
        """Tell the daemon where the engine's API server is reached, unless it is too old."""
        if self._takes_encoder:
            self._outbox.put(pb.SessionRequest(encoder=encoder.message))
        elif not self._is_old:
            self._is_old = True
            logger.warning("the daemon is too old to register an encoder: upgrade it")

    def _engine_apart(self, status: pb.EngineStatus) -> None:
        other, on_apart = Engine.of(status.engine, status.pid), self._on_apart
        if other is not None and on_apart is not None:
            try:
                on_apart(other)
            except Exception:  # the caller's: the stream goes on
                logger.exception("what Client.describe was given failed")

    # -- the stream ----------------------------------------------------------------------------

    def renewal(self) -> pb.SessionRequest | None:
        """The request that renews every lease of this session, if it has any."""
        with self._lock:
            if not self._leases:
                return None
            leases = list(self._leases)
            self._renewing.append(leases)
        return pb.SessionRequest(renew=pb.Renew(leases=leases))

    def take(self, event: pb.SessionEvent) -> None:
        """Act on one event of the stream."""
        match event.WhichOneof("event"):
            case "renewed":
                expires_s = event.renewed.expires_s + self._clock
                with self._lock:
                    for lease_id in self._renewing.popleft():
                        if lease := self._leases.get(lease_id):
                            lease.expires_s = max(lease.expires_s, expires_s)
            case "leases_ended":
                with self._lock:
                    for lease_id in event.leases_ended.leases:
                        if lease := self._leases.pop(lease_id, None):
                            lease.expires_s = 0.0
            case "waits_ended":
                for each in event.waits_ended.ended:
                    self._end_wait(each)
            case "engine_apart":
                self._engine_apart(event.engine_apart)

    def _end_wait(self, event: pb.WaitEnded) -> None:
        with self._lock:
            ended = self._waits.pop(event.ticket, None)
            if ended is None:
                self._answered[event.ticket] = event.outcome
        if ended is not None:
            ended(event.outcome)
