"""Sources of entries besides the clients of this node: other nodes, and the last daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ecd.core.types import Key, SessionId, Ticket
from ecd_proto.contract import Hint
from ecd_proto.v1 import cache_pb2 as pb


class Holding(Protocol):
    """Another node that holds a key: where, and what is known of the entry's metadata."""

    @property
    def hint(self) -> Hint: ...

    @property
    def metadata(self) -> bytes: ...


Found = Mapping[Key, Sequence[Holding]]


class OtherNodes(Protocol):
    """The nodes around this one, as the service needs them."""

    def want(self, key: Key, hints: Sequence[Hint]) -> None:
        """Bring the key here for a waiting client, unless it is here or on its way."""

    def want_or_make(
        self, key: Key, hints: Sequence[Hint], maker: SessionId, wait_s: float
    ) -> None:
        """As `want`, for a session that makes the key if no node has it.

        It waits for so long if another node makes it.
        """

    def waits_for_nobody(self, key: Key, session: SessionId, ticket: Ticket) -> None:
        """End this wait for the key if the key is, or gets, waited for as another node makes it."""

    def offer(self, keys: Sequence[Key], nodes: Sequence[str]) -> None:
        """Tell these nodes of these keys, as soon as they are stored here."""

    async def locate(self, keys: Sequence[Key]) -> tuple[Found, bool]:
        """The other nodes that hold these keys, and whether all were heard, in bounded time."""

    def status(self) -> pb.PeersReply: ...


class NoOtherNodes:
    """A daemon that serves its node alone."""

    def want(self, key: Key, hints: Sequence[Hint]) -> None:
        pass

    def want_or_make(
        self, key: Key, hints: Sequence[Hint], maker: SessionId, wait_s: float
    ) -> None:
        pass

    def waits_for_nobody(self, key: Key, session: SessionId, ticket: Ticket) -> None:
        pass

    def offer(self, keys: Sequence[Key], nodes: Sequence[str]) -> None:
        pass

    async def locate(self, keys: Sequence[Key]) -> tuple[Found, bool]:
        return {}, False

    def status(self) -> pb.PeersReply:
        return pb.PeersReply(directory=pb.DirectoryStatus(kind="none", up=True))


class Recovering(Protocol):
    """The entries of the last daemon, each unknown until its bytes are verified."""

    async def run(self) -> None:
        """Verify whatever no client asks for."""

    async def settle(self, keys: Sequence[Key] | None) -> None:
        """Verify these, or all, now."""


class NothingToRecover:
    """A daemon that began with an empty pool."""

    async def run(self) -> None:
        pass

    async def settle(self, keys: Sequence[Key] | None) -> None:
        pass
