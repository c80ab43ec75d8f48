"""SGLang's plugin: ecd as the encoder's global embedding cache, where an operator asks for it."""

import os

from ecd_client.sglang.settings import NAMESPACE_VARIABLE

__all__ = ["register"]


def register() -> None:
    """Put ecd in the place of SGLang's backend `mooncake`, if `ECD_SGLANG_NAMESPACE` is set.

    SGLang calls this in every process that loads its plugins, and allows no other backend's name.
    """
    if NAMESPACE_VARIABLE not in os.environ:
        return
    from sglang.srt.mem_cache.embedding_store import EmbeddingStoreFactory

    EmbeddingStoreFactory.register_backend(
        "mooncake", "ecd_client.sglang.store", "EcdEmbeddingStore"
    )
