"""Headers, parameters and statuses that the encode hop adds to vLLM's chat completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Scope

MAX_BODY_BYTES = 256 << 20
"""Largest body that is parsed."""
IS_HOP = "x-ecd-hop"
"""Header of a call: an engine that gets it does not ask another one."""
IS_HOP_PARAM = "ecd_hop"
"""The same in the body, as gateways drop headers."""
UNLIKE = 409
"""Status of an encoder that decodes otherwise than the engine which asks it."""
HAS_OUTLINE = "x-ecd-outline"
"""Header of an answer: the medium is stored, and so is its outline if it needs one."""


def is_call(scope: Scope, request: dict[str, Any]) -> bool:
    """Whether a request comes from an engine's hop."""
    params = request.get("ec_transfer_params")
    return any(name == IS_HOP.encode() for name, _ in scope["headers"]) or (
        isinstance(params, dict) and IS_HOP_PARAM in params
    )
