"""The encode hop that a server's environment asks for."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ecd_client.client import Client
from ecd_client.errors import InvalidArgument
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.middleware.hop.encoders import DIRECTORY, VARIABLE, EncoderPool, urls_in
from ecd_client.vllm.middleware.kinds import called

if TYPE_CHECKING:
    from ecd_client.vllm.middleware.hop.encode_hop import EncodeHop

logger = logging.getLogger(f"vllm.{__name__}")


def hop_of(
    client: Client,
    model: str,
    metadata: PlaceholderMetadata,
    kinds: Sequence[str],
    key: str | None,
    in_need: bool,
    within_s: float,
) -> EncodeHop | None:
    """The hop to the encoders that the environment names. None: it names none, or wrongly.

    It is for media of these `kinds`. The rest is as in `EncodeHop`.
    """
    try:
        urls = [] if follows() else urls_in(os.environ.get(VARIABLE, ""))
    except InvalidArgument as error:
        logger.error("ecd: nothing is sent to encoders: %s", error)
        return None
    if not (urls or follows()):
        return None
    if not kinds:
        logger.warning("ecd: nothing is sent to encoders: videos are pruned")
        return None
    from ecd_client.vllm.middleware.hop.encode_hop import EncodeHop  # which imports an HTTP client

    named = "the encoders that are registered (ecd-cli encoders)" if follows() else ", ".join(urls)
    logger.info("ecd: %s that are not stored go to %s", called(kinds), named)
    return EncodeHop(
        EncoderPool(urls),
        client,
        model,
        metadata.checked,
        key=key,
        in_need=in_need,
        within_s=within_s,
    )


def follows() -> bool:
    """Whether the environment names the encoders that register themselves."""
    return os.environ.get(VARIABLE, "").strip() == DIRECTORY
