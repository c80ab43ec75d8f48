"""Acquire, the call for entries that the index does not show, and the futures it settles."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from ecd_client import clock
from ecd_client.errors import DaemonUnavailable, EcdError, limit_reached, stripped
from ecd_client.item import Item
from ecd_client.session.session import Session
from ecd_client.shared.index import AskDaemon, OnMiss
from ecd_client.values import Key, to_key
from ecd_proto.contract import MAX_NODE_LENGTH, Hint
from ecd_proto.v1 import cache_pb2 as pb

ItemFuture = Future[Item | None]
Nodes = Sequence[str | Hint]
"""Nodes that may have one key, the likeliest first."""
NO_NODES: Nodes = ()


def _to_hint(index: int, nodes: Sequence[Hint]) -> pb.Hint:
    """The contract's hint, without nodes that no daemon reads."""
    hints = [hint for hint in nodes if len(hint.node) <= MAX_NODE_LENGTH]
    extents = [pb.Extent(pool=h.pool, offset=h.offset, nbytes=h.nbytes) for h in hints]
    return pb.Hint(index=index, nodes=[hint.node for hint in hints], extents=extents)


def pinned(session: Session, key: Key, on_miss: OnMiss, is_use: bool = True) -> Item | None:
    """Pin an entry that the index shows. Raises AskDaemon."""
    pin = session.pin(*key, on_miss, is_use)
    if pin is None:
        return None
    try:
        return Item(*key, pin)
    except BaseException:  # Ctrl-C
        pin.end()
        raise


@dataclass
class Acquire:
    """One Acquire call, and the future of each of its keys."""

    session: Session
    keys: Sequence[Key]
    futures: Sequence[ItemFuture]
    timeout: float
    only_if_written: bool = False
    hints: Sequence[Sequence[Hint]] = ()
    makes: Sequence[float | None] = ()
    is_use: bool = True
    """Whether a pin counts as a use; else the caller counts the hit or the miss."""
    needs_lease: bool = False
    """Whether to ask for leases though this client can pin."""
    begun_s: float = field(default_factory=clock.now_s)

    def request(self) -> pb.AcquireRequest:
        return pb.AcquireRequest(
            session=self.session.token,
            keys=map(to_key, self.keys),
            wait_s=self.timeout,
            only_if_written=self.only_if_written,
            hints=[_to_hint(index, nodes) for index, nodes in enumerate(self.hints) if nodes],
            to_pin=self.session.index is not None and not self.needs_lease,
            is_look=not self.is_use and self.session.index is not None,
            makes=[
                pb.Make(index=index, wait_s=wait_s)
                for index, wait_s in enumerate(self.makes)
                if wait_s is not None
            ],
        )

    def send(self) -> None:
        """Make the call, and settle when it is answered."""

        def answered(reply: Any) -> None:
            try:
                with self.session.whole_or_abandoned():
                    outcomes = reply.result().outcomes
            except EcdError as error:
                for future in self.futures:
                    if future.set_running_or_notify_cancel():
                        future.set_exception(stripped(error))
                return
            self.settle(outcomes)

        self.session.calls.later("acquire", self.request()).add_done_callback(answered)

    def settle(self, outcomes: Sequence[pb.AcquireOutcome]) -> None:
        """Hand each outcome to its future: now, or when its wait has ended."""
        unpinned = []
        for index, outcome in enumerate(outcomes):
            if outcome.WhichOneof("outcome") == "waiting":
                self._wait(index, outcome.waiting.ticket)
            elif not self._end(index, outcome):
                unpinned.append(index)
        if unpinned:
            self._ask_for_leases(unpinned)

    def _wait(self, index: int, ticket: int) -> None:
        session, one = self.session, self._again([index])  # and not the items of other keys

        def ended(outcome: pb.AcquireOutcome | None) -> None:
            if not one._end(0, outcome):
                one._ask_for_leases([0])

        session.on_wait_ended(ticket, ended)
        self.futures[index].add_done_callback(
            lambda future: session.cancel_wait(ticket) if future.cancelled() else None
        )

    def _end(self, index: int, outcome: pb.AcquireOutcome | None) -> bool:
        """Settle one key's future; an outcome of None: the session ended first.

        False: the entry is stored but could not be pinned, so a lease must be asked for.
        """
        future, key, item = self.futures[index], self.keys[index], None
        if outcome is not None and outcome.WhichOneof("outcome") == "stored":
            with contextlib.suppress(AskDaemon):
                item = pinned(self.session, key, OnMiss.GO_ON, self.is_use)
            if item is None:
                return False
        wanted = future.set_running_or_notify_cancel()
        try:
            item = item or _leased(self.session, key, outcome)
        except EcdError as error:
            if wanted:
                future.set_exception(stripped(error))
            return True
        if wanted:
            future.set_result(item)
        elif item is not None:
            item.close()
        return True

    def _ask_for_leases(self, indices: Sequence[int]) -> None:
        """Ask once more for keys that are stored, or were until just now."""
        left_s = max(0.0, self.begun_s + self.timeout - clock.now_s())
        replace(self._again(indices), timeout=left_s, needs_lease=True).send()

    def _again(self, indices: Sequence[int]) -> Acquire:
        """A call for some of the keys, without the parts that are only for the first call."""
        keys, futures = [self.keys[i] for i in indices], [self.futures[i] for i in indices]
        return replace(self, keys=keys, futures=futures, hints=(), makes=())


def _leased(session: Session, key: Key, outcome: pb.AcquireOutcome | None) -> Item | None:
    """The item that an Acquire leased, if it did. Raises EcdError."""
    if outcome is not None:
        match outcome.WhichOneof("outcome"):
            case "leased":
                lease = session.lease(outcome.leased)
                if lease is not None:
                    return Item(*key, lease)
            case "missing":
                return None
            case "limit_reached":
                raise limit_reached(outcome.limit_reached.what, outcome.limit_reached.limit)
    raise DaemonUnavailable(f"the daemon on {session.calls.address} went away meanwhile")
