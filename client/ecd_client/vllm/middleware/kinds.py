"""The kinds of media that a server's middleware looks up, and why it leaves others alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ecd_client.vllm.base.description import in_words
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.base.settings import Settings
from ecd_client.vllm.middleware.media import AUDIO, IMAGE, VIDEO
from ecd_client.vllm.middleware.naming import Names

_WORDS = {IMAGE: "pictures", VIDEO: "videos", AUDIO: "audio clips"}


def kinds_of(
    model_config: Any,
    settings: Settings,
    metadata: PlaceholderMetadata,
    names: Names,
    *,
    only_encodes: bool,
) -> tuple[list[str], list[str], dict[str, str]]:
    """The kinds that are looked up, those that may need outlines, and why others are not."""
    limits, taken = model_config.multimodal_config, metadata.media
    looked_up, outlined, left_out = [], [], {}
    for kind in _WORDS:
        if taken is not None and kind not in taken:
            continue
        if not limits.get_limit_per_prompt(kind):
            left_out[kind] = "--limit-mm-per-prompt allows none"
        elif settings.keeps_private(kind, is_streaming=False):
            left_out[kind] = "ecd_modalities leaves them out"
        elif names.has_io_kwargs(kind) and (kind == IMAGE or only_encodes):
            left_out[kind] = "--media-io-kwargs change their names"
        elif metadata.needs_outline(kind):
            looked_up.append(kind)
            outlined.append(kind)
        elif metadata.fits_entry(kind):
            looked_up.append(kind)
        else:
            left_out[kind] = "nothing that the model takes can stand in their place"
    return looked_up, outlined, left_out


def called(kinds: Sequence[str]) -> str:
    """The kinds as people call them."""
    return in_words([_WORDS[kind] for kind in kinds])
