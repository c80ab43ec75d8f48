"""The proof that a peer has the cluster's token."""

from __future__ import annotations

import heapq
import hmac
import logging
import re
from collections.abc import Callable
from typing import Any

import grpc

from ecd.base.clock import Clock
from ecd.base.log_limit import LogLimit
from ecd_proto.contract import proof

logger = logging.getLogger(__name__)

CLOCKS_APART_S = 300.0
"""Most by which the clocks of two nodes may differ, and the age of an acceptable proof."""
MAX_PROOFS = 1 << 16
"""Proofs remembered, of the calls of ten minutes: 30 for each link that a node takes."""


class SpentProofs:
    """The proofs that were accepted, each for as long as its time is acceptable."""

    def __init__(self) -> None:
        self._spent: set[str] = set()
        self._until_s: list[tuple[float, str]] = []  # a heap

    def spend(self, proof: str, until_s: float, now_s: float) -> bool | None:
        """Accept a proof, acceptable until `until_s`. False: it was before; None: there is no room.

        The times are the wall clock's.
        """
        while self._until_s and self._until_s[0][0] < now_s:
            self._spent.discard(heapq.heappop(self._until_s)[1])
        if proof in self._spent:
            return False
        if len(self._spent) >= MAX_PROOFS:
            return None
        self._spent.add(proof)
        heapq.heappush(self._until_s, (until_s, proof))
        return True


class TokenCheck:
    """Mutual proof for each call to this node; without a token everybody is let in.

    A proof is accepted once. They are remembered by what members of the cluster alone can make, so
    others fill no memory; a restart forgets them.
    """

    def __init__(
        self,
        node: str,
        token: str | None,
        clock: Clock,
        refuse: Callable[[str, int], None] = lambda _cause, _limit: None,
    ) -> None:
        """`refuse` counts a refusal, by its cause and the limit that is reached."""
        self._node, self._token, self._clock = node, token, clock
        self._count = refuse
        self._spent = SpentProofs()
        self._lines = LogLimit(clock)

    async def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Abort the call unless the caller proves that it has the token; prove the same to it."""
        if self._token is None:
            return
        said = {str(name): value for name, value in context.invocation_metadata() or ()}
        nonce, when = str(said.get("ecd-nonce", "")), str(said.get("ecd-time", ""))
        expected = proof(self._token, "ask", self._node, nonce, when)
        if not hmac.compare_digest(expected, str(said.get("ecd-proof", ""))):
            await self._refuse(
                context,
                f"no proof of the cluster's token for {self._node}: set the same ECD_PEER_TOKEN on "
                "every node, and name nodes as their ECD_PEER_ADDRESS does",
            )
        made_s = int(when) if re.fullmatch(r"[0-9]{1,19}", when) else 0
        now_s = self._clock.unix_s()
        if abs(now_s - made_s) > CLOCKS_APART_S:
            await self._refuse(
                context,
                f"the clock of {self._node} differs from the asking node's by about "
                f"{(now_s - made_s) / 60:+,.0f} minutes, and at most {CLOCKS_APART_S / 60:.0f} are "
                "accepted: set both clocks (NTP)",
                is_member=True,
            )
        is_new = self._spent.spend(expected, made_s + CLOCKS_APART_S, now_s)
        if is_new is None:
            self._count("peer_links", MAX_PROOFS)
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_PROOFS} calls have come within {2 * CLOCKS_APART_S:.0f} s: ask later",
            )
        if not is_new:
            why = "the proof was used before: make one for each call"
            await self._refuse(context, why, is_member=True)
        answer = proof(self._token, "answer", self._node, nonce)
        await context.send_initial_metadata((("ecd-proof", answer),))

    async def _refuse(
        self, context: grpc.aio.ServicerContext[Any, Any], why: str, *, is_member: bool = False
    ) -> None:
        """Abort the call, and log some of the refusals: those of strangers hide no member's."""
        self._count("peer_proofs", 0)
        more = self._lines.take(is_member)
        if more is not None:
            peer = context.peer()
            logger.warning("%s is refused: %s%s", peer, why, more, extra={"peer": peer})
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
