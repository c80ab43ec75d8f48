"""get: pin what is in the index; what is not, acquire or wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from ecd_client import forks
from ecd_client.calls import late
from ecd_client.conversation import Conversation
from ecd_client.errors import DaemonUnavailable, EcdError, InvalidArgument, limit_reached
from ecd_client.index import AskDaemon
from ecd_client.item import Item
from ecd_client.session import Session
from ecd_proto.contract import (
    MAX_BATCH,
    MAX_HINTS,
    MAX_MM_HASH_BYTES,
    MAX_NAMESPACE_BYTES,
    MAX_NODE_LENGTH,
    Hint,
)
from ecd_proto.v1 import cache_pb2 as pb

Key = tuple[str, str]
"""Namespace and mm_hash."""
KEY_LIMITS = MAX_NAMESPACE_BYTES, MAX_MM_HASH_BYTES
Found = Future[Item | None]
Nodes = Sequence[str | Hint]
"""Of one key, the likeliest first."""


def to_key(key: Key) -> pb.Key:
    namespace, mm_hash = key
    return pb.Key(namespace=namespace, mm_hash=mm_hash)


def _to_hint(index: int, nodes: Nodes) -> pb.Hint:
    """As much of it as a daemon reads."""
    hints = [Hint(node) if isinstance(node, str) else node for node in nodes[:MAX_HINTS]]
    hints = [hint for hint in hints if len(hint.node) <= MAX_NODE_LENGTH]
    extents = [pb.Extent(offset=hint.offset, nbytes=hint.nbytes) for hint in hints]
    return pb.Hint(index=index, nodes=[hint.node for hint in hints], extents=extents)


class Reader:
    """The reading half of a client."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def get(self, key: Key, timeout: float, nodes: Nodes) -> Item | None:
        """One key, waiting up to `timeout` s for it; None: it is not there."""
        final = timeout == 0.0
        if not final:
            _check_wait(timeout)
        conversation = self._session.conversation()
        try:
            item = _pinned(conversation, key, final)
            if item is not None or final:
                return item
        except AskDaemon:
            pass
        found: Found = Future()
        question = _Question(conversation, [key], [found], timeout, hints=[nodes])
        with conversation.whole_or_abandoned():
            reply = conversation.calls.now("acquire", question.request())
        question.settle(reply.outcomes)
        return _result(conversation, found, timeout)

    def get_now(self, key: Key) -> tuple[Item | None, bool]:
        """What is found without a call; else None, and whether one could find it."""
        conversation = self._session.conversation()
        try:
            item = _pinned(conversation, key, final=False, or_coming=True)
        except AskDaemon:
            return None, True
        return item, item is None and bool(conversation.node)

    def get_async(
        self,
        keys: Sequence[Key],
        timeout: float,
        only_if_written: bool,
        hints: Sequence[Nodes] = (),
    ) -> list[Found]:
        """A future for each key, done at most `timeout` s later."""
        _check_wait(timeout)
        founds: list[forks.Pending[Item | None]] = [forks.Pending() for _ in keys]
        conversation = self._session.conversation()
        open_ = []
        for index, key in enumerate(keys):
            try:
                _check_key(key)
                item = _pinned(conversation, key, final=timeout == 0.0)
            except AskDaemon:
                open_.append(index)
                continue
            except InvalidArgument as error:  # the other keys are none the worse for it
                founds[index].set_exception(error)
                continue
            if item is None and timeout > 0.0:
                open_.append(index)
            else:
                founds[index].set_result(item)
        for index in open_:
            forks.add(founds[index])
        for start in range(0, len(open_), MAX_BATCH):
            batch = open_[start : start + MAX_BATCH]
            _Question(
                conversation,
                [keys[index] for index in batch],
                [founds[index] for index in batch],
                timeout,
                only_if_written,
                [hints[index] for index in batch] if hints else (),
            ).ask()
        return list(founds)

    def wait_for_writer(self, key: Key, timeout: float) -> bool:
        """Wait while somebody is writing the key. True: it is stored now."""
        conversation = self._session.conversation()
        [found] = self.get_async([key], timeout, only_if_written=True)
        item = _result(conversation, found, timeout)
        if item is not None:
            item.close()
        return item is not None

    def hint(self, key: Key) -> Hint | None:
        conversation = self._session.conversation()
        if not conversation.node:
            return None
        return Hint(conversation.node, *(_extent(conversation, key) or ()))

    def is_shown(self, key: Key) -> bool:
        return _extent(self._session.conversation(), key) is not None

    def contains(self, namespace: str, mm_hashes: Sequence[str]) -> list[bool]:
        conversation = self._session.conversation()
        if conversation.index is not None:
            try:
                return conversation.index.contains(namespace, mm_hashes)
            except AskDaemon:
                pass
        keys = [pb.Key(namespace=namespace, mm_hash=mm_hash) for mm_hash in mm_hashes]
        contained: list[bool] = []
        for start in range(0, len(keys), MAX_BATCH):
            request = pb.ContainsRequest(keys=keys[start : start + MAX_BATCH])
            contained.extend(conversation.calls.now("contains", request).contained)
        return contained


