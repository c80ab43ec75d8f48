"""Makings: keys that clients have said they make, for nodes that wait instead of making them.

A making promises nothing. It lasts MAKING_S, and from then on for as long as a client of the node
has locked the key, as one does that works on it. It ends with the session that said it, when that
says so, and when there is no room for what it made. Then the nodes that wait are told that the key
is missing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ecd.base.clock import Clock
from ecd.core.model.types import Key, SessionId, Ticket
from ecd_proto.contract import MAKING_S

MAX_MAKINGS = 256
"""Makings of one session; further keys are made by every node that needs them."""
Wait = tuple[SessionId, Ticket]


class KeyLocks(Protocol):
    """Advice among this node's clients and its daemon about who makes a key."""

    def is_key_locked(self, key: Key) -> bool:
        """Whether a client has locked the key."""

    def note_elsewhere(self, key: Key, *, is_made: bool) -> None:
        """Show clients that the daemon waits for another node that makes the key; or no longer."""


class NoLocks:
    """The locks of a node whose clients share no files: none."""

    def is_key_locked(self, key: Key) -> bool:  # noqa: ARG002
        return False

    def note_elsewhere(self, key: Key, *, is_made: bool) -> None: ...


@dataclass
class _Making:
    session: SessionId
    begun_s: float
    waits: dict[Wait, None] = field(default_factory=dict)


class Makings:
    """The makings of one daemon, in the order of their start."""

    def __init__(self, clock: Clock, locks: KeyLocks | None = None) -> None:
        self.locks: KeyLocks = locks or NoLocks()
        self._clock = clock
        self._makings: OrderedDict[Key, _Making] = OrderedDict()
        self._by_session: dict[SessionId, set[Key]] = {}
        self._early: dict[Key, dict[Wait, None]] = {}

    def begin(self, session: SessionId, key: Key) -> bool:
        """Note that the session makes the key. False: it makes too many already."""
        own = self._by_session.get(session, set())
        if key not in own and len(own) >= MAX_MAKINGS:
            return False
        before = self._makings.get(key)
        waits = self._early.pop(key, {}) | ({} if before is None else before.waits)
        self._remove(key)
        self._by_session.setdefault(session, set()).add(key)
        self._makings[key] = _Making(session, self._clock.now_s(), waits)
        return True

    def __contains__(self, key: Key) -> bool:
        making = self._makings.get(key)
        return making is not None and (
            self._clock.now_s() < making.begun_s + MAKING_S or self.locks.is_key_locked(key)
        )

    def lasting(self, for_s: float) -> Iterator[Key]:
        """The keys that have been made for at least this long, the oldest first."""
        now_s = self._clock.now_s()
        for key, making in self._makings.items():
            if now_s < making.begun_s + for_s:
                return
            yield key

    def note_wait(self, key: Key, session: SessionId, ticket: Ticket) -> None:
        """Note a wait that ends when the key's making is taken.

        A wait that ends by itself is removed by `forget_wait`. The making need not have begun
        (`take_early`).
        """
        making = self._makings.get(key)
        waits = self._early.setdefault(key, {}) if making is None else making.waits
        waits[session, ticket] = None

    def forget_wait(self, key: Key, session: SessionId, ticket: Ticket) -> None:
        """Note that a wait for the key has ended by itself, if it was one for a making."""
        making = self._makings.get(key)
        if making is not None:
            making.waits.pop((session, ticket), None)
        if (early := self._early.get(key)) is not None:
            early.pop((session, ticket), None)
            if not early:
                del self._early[key]

    def take_early(self, key: Key) -> list[Wait]:
        """The waits for a making that does not begin."""
        return list(self._early.pop(key, ()))

    def take(self, keys: Iterable[Key], session: SessionId | None = None) -> list[Wait]:
        """End these makings, those of the session if one is given; returns the waits for them."""
        waits: list[Wait] = []
        for key in keys:
            making = self._makings.get(key)
            if making is not None and session in (None, making.session):
                self._remove(key)
                waits += making.waits
        return waits

    def take_past(self, key: Key) -> list[Wait]:
        """End the making unless it lasts; returns the waits for it."""
        return [] if key in self else self.take([key])

    def take_session(self, session: SessionId) -> list[Wait]:
        """End all makings of the session; returns the waits for them."""
        return self.take(list(self._by_session.get(session, ())))

    def _remove(self, key: Key) -> None:
        making = self._makings.pop(key, None)
        if making is not None:
            keys = self._by_session[making.session]
            keys.remove(key)
            if not keys:
                del self._by_session[making.session]
