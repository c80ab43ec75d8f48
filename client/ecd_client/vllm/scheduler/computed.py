"""With which metadata the tokens of items were computed: vLLM's prefix cache does not tell.

vLLM names a block of its KV cache by the block's tokens and its items' identifiers. But where the
tokens stand (M-RoPE) depends on the metadata, too, and a request without media brings its own.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.vllm.base.compat import takes_prefilled
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.base.sharing import Sharing
from ecd_client.vllm.scheduler.request_items import NeededItem, RequestItems
from ecd_proto.placeholders import Placeholder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

MAX_ITEMS = 1 << 15
"""Most items that are remembered: about as many as a KV cache has room for."""
_UNKNOWN = b""


class ComputedItems:
    """The items that this engine has computed tokens of, the last ones of all."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        client: Client,
        sharing: Sharing,
        metadata: PlaceholderMetadata,
    ) -> None:
        self._client, self._sharing, self._metadata = client, sharing, metadata
        self._takes_prefilled = takes_prefilled(vllm_config)
        self._with: OrderedDict[bytes, bytes] = OrderedDict()
        """Metadata as entries store them, by the SHA-256 of items' names, which may be long."""

    def note(self, feature: Any) -> None:
        """The engine makes room for a request's item, whose tokens it computes now.

        Items that came with their media have the metadata that their names stand for: the first
        of a name is noted.
        """
        identifier = feature.identifier
        if (digest := _digest(identifier)) in self._with:
            self._with.move_to_end(digest)
        elif self._metadata.fields_for(feature.modality):
            self.remember(identifier, self._metadata.packed(feature))

    def note_bare(self, state: RequestItems) -> None:
        """The engine may compute the tokens of all the request's items that were not judged."""
        for item in state.needed[max(state.judged, state.noted) :]:
            if item.described is not None:
                self.remember(item.identifier, item.described.stored)
        state.noted = len(state.needed)

    def remember(self, identifier: str, stored: bytes) -> None:
        """The item's tokens are computed with metadata of which an entry carries these bytes.

        Empty: with unknown ones, or with more than entries carry. Nothing is known, either, of
        tokens that were computed with others before: vLLM may have both, and give the older.
        """
        digest = _digest(identifier)
        self._with[digest] = stored if self._with.get(digest, stored) == stored else _UNKNOWN
        self._with.move_to_end(digest)
        if len(self._with) > MAX_ITEMS:
            self._with.popitem(last=False)

    def others_in(
        self, request: Request, state: RequestItems, num_computed_tokens: int
    ) -> NeededItem | None:
        """An item of which vLLM has tokens that it may have computed with other metadata.

        An item that is still to be computed is judged before it is, and one whose tokens vLLM has
        found in each step until it takes them for the request.
        """
        is_taken = request.num_computed_tokens > 0
        for item in state.begun_within(num_computed_tokens):
            if item.described is not None and not is_taken:
                if self._is_prefilled(request):
                    if not self._may_join(item, item.described):
                        return item
                elif not self._was_computed_as(item, item.described):
                    return item
            state.judged += is_taken
        return None

    def _is_prefilled(self, request: Request) -> bool:
        """Whether vLLM is to load the tokens that another engine has computed for this request.

        That engine has judged the request. If they cannot be loaded, vLLM says so no longer.
        """
        params = request.kv_transfer_params
        is_told = isinstance(params, dict) and bool(params.get("do_remote_prefill"))
        return self._takes_prefilled and is_told

    def _may_join(self, item: NeededItem, said: Placeholder) -> bool:
        """Whether tokens of the item that are loaded fit those that this engine has.

        vLLM loads what it does not find, and what it loads others find.
        """
        if self._with.get(_digest(item.identifier), said.stored) != said.stored:
            return False
        self.remember(item.identifier, said.stored)
        return True

    def _was_computed_as(self, item: NeededItem, said: Placeholder) -> bool:
        """Whether tokens of the item were computed with the metadata that came, and no others.

        Where this engine has not computed them, an entry that memory shows says so.
        """
        if (noted := self._with.get(_digest(item.identifier))) is not None:
            return noted == said.stored
        if not self._sharing.includes(item.identifier):
            return False
        with contextlib.suppress(EcdError):
            metadata = self._client.shown_metadata(item.identifier)
            return metadata is not None and said.is_of(metadata)
        return False


def _digest(identifier: str) -> bytes:
    return sha256(identifier.encode(errors="surrogatepass")).digest()
