"""An engine that encodes for others: it keeps its items stored, and says where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.vllm.base.hints import add_hints
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.base.names import outer_name
from ecd_client.vllm.base.sharing import Sharing
from ecd_proto.contract import Hint

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Producer:
    """Saves for the workers, offers to consumers' nodes, and answers for proxies."""

    def __init__(
        self,
        client: Client,
        sharing: Sharing,
        metadata: PlaceholderMetadata,
        *,
        announces_node: bool,
    ) -> None:
        self._client, self._sharing, self._metadata = client, sharing, metadata
        self._announces_node = announces_node
        self._to_save: set[str] = set()
        self._to_keep: set[str] = set()
        self._to_offer: dict[tuple[str, ...], list[str]] = {}
        self._placeholders: dict[str, bytes] = {}

    def forget(self) -> None:
        """Drop the notes for the next step, which belong to other weights."""
        self._to_save.clear()
        self._to_keep.clear()
        self._to_offer.clear()
        self._placeholders.clear()

    # -- saves ---------------------------------------------------------------------------------

    def save(self, identifier: str) -> None:
        """Have the workers store an item again, if it is in the engine's own encoder cache."""
        self._to_save.add(identifier)

    def save_unless_stored(self, identifiers: Iterable[str]) -> None:
        items = set(identifiers)
        self._to_save |= items - self._stored(items).keys()

    def keep(self, identifier: str) -> None:
        """Have the workers copy an item into the encoder cache, where vLLM takes it to be."""
        self._to_keep.add(identifier)

    def describe(self, feature: Any) -> None:
        """Note an item's placeholder metadata for its entry; this step encodes the item."""
        if self._sharing.includes(feature.identifier):
            self._placeholders[feature.identifier] = self._metadata.packed(feature)

    def take_placeholders(self) -> dict[str, bytes]:
        """The metadata of the entries of the step just scheduled, by item."""
        placeholders, self._placeholders = self._placeholders, {}
        return placeholders

    def take_saves(self) -> tuple[list[str], list[str]]:
        """The items to save and to keep in the step just scheduled."""
        saves, self._to_save = self._to_save, set()
        keeps, self._to_keep = self._to_keep, set()
        return list(saves), list(keeps)

    def _stored(self, identifiers: Iterable[str]) -> dict[str, bytes]:
        """The metadata of the items that memory shows stored, or being copied to where they lie."""
        with contextlib.suppress(EcdError):
            shared = filter(self._sharing.includes, identifiers)
            found = ((identifier, self._client.shown_metadata(identifier)) for identifier in shared)
            return {identifier: metadata for identifier, metadata in found if metadata is not None}
        return {}

    # -- offers --------------------------------------------------------------------------------

    def offer(self, identifiers: list[str], consumers: Iterable[str]) -> None:
        """Have the next `send_offers` offer the items to the consumers' nodes."""
        self._to_offer.setdefault(tuple(consumers), []).extend(identifiers)

    def send_offers(self) -> None:
        """Send one message for each group of consumers."""
        offers, self._to_offer = self._to_offer, {}
        for consumers, identifiers in offers.items():
            with contextlib.suppress(EcdError):  # then there is nothing to offer
                self._client.offer(identifiers, consumers)

    # -- answers -------------------------------------------------------------------------------

    def answer(self, request: Request, identifiers: set[str]) -> dict[str, Any] | None:
        """The `ec_transfer_params` of a finished request's answer, as its consumers need them."""
        stored = self._stored(identifiers)
        params = self._metadata.of(request.mm_features, stored)
        if params and self._announces_node:
            add_hints(params, self._hints(stored))
        return params and {outer_name(name): item for name, item in params.items()}

    def _hints(self, identifiers: Iterable[str]) -> dict[str, Hint]:
        with contextlib.suppress(EcdError):
            found = {identifier: self._client.hint(identifier) for identifier in identifiers}
            return {identifier: hint for identifier, hint in found.items() if hint}
        return {}
