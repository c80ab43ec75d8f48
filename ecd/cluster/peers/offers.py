"""Offers: keys that are announced to other nodes, which are expected to want them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

from ecd.base.clock import Clock
from ecd.cluster.peers.admission import Admitted
from ecd.cluster.peers.candidates import Candidates
from ecd.cluster.peers.peer import PeerUnavailable
from ecd.core.cache import Cache
from ecd.core.model.types import Key
from ecd.live.background import Background
from ecd_proto.contract import MAX_HINTS, Hint

logger = logging.getLogger(__name__)

MAX_OFFERS = 4096
OFFER_TTL_S = 60.0
"""How long an offer of a key that is not stored yet is kept."""


class Offers:
    """Offers that wait until their key is stored here."""

    def __init__(self, cache: Cache, candidates: Candidates, clock: Clock) -> None:
        self._cache, self._candidates, self._clock = cache, candidates, clock
        self._waiting: OrderedDict[Key, tuple[Sequence[Admitted], float]] = OrderedDict()
        self._background = Background()

    @property
    def is_idle(self) -> bool:
        """Whether no offer is being sent."""
        return self._background.is_idle

    def offer(self, keys: Sequence[Key], nodes: Sequence[str]) -> None:
        """Offer these keys to these nodes: now, or when they are stored."""
        self._background.spawn(self._offer(keys, [Hint(node) for node in nodes[:MAX_HINTS]]))

    def stored(self, key: Key) -> None:
        """Send the offer that waited for the key, if there is one."""
        nodes, until_s = self._waiting.pop(key, ((), 0.0))
        if self._clock.now_s() < until_s:
            for node in nodes:
                self._background.spawn(self._send(node, [key]))

    async def close(self) -> None:
        await self._background.close()

    async def _offer(self, keys: Sequence[Key], nodes: Sequence[Hint]) -> None:
        admitted = await self._candidates.hinted(nodes)
        if not admitted:
            return
        until_s = self._clock.now_s() + OFFER_TTL_S
        stored = [key for key in keys if self._cache.views.contains(key)]
        for key in set(keys).difference(stored):
            self._waiting[key] = admitted, until_s
            self._waiting.move_to_end(key)
        while self._waiting and (
            len(self._waiting) > MAX_OFFERS
            or next(iter(self._waiting.values()))[1] < self._clock.now_s()
        ):
            self._waiting.popitem(last=False)
        if stored:
            await asyncio.gather(*(self._send(to, stored) for to in admitted))

    async def _send(self, to: Admitted, keys: Sequence[Key]) -> None:
        try:
            link = await self._candidates.link(to)
            link.offer({key: self._cache.views.extent(key) for key in keys})
        except PeerUnavailable as error:
            logger.debug("an offer is lost: %s", error)
