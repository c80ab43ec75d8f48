"""The proof that a peer has the cluster's token."""

from __future__ import annotations

import hmac
import time
from typing import Any

import grpc

from ecd_proto.contract import proof

CLOCKS_APART_S = 300.0
"""Most by which the clocks of two nodes may differ, and the age of an acceptable proof."""


class TokenCheck:
    """Mutual proof for each call to this node; without a token everybody is let in."""

    def __init__(self, node: str, token: str | None) -> None:
        self._node, self._token = node, token

    async def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Abort the call unless the caller proves that it has the token; prove the same to it."""
        if self._token is None:
            return
        said = {str(name): value for name, value in context.invocation_metadata() or ()}
        nonce, when = str(said.get("ecd-nonce", "")), str(said.get("ecd-time", ""))
        expected = proof(self._token, "ask", self._node, nonce, when)
        fresh = when.isdecimal() and abs(time.time() - int(when)) <= CLOCKS_APART_S
        if not hmac.compare_digest(expected, str(said.get("ecd-proof", ""))):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"no proof of the cluster's token for {self._node}: set the same ECD_PEER_TOKEN on "
                "every node, and name nodes as their ECD_PEER_ADDRESS does",
            )
        if not fresh:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the proof is of another time: clocks may differ by {CLOCKS_APART_S:.0f} s",
            )
        answer = proof(self._token, "answer", self._node, nonce)
        await context.send_initial_metadata((("ecd-proof", answer),))