def close_unseen(found: Found) -> None:
    """Give back what came after nobody waited for it any more."""
    if found.exception() is None and (item := found.result()) is not None:
        item.close()


def _extent(conversation: Conversation, key: Key) -> tuple[int, int] | None:
    """Where the entry lies, or is being put, if memory shows that."""
    with contextlib.suppress(AskDaemon):
        if conversation.index is not None:
            return conversation.index.extent(*key)
    return None


def _pinned(
    conversation: Conversation, key: Key, final: bool, or_coming: bool = False
) -> Item | None:
    """What the index has. Raises AskDaemon."""
    pin = conversation.pin(*key, final, or_coming)
    if pin is None:
        return None
    try:
        return Item(*key, pin)
    except BaseException:  # Ctrl-C
        pin.end()
        raise


def _check_key(key: Key) -> None:
    """Raises InvalidArgument: the daemon would refuse the whole call that has it."""
    for name, value, limit in zip(("namespace", "mm_hash"), key, KEY_LIMITS, strict=True):
        try:
            nbytes = len(value.encode()) if len(value) <= limit else len(value)
        except UnicodeEncodeError:
            raise InvalidArgument(f"the {name} is not text") from None
        if not 0 < nbytes <= limit:
            raise InvalidArgument(f"a {name} of {nbytes} bytes; 1 to {limit} are allowed")


def _check_wait(timeout: float) -> None:
    if not (isfinite(timeout) and timeout >= 0.0):
        raise InvalidArgument(f"timeout is {timeout}; it must be 0 or more seconds")


@dataclass
class _Question:
    """One Acquire, and the futures of what becomes of each of its keys."""

    conversation: Conversation
    keys: Sequence[Key]
    founds: Sequence[Found]
    timeout: float
    only_if_written: bool = False
    hints: Sequence[Nodes] = ()
    leases: bool = False  # even if this client can pin

    def request(self) -> pb.AcquireRequest:
        return pb.AcquireRequest(
            session=self.conversation.token,
            keys=map(to_key, self.keys),
            wait_s=self.timeout,
            only_if_written=self.only_if_written,
            hints=[_to_hint(index, nodes) for index, nodes in enumerate(self.hints) if nodes],
            to_pin=self.conversation.index is not None and not self.leases,
        )

    def ask(self) -> None:
        """Make the call, and settle when it is answered."""

        def answered(reply: Any) -> None:
            try:
                with self.conversation.whole_or_abandoned():
                    outcomes = reply.result().outcomes
            except EcdError as error:
                for found in self.founds:
                    if found.set_running_or_notify_cancel():
                        found.set_exception(error)
                return
            self.settle(outcomes)

        self.conversation.calls.later("acquire", self.request()).add_done_callback(answered)

    def settle(self, outcomes: Sequence[pb.AcquireOutcome]) -> None:
        """Hand each outcome to its future: now, or when its wait has ended."""
        for index, outcome in enumerate(outcomes):
            if outcome.WhichOneof("outcome") == "waiting":
                self._wait(index, outcome.waiting.ticket)
            else:
                self._ended(index, outcome)

    def _wait(self, index: int, ticket: int) -> None:
        conversation = self.conversation
        conversation.on_wait_ended(ticket, lambda outcome: self._ended(index, outcome))
        self.founds[index].add_done_callback(
            lambda found: conversation.cancel_wait(ticket) if found.cancelled() else None
        )

    def _ended(self, index: int, outcome: pb.AcquireOutcome | None) -> None:
        found, key, item = self.founds[index], self.keys[index], None
        if outcome is not None and outcome.WhichOneof("outcome") == "stored":
            with contextlib.suppress(AskDaemon):
                item = _pinned(self.conversation, key, final=False)
            if item is None:  # evicted meanwhile, or it cannot be pinned
                replace(self, keys=[key], founds=[found], leases=True, hints=()).ask()
                return
        wanted = found.set_running_or_notify_cancel()
        try:
            item = item or _item(self.conversation, key, outcome)
        except EcdError as error:
            if wanted:
                found.set_exception(error)
            return
        if wanted:
            found.set_result(item)
        elif item is not None:
            item.close()


def _item(conversation: Conversation, key: Key, outcome: pb.AcquireOutcome | None) -> Item | None:
    """What came of an Acquire; an outcome of None: the conversation ended first."""
    if outcome is not None:
        match outcome.WhichOneof("outcome"):
            case "leased":
                lease = conversation.lease(outcome.leased)
                if lease is not None:
                    return Item(*key, lease)
            case "missing":
                return None
            case "limit_reached":
                raise limit_reached(outcome.limit_reached.what, outcome.limit_reached.limit)
    raise DaemonUnavailable(f"the daemon on {conversation.calls.address} went away meanwhile")


def _result(conversation: Conversation, found: Found, wait_s: float) -> Item | None:
    calls = conversation.calls
    try:
        return found.result(wait_s + calls.timeout_s)
    except BaseException as error:
        if not found.cancel():
            found.add_done_callback(close_unseen)
        if isinstance(error, FutureTimeoutError):
            raise DaemonUnavailable(late(calls.address)) from None
        raise
