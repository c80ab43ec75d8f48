"""The outline of an item: what an API server makes of a medium besides its encoder's input.

vLLM's server takes metadata in place of the media of few models. Of the others' it has to know how
a medium stands in a prompt: which tokens take the place of which, and which of them get an
embedding. `outlines` has vLLM say that once, and take it again. Where these follow from fields of
the item, as with the times of a video's frames, the fields are the outline: nobody else may say
tokens from which positions follow. An outline is stored as an entry of its own: MessagePack,
compressed by zlib.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from ecd_proto.placeholders import Placeholder

MAX_TOKENS = 1 << 18
"""Most tokens of an outline: beyond any model's context."""
MAX_PACKED_BYTES = 1 << 16
_MAX_BYTES = 8 * MAX_TOKENS

Place: TypeAlias = Literal["start", "end"]


class Update(msgspec.Struct, array_like=True, frozen=True):
    """One update of a prompt: the tokens of `full` are put at its `target`, or in its place.

    A target is a sequence of tokens, or an end of the prompt. `embeds` has a byte for each token of
    `full`, 1 where it gets an embedding. None: all do.
    """

    mode: Literal["insert", "replace"]
    target: list[int] | Place
    full: list[int]
    embeds: bytes | None

    @property
    def embeddings(self) -> int:
        """How many tokens get an embedding. -1: `embeds` makes no sense."""
        if self.embeds is None:
            return len(self.full)
        is_sensible = len(self.embeds) == len(self.full) and set(self.embeds) <= {0, 1}
        return sum(self.embeds) if is_sensible else -1

    def tokens(self) -> Iterator[int]:
        if isinstance(self.target, list):
            yield from self.target
        yield from self.full


class _Form(msgspec.Struct, array_like=True, frozen=True):
    """An outline as it is stored; `metadata` are a packed `Placeholder`, or empty."""

    form: Literal[1]
    modality: str
    metadata: bytes
    updates: list[Update]


_DECODER = msgspec.msgpack.Decoder(_Form)


@dataclass(frozen=True)
class Outline:
    """How an item stands in a prompt.

    It has either `updates`, of which vLLM applies one, or the fields from which they follow.
    """

    modality: str
    updates: tuple[Update, ...] = ()
    placeholder: Placeholder | None = None

    @property
    def embeddings(self) -> int:
        """How many embeddings the updates have. 0: they differ in that, or make no sense."""
        counts = {update.embeddings for update in self.updates}
        return max(0, counts.pop()) if len(counts) == 1 else 0

    def pack(self) -> bytes | None:
        """The outline as an entry's bytes. None: it is too long."""
        metadata = b"" if self.placeholder is None else self.placeholder.packed
        said = msgspec.msgpack.encode(_Form(1, self.modality, metadata, list(self.updates)))
        packed = zlib.compress(said, 1)
        is_short = len(said) <= _MAX_BYTES and len(packed) <= MAX_PACKED_BYTES
        return packed if is_short else None

    @classmethod
    def unpack(cls, packed: bytes, vocabulary: int) -> Outline | None:
        """The outline that an entry holds. None: it holds another thing, or makes no sense.

        Tokens are below `vocabulary`.
        """
        if len(packed) > MAX_PACKED_BYTES:
            return None
        try:
            said = _DECODER.decode(zlib.decompressobj().decompress(packed, _MAX_BYTES))
        except (zlib.error, msgspec.MsgspecError):
            return None
        placeholder = Placeholder.unpack(said.metadata) if said.metadata else None
        outline = cls(said.modality, tuple(said.updates), placeholder)
        if said.metadata:
            is_whole = placeholder is not None and placeholder.modality == said.modality
            return outline if is_whole and not said.updates else None
        is_sensible = (
            outline.embeddings > 0
            and sum(len(update.full) for update in said.updates) <= MAX_TOKENS
            and all(0 <= token < vocabulary for update in said.updates for token in update.tokens())
        )
        return outline if is_sensible else None
