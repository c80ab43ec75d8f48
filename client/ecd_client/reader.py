"""get: pin an entry that the index shows, acquire another by a call, or wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from ecd_client import arguments, forks
from ecd_client.acquire import NO_NODES, Acquire, ItemFuture, Nodes, pinned
from ecd_client.errors import DaemonUnavailable, InvalidArgument
from ecd_client.item import Handle, Item
from ecd_client.session.calls import result_of
from ecd_client.session.channel import late
from ecd_client.session.connection import Connection
from ecd_client.session.session import Session
from ecd_client.shared.index import AskDaemon, IndexReader, OnMiss
from ecd_client.values import Key
from ecd_proto.contract import MAX_BATCH, Hint
from ecd_proto.shm.rows import Row
from ecd_proto.v1 import cache_pb2 as pb

_COUNT, _GO_ON = OnMiss.COUNT, OnMiss.GO_ON


class Reader:
    """The reading half of a client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self, key: Key, timeout: float, nodes: Nodes, is_use: bool = True) -> Item | None:
        """Hold one entry, waiting up to `timeout` s for it. None: a miss."""
        asks = not (type(timeout) is float and timeout == 0.0)
        if asks:
            timeout = arguments.seconds(timeout, "timeout")
            asks = timeout > 0.0
        hints = () if nodes is NO_NODES else arguments.nodes(nodes)
        session = self._connection.session()
        try:
            item = pinned(session, key, _COUNT if is_use and not asks else _GO_ON, is_use)
            if item is not None or not asks:
                return item
        except AskDaemon:
            pass
        future: ItemFuture = Future()
        acquire = Acquire(session, [key], [future], timeout, hints=[hints], is_use=is_use)
        with session.whole_or_abandoned():
            reply = session.calls.now("acquire", acquire.request())
        acquire.settle(reply.outcomes)
        return _result(session, future, timeout)

    def get_now(self, key: Key, is_use: bool = True) -> tuple[Item | None, bool]:
        """Hold one entry without a call; else None, and whether a call could find it."""
        session = self._connection.session()
        try:
            item = pinned(session, key, OnMiss.ASK_IF_CLAIMED, is_use)
        except AskDaemon:
            return None, True
        may_come = item is None and session.may_bring
        if item is None and is_use and not may_come:
            _count(session, lambda index: index.note_miss(key[0]))
        return item, may_come

    def count_miss(self, namespace: str) -> None:
        session = self._connection.current
        if session is not None and (session.takes_looks or not session.may_bring):
            # Else an older daemon has counted it, as it was asked.
            _count(session, lambda index: index.note_miss(namespace))

    def hold(self, key: Key, handle: Handle) -> Item | None:
        """Hold an entry without a call if it is the one of the handle, and count no use."""
        session = self._connection.current
        if session is None or session.incarnation != handle.incarnation:
            return None
        try:
            item = pinned(session, key, _GO_ON, is_use=False)
        except AskDaemon:
            return None
        if item is not None and not item.is_of(handle):
            item.close()
            return None
        return item

    def get_async(
        self,
        keys: Sequence[Key],
        timeout: float,
        only_if_written: bool,
        hints: Sequence[Nodes] = (),
        makes: Sequence[float | None] = (),
        is_use: bool = True,
    ) -> list[ItemFuture]:
        """Return a future for each key, done at most `timeout` s later."""
        timeout = arguments.seconds(timeout, "timeout")
        likely = [arguments.nodes(nodes) for nodes in arguments.each(hints, len(keys), "nodes")]
        makes = [
            wait_s if wait_s is None else arguments.seconds(wait_s, "a wait of makes")
            for wait_s in arguments.each(makes, len(keys), "makes")
        ]
        on_miss = _COUNT if is_use and timeout == 0.0 else _GO_ON
        futures: list[forks.Pending[Item | None]] = [forks.Pending() for _ in keys]
        session = self._connection.session()
        open_ = []
        for index, key in enumerate(keys):
            try:
                arguments.key(*key)
                item = pinned(session, key, on_miss, is_use)
            except AskDaemon:
                open_.append(index)
                continue
            except InvalidArgument as error:  # of this key alone
                futures[index].set_exception(error)
                continue
            if item is None and timeout > 0.0:
                open_.append(index)
            else:
                futures[index].set_result(item)
        for index in open_:
            forks.add(futures[index])
        for start in range(0, len(open_), MAX_BATCH):
            batch = open_[start : start + MAX_BATCH]
            Acquire(
                session,
                [keys[index] for index in batch],
                [futures[index] for index in batch],
                timeout,
                only_if_written,
                [likely[index] for index in batch] if likely else (),
                [makes[index] for index in batch] if makes else (),
                is_use,
            ).send()
        return list(futures)

    def wait_for_writer(self, key: Key, timeout: float) -> bool:
        """Wait while another client is writing the key. True: it is stored now, a duplicate."""
        session = self._connection.session()
        [future] = self.get_async([key], timeout, only_if_written=True, is_use=False)
        item = _result(session, future, timeout)
        if item is None:
            return False
        item.close()
        _count(session, IndexReader.note_duplicate)
        return True

    def hint(self, key: Key) -> Hint | None:
        session = self._connection.session()
        if not session.node:
            return None
        row = _row(session, key)
        extent = () if row is None else (row.pool, row.offset, row.nbytes)
        return Hint(session.node, *extent)

    def is_shown(self, key: Key) -> bool:
        return _row(self._connection.session(), key) is not None

    def shown_metadata(self, key: Key) -> bytes | None:
        row = _row(self._connection.session(), key)
        return None if row is None else row.metadata

    def contains(self, namespace: str, mm_hashes: Sequence[str]) -> list[bool]:
        session = self._connection.session()
        if session.index is not None:
            try:
                return session.index.contains(namespace, mm_hashes)
            except AskDaemon:
                pass
        keys = [pb.Key(namespace=namespace, mm_hash=mm_hash) for mm_hash in mm_hashes]
        contained: list[bool] = []
        for start in range(0, len(keys), MAX_BATCH):
            request = pb.ContainsRequest(keys=keys[start : start + MAX_BATCH])
            contained.extend(session.calls.now("contains", request).contained)
        return contained


def close_unseen(future: ItemFuture) -> None:
    """Close an item that came after its future was given up."""
    if future.exception() is None and (item := future.result()) is not None:
        item.close()


def _count(session: Session, note: Callable[[IndexReader], None]) -> None:
    """Count something in the session's page, if it has one."""
    if session.index is not None and session.ref():
        note(session.index)
        session.unref()


def _row(session: Session, key: Key) -> Row | None:
    """The row of an entry that memory shows as stored or claimed."""
    with contextlib.suppress(AskDaemon):
        if session.index is not None:
            return session.index.row(*key)
    return None


def _result(session: Session, future: ItemFuture, wait_s: float) -> Item | None:
    """Wait for the future. Raises EcdError."""
    calls = session.calls
    try:
        return result_of(future, wait_s + calls.timeout_s)
    except BaseException as error:
        if not future.cancel():
            future.add_done_callback(close_unseen)
        if isinstance(error, FutureTimeoutError):
            raise DaemonUnavailable(late(calls.address)) from None
        raise
