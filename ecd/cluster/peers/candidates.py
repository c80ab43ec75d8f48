"""Nodes that may hold a key, from hints and from the directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from ecd.cluster.directory.directory import Candidate, Directory, Found, OtherMaker
from ecd.cluster.peers.admission import Admission, Admitted
from ecd.cluster.peers.link import Link
from ecd.cluster.peers.peers import Peers
from ecd.core.model.types import Key
from ecd.live.background import Background
from ecd_proto.contract import Hint

Answer = TypeVar("Answer")


class Candidates:
    """Finds nodes that may hold or make a key, and links to them; one per daemon."""

    def __init__(self, peers: Peers, admission: Admission, directory: Directory, zone: str) -> None:
        self._peers, self._admission = peers, admission
        self._zone, self._directory = zone, directory
        self._background = Background()
        self._finding = _Together(self._find, self._background)
        self._beginning = _Together(directory.begin_making, self._background)

    async def hinted(self, hints: Sequence[Hint]) -> Sequence[Admitted]:
        """The nodes of those hints that may be followed."""
        return await self._admission.admit(hints)

    async def link(self, to: Admitted) -> Link:
        """A link to the node. Raises PeerUnavailable."""
        return await self._peers.link(to.hint.node, to.hinted)

    async def close(self) -> None:
        await self._background.close()

    async def known(self, key: Key) -> Sequence[Admitted] | None:
        """Nodes that the directory knows, this zone's first, the least busy first.

        None: it does not answer, and may do so soon.
        """
        candidates = await self._finding.ask(key)
        if candidates is None:
            return None

        def rank(candidate: Candidate) -> tuple[bool, int, int]:
            elsewhere = bool(self._zone) and candidate.zone != self._zone
            return elsewhere, self._peers.in_flight(candidate.hint.node), candidate.load

        return [Admitted(candidate.hint) for candidate in sorted(candidates, key=rank)]

    async def begin_making(self, key: Key, void: str) -> OtherMaker | None:
        """Note that this node makes the key, unless another incarnation than `void` makes it.

        That one is returned.
        """
        return await self._beginning.ask(key, void)

    async def _find(self, keys: Mapping[Key, str]) -> Found:
        found = await self._directory.find(list(keys))
        return {} if found is None else {key: found.get(key, ()) for key in keys}


class _Together(Generic[Answer]):
    """Questions about keys, asked once for all keys of one turn of the event loop."""

    def __init__(
        self,
        ask: Callable[[Mapping[Key, str]], Awaitable[Mapping[Key, Answer]]],
        background: Background,
    ) -> None:
        self._ask, self._background = ask, background
        self._asked: dict[Key, tuple[str, asyncio.Future[Answer | None]]] = {}

    async def ask(self, key: Key, about: str = "") -> Answer | None:
        """The answer to this key, about which no other caller asks meanwhile."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(lambda: self._background.spawn(self._ask_all()))
        answer: asyncio.Future[Answer | None] = loop.create_future()
        self._asked[key] = about, answer
        return await answer

    async def _ask_all(self) -> None:
        asked, self._asked = self._asked, {}
        found: Mapping[Key, Answer] = {}
        try:
            found = await self._ask({key: about for key, (about, _) in asked.items()})
        finally:
            for key, (_, answer) in asked.items():
                if not answer.done():
                    answer.set_result(found.get(key))
