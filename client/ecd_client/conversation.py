"""One session stream from Welcome to its end, and everything that was granted on it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from ecd_client import forks
from ecd_client.calls import Calls, open_file
from ecd_client.errors import DaemonUnavailable, InvalidArgument
from ecd_client.index import AskDaemon, Index, Pin
from ecd_client.puts import Begun, CopyTo, What
from ecd_proto.contract import MAX_BATCH
from ecd_proto.mapping import Mapping
from ecd_proto.shm import Row, lock_session
from ecd_proto.v1 import cache_pb2 as pb

Outbox = queue.SimpleQueue[Any]
WaitEnded = Callable[[pb.AcquireOutcome | None], None]
"""Told how a wait ended; None: with the conversation."""


@dataclass(eq=False)
class Lease:
    """A lease of this process; `expires_s`, on `time.monotonic`, is never after the daemon's."""

    id: int
    conversation: Conversation
    content: pb.Content
    extent: pb.Extent
    expires_s: float

    @property
    def holds(self) -> bool:
        return time.monotonic() < self.expires_s

    def end(self) -> None:
        self.conversation.release(self)


class Conversation:
    """One session stream, from Welcome until it breaks, and what was granted on it."""

    def __init__(
        self,
        calls: Calls,
        stream: Any,
        outbox: Outbox,
        first: pb.SessionEvent,
        sent_s: float,
        uid: int,
        prefault: bool,
    ) -> None:
        """`first` is the Welcome that answers the Hello of `sent_s`; its files are to be `uid`'s.

        Raises OSError: they are not, or there are none.
        """
        welcome = first.welcome
        self.token = welcome.session
        self.incarnation = first.incarnation
        self.daemon = welcome.daemon
        self.lease_ttl_s = welcome.lease_ttl_s
        self.pool_path = welcome.pool.path
        self.node = welcome.node
        self.calls = calls
        self._stream, self._outbox = stream, outbox
        # Added to the daemon's times it makes them ours, early by the time Welcome took.
        self._clock = sent_s - welcome.now_s
        self.pool_bytes = welcome.pool.nbytes
        self._lock = threading.RLock()  # a garbage-collected item may release within it
        self._leases: dict[int, Lease] = {}
        self._renewing: deque[list[int]] = deque()
        self._waits: dict[int, WaitEnded] = {}
        self._answered: dict[int, pb.AcquireOutcome] = {}  # before their tickets were known
        self._releases: list[int] = []
        self._releasing = False
        self._users = 1  # the stream, every item and every put in flight
        self._over = False
        self.abandoned = self.is_cut_off = False
        self._writable: Mapping | None = None
        with forks.steady, contextlib.ExitStack() as opened:
            self.pool_fd = open_file(welcome.pool.path, os.O_RDWR, uid)
            opened.callback(os.close, self.pool_fd)
            self.pool_fd_path = f"/proc/{os.getpid()}/fd/{self.pool_fd}"
            if os.fstat(self.pool_fd).st_ino != welcome.pool.inode:
                raise FileNotFoundError(f"{welcome.pool.path} is not the daemon's file")
            lock_fd = open_file(welcome.lock_path, os.O_RDWR, uid)
            opened.callback(os.close, lock_fd)
            lock_session(lock_fd, welcome.lock_offset)
            self._readable = Mapping(self.pool_fd, self.pool_bytes, writable=False)
            self.index = Index.open(welcome.index, uid) if welcome.HasField("index") else None
            self._files = opened.pop_all()
            forks.add(self)
        self._prefault = prefault
        if prefault:
            self._readable.populate_soon()
            self._map_writable()

    # -- calls ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_or_abandoned(self) -> Iterator[None]:
        """What breaks off ends the conversation: nobody knows where it stands.

        gRPC's errors leave it as EcdError.
        """
        try:
            yield
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            meaning = self.calls.meaning(error)
            if not isinstance(meaning, InvalidArgument):
                self.abandon()
            raise meaning from None
        except Exception as error:
            if isinstance(error, DaemonUnavailable):
                self.abandon()
            raise
        except BaseException:
            self.abandon()
            raise

    # -- memory --------------------------------------------------------------------------------

    def read_view(self, extent: pb.Extent | Row, keeps: object = None) -> memoryview:
        return self._readable.view(extent.offset, extent.nbytes, keeps)

    def write_view(self, extent: pb.Extent) -> memoryview:
        return self._map_writable().view(extent.offset, extent.nbytes)

    def _map_writable(self) -> Mapping:
        with self._lock:
            if self._writable is None:
                self._writable = Mapping(self.pool_fd, self.pool_bytes, writable=True)
                if self._prefault:
                    self._writable.populate_soon()
            return self._writable

    def use(self) -> bool:
        """Keep the daemon from reusing what this process may touch. False: the stream is over."""
        with self._lock:
            if self._over:
                return False
            self._users += 1
            return True

    def unuse(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._close_files()

    def _close_files(self) -> None:
        with forks.steady:
            if self.index is not None and self.index.puts is not None:
                self.index.puts.close()
            self._files.close()

    def cut_off(self) -> None:
        """In a forked child: the session is the parent's, and this process does not keep it alive.

        What the parent has pinned stays mapped, for views made before: they are right for as long
        as the parent keeps their items.
        """
        self._lock = threading.RLock()
        self._over = self.abandoned = self.is_cut_off = True
        if self._writable is not None:
            self._writable.cut_off()
        if self.index is not None:
            self.index.cut_off()
        self._close_files()

    # -- leases --------------------------------------------------------------------------------

    def lease(self, leased: pb.Leased) -> Lease | None:
        """Keep a lease that was granted. None: the stream ended meanwhile."""
        if not self.use():
            return None
        lease = Lease(
            leased.lease, self, leased.content, leased.extent, leased.expires_s + self._clock
        )
        with self._lock:
            self._leases[lease.id] = lease
        return lease

    def pin(self, namespace: str, mm_hash: str, final: bool, or_coming: bool = False) -> Pin | None:
        """Hold an entry without a call. None: it is not stored; `final`: that is a miss.

        Raises AskDaemon; with `or_coming` also where somebody may be writing it.
        """
        if self.index is None or not self.use():
            raise AskDaemon
        try:
            found = self.index.pin(namespace, mm_hash, final, or_coming)
        except BaseException:  # Ctrl-C too
            self.unuse()
            raise
        if found is None:
            self.unuse()
            return None
        row, pin = found
        try:
            if row.offset + row.nbytes > self.pool_bytes:
                raise AskDaemon
            return Pin(self, self.index, row, pin)
        except BaseException:
            self.index.unpin(pin)
            self.unuse()
            raise

    def begin_put(self, what: What) -> Begun | bool | None:
        """What `write_put` takes; False: it is stored already; None: it takes a call.

        For those who `use` the conversation.
        """
        if self.index is None or self.index.puts is None:
            return None
        try:
            record = self.index.record(what.namespace, what.mm_hash)
        except AskDaemon:
            return None
        if record is None:
            return None
        if self._is_stored(record):
            return False
        begun = self.index.puts.begin(what, record)
        if begun is None:
            return None
        if self.index.is_put_elsewhere(record):
            self.index.puts.leave(begun)  # the daemon says who of the two writes it
            return None
        if self._is_stored(record):  # while this one was announced
            self.index.puts.leave(begun)
            return False
        return begun

    def _is_stored(self, record: bytes) -> bool:
        assert self.index is not None
        with contextlib.suppress(AskDaemon):
            if self.index.is_listed(record):
                self.index.note_duplicate()
                return True
        return False

    def write_put(self, begun: Begun, copy_to: CopyTo) -> bool:
        """Write it and let it be seen. False: there is an answer to wait for."""
        assert self.index is not None
        assert self.index.puts is not None
        return self.index.puts.write(
            begun,
            lambda: copy_to(self._map_writable().view(begun.offset, begun.nbytes)),
            lambda: self._over,
        )

    def answer_to_put(self, begun: Begun) -> bool | None:
        """True: stored; False: it was there already; None: it takes a call.

        Raises DaemonUnavailable.
        """
        assert self.index is not None
        assert self.index.puts is not None
        return self.index.puts.answer(begun, lambda: self._over, self.calls.timeout_s)

    def release(self, lease: Lease) -> None:
        """End a lease; nobody waits for the daemon's answer."""
        with self._lock:
            lease.expires_s = 0.0
            if self._leases.pop(lease.id, None) is not None and not self._over:
                self._releases.append(lease.id)
        self._flush_releases()
        self.unuse()

    def _flush_releases(self) -> None:
        with self._lock:
            if self._releasing or not self._releases or self._over:
                return
            self._releasing = True
            leases, self._releases = self._releases[:MAX_BATCH], self._releases[MAX_BATCH:]
        request = pb.ReleaseRequest(session=self.token, leases=leases)
        with contextlib.suppress(ValueError):  # the channel was closed
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
        """End a wait early; it still ends as every wait does."""
        self._outbox.put(pb.SessionRequest(cancel_waits=pb.CancelWaits(tickets=[ticket])))

    # -- the stream ----------------------------------------------------------------------------

    def renewal(self) -> pb.SessionRequest | None:
        """What keeps every lease of this conversation alive."""
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
            case "wait_ended":
                self._end_wait(event.wait_ended)
            case "waits_ended":
                for each in event.waits_ended.ended:
                    self._end_wait(each)

    def _end_wait(self, event: pb.WaitEnded) -> None:
        with self._lock:
            ended = self._waits.pop(event.ticket, None)
            if ended is None:
                self._answered[event.ticket] = event.outcome
        if ended is not None:
            ended(event.outcome)

    def abandon(self) -> None:
        """Whatever this conversation was about, it is out of step: the daemon takes all back."""
        self.abandoned = True
        self._stream.cancel()

    def end(self) -> None:
        """The stream is over."""
        with self._lock:
            self._over = True
            waits, self._waits = self._waits, {}
            self._answered.clear()
        for ended in waits.values():
            ended(None)
        self.unuse()
