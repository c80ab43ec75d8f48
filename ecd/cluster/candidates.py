"""Nodes that may hold a key, from hints and from the directory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ecd.background import Background
from ecd.cluster.admission import Admission, Admitted
from ecd.cluster.directory import Candidate, Directory, Found
from ecd.cluster.link import Link
from ecd.cluster.peers import Peers
from ecd.core.types import Key
from ecd_proto.contract import Hint


class Candidates:
    """Finds nodes that may hold a key, and links to them; one per daemon."""

    def __init__(self, peers: Peers, admission: Admission, directory: Directory, zone: str) -> None:
        self._peers, self._admission, self._directory = peers, admission, directory
        self._zone = zone
        self._lookups: dict[Key, asyncio.Future[Sequence[Candidate]]] = {}
        self._background = Background()

    async def hinted(self, hints: Sequence[Hint]) -> Sequence[Admitted]:
        """The nodes of those hints that may be followed."""
        return await self._admission.admit(hints)

    async def link(self, to: Admitted) -> Link:
        """A link to the node. Raises PeerUnavailable."""
        return await self._peers.link(to.hint.node, to.hinted)

    async def close(self) -> None:
        await self._background.close()

    async def known(self, key: Key) -> Sequence[Admitted]:
        """Nodes that the directory knows, this zone's first, the least busy first."""
        if not self._lookups:
            asyncio.get_running_loop().call_soon(self._look_up)
        answer = self._lookups[key] = asyncio.get_running_loop().create_future()
        candidates = await answer

        def rank(candidate: Candidate) -> tuple[bool, int, int]:
            elsewhere = bool(self._zone) and candidate.zone != self._zone
            return elsewhere, self._peers.in_flight(candidate.hint.node), candidate.load

        return [Admitted(candidate.hint) for candidate in sorted(candidates, key=rank)]

    def _look_up(self) -> None:
        """Ask the directory once for all keys that are wanted in this turn of the event loop."""
        lookups, self._lookups = self._lookups, {}

        async def answer() -> None:
            found: Found = {}
            try:
                found = await self._directory.find(list(lookups))
            finally:
                for key, waiting in lookups.items():
                    if not waiting.done():
                        waiting.set_result(found.get(key, ()))

        self._background.spawn(answer())
