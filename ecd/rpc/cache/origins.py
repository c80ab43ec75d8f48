"""Sources of entries besides the clients of this node: other nodes, and the last daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ecd.core.model.types import Key, Selection
from ecd_proto.contract import Hint
from ecd_proto.encoders import RegisteredEncoder
from ecd_proto.v1 import cache_pb2 as pb


class Holding(Protocol):
    """Another node that holds a key: its place, and the known metadata of the entry."""

    @property
    def hint(self) -> Hint: ...

    @property
    def metadata(self) -> bytes: ...


Found = Mapping[Key, Sequence[Holding]]


class OtherNodes(Protocol):
    """The nodes around this one, as the service needs them."""

    def offer(self, keys: Sequence[Key], nodes: Sequence[str]) -> None:
        """Offer these keys to these nodes, as soon as they are stored here."""

    async def locate(self, keys: Sequence[Key]) -> tuple[Found, bool]:
        """The other nodes that hold these keys, and whether all answered, in bounded time."""

    async def encoders_elsewhere(self) -> Sequence[RegisteredEncoder]:
        """The encoders of other nodes, in bounded time."""

    def status(self) -> pb.PeersReply: ...


class NoOtherNodes:
    """The other nodes of a daemon that serves only its own node."""

    def offer(self, keys: Sequence[Key], nodes: Sequence[str]) -> None:
        pass

    async def locate(self, keys: Sequence[Key]) -> tuple[Found, bool]:
        return {}, False

    async def encoders_elsewhere(self) -> Sequence[RegisteredEncoder]:
        return ()

    def status(self) -> pb.PeersReply:
        return pb.PeersReply(directory=pb.DirectoryStatus(kind="none", up=True))


class DiskEntries(Protocol):
    """The entries on disk, as the service needs them."""

    async def erase(self, selection: Selection, dry_run: bool) -> tuple[Mapping[str, int], int]:
        """Erase the selected: the bytes of each by its file's name, and how many files are left."""


class NoDisk:
    """A daemon without a disk tier."""

    async def erase(self, selection: Selection, dry_run: bool) -> tuple[Mapping[str, int], int]:
        return {}, 0


class Recovering(Protocol):
    """The entries of the last daemon, each unknown until its bytes are verified."""

    is_done: bool
    """Whether all are verified, and have their checksums."""

    async def run(self) -> None:
        """Verify entries that no client asks for."""

    async def settle(self, keys: Sequence[Key] | None) -> None:
        """Verify these, or all, now."""


class NothingToRecover:
    """A daemon that began with an empty pool."""

    is_done = True

    async def run(self) -> None:
        pass

    async def settle(self, keys: Sequence[Key] | None) -> None:
        pass
