"""Entries of media, and of their outlines, as the middleware finds and stores them in ecd."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.item import Item
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.base.names import outline_name
from ecd_client.vllm.middleware.media import FoundMedium, Medium
from ecd_client.vllm.middleware.outline import Outline
from ecd_proto.placeholders import Placeholder

OUTLINE_COST_S = 0.001
"""The cost of an outline: that of an embedding, byte by byte, so that neither long outlives the
other."""
_OUTLINE = Placeholder.of("outline", {"bytes": [1]})
_OUTLINE_METADATA = b"" if _OUTLINE is None else _OUTLINE.packed
"""The metadata of outlines: the daemon learns the costs of each modality apart."""


class MediaEntries:
    """Finds a medium's entry, and what it says, or its outline."""

    def __init__(
        self,
        client: Client,
        metadata: PlaceholderMetadata,
        outlined: Collection[str],
        vocabulary: int,
        *,
        only_encodes: bool,
    ) -> None:
        """Media of `outlined` kinds may need their outlines, whose tokens are below `vocabulary`.

        An engine that `only_encodes` needs none of what stands in a medium's place.
        """
        self._client, self._metadata = client, metadata
        self._outlined, self._vocabulary = outlined, vocabulary
        self._front_end = metadata.front_end() if outlined else ""
        self._only_encodes = only_encodes

    def keep(self, entry: tuple[str, str], outline: Outline) -> None:
        """Store the outline of an entry, by its namespace and its name there."""
        said = outline.placeholder
        if said is not None and said.stored == said.packed:
            return  # the item's own entry says as much
        if packed := outline.pack():
            namespace, stored = entry
            self._client.put_async(
                self._outline_name(stored),
                torch.frombuffer(bytearray(packed), dtype=torch.uint8),
                namespace=namespace,
                cost=OUTLINE_COST_S,
                metadata=_OUTLINE_METADATA,
            )

    def find(
        self, namespace: str, medium: Medium, stored: str, nodes: Any, until_s: float
    ) -> tuple[FoundMedium | None, bool]:
        """The medium that is `stored` under this name, if it is here or comes until then.

        Whether there is an entry, too: one without metadata is found by none but the engine.
        """
        item, was_here = self._get(namespace, stored, nodes, until_s)
        if item is None:
            return None, False
        kind = medium.kind
        if self._only_encodes and not self._metadata.fields_for(kind):
            return FoundMedium(medium, item, None), True
        said = self._said(item, kind)
        if said is None and item.shape and kind in self._outlined:
            # An outline comes from where its entry has come from.
            said = self._outline(item, kind, nodes, 0.0 if was_here else until_s)
        if said is None:
            item.close()
            return None, True
        found = FoundMedium(medium, item, said)
        told = found.placeholder
        if self._only_encodes and told is not None and not self._metadata.is_taken(kind, told):
            return FoundMedium(medium, item, None), True
        return found, True

    def shows(self, namespace: str, kind: str, stored: str) -> bool:
        """Whether memory shows a medium's entry, and its outline unless the entry says all."""
        metadata = self._client.shown_metadata(stored, namespace=namespace)
        if metadata is None:
            return False
        claimed = Placeholder.unpack(metadata)
        if claimed is not None and self._metadata.checked(kind, claimed.fields) is not None:
            return True
        return self._client.is_shown(self._outline_name(stored), namespace=namespace)

    def _said(self, item: Item, kind: str) -> Placeholder | Outline | None:
        """The metadata of an entry, or their outline if no server takes them in a request.

        None: it carries none, or not all.
        """
        claimed = Placeholder.unpack(item.metadata)
        if claimed is None or claimed.modality != kind or not item.shape:
            return None
        said = self._metadata.checked(kind, claimed.fields, item.shape[0])
        if said is None or self._metadata.is_taken(kind, said):
            return said
        return Outline(kind, placeholder=said) if kind in self._outlined else None

    def _outline(self, item: Item, kind: str, nodes: Any, until_s: float) -> Outline | None:
        """The outline of an entry that can be its, if it is here or comes until then."""
        entry, _ = self._get(item.namespace, self._outline_name(item.mm_hash), nodes, until_s)
        if entry is None:
            return None
        with entry:
            outline = Outline.unpack(bytes(entry.view), self._vocabulary)
        if outline is None or outline.modality != kind:
            return None
        rows, said = item.shape[0], outline.placeholder
        if said is None:
            is_its = not self._metadata.fields_for(kind) and outline.embeddings == rows
        else:
            is_its = said.is_of(item.metadata) and bool(
                self._metadata.checked(kind, said.fields, rows)
            )
        return outline if is_its else None

    def _outline_name(self, stored: str) -> str:
        return outline_name(stored, self._front_end)

    def _get(
        self, namespace: str, stored: str, nodes: Any, until_s: float
    ) -> tuple[Item | None, bool]:
        """The entry of this name, if it is here or comes until then, and whether it was here."""
        item, may_come = self._client.get_now(stored, namespace=namespace, is_use=False)
        left_s = until_s - clock.now_s()
        if item is not None or not (may_come or nodes) or left_s <= 0:
            return item, item is not None
        return (
            self._client.get(stored, left_s, namespace=namespace, nodes=nodes, is_use=False),
            False,
        )
