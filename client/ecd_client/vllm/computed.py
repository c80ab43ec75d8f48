"""With which metadata the tokens of items were computed: vLLM's prefix cache does not tell.

vLLM names a block of its KV cache by the block's tokens and its items' identifiers. But where the
tokens stand (M-RoPE) depends on the metadata, too, and a request without media brings its own.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256

from ecd_proto.placeholders import Placeholder

MAX_ITEMS = 1 << 15
"""Most items that are remembered: about as many as a KV cache has room for."""
_UNKNOWN = b""


class ComputedItems:
    """The items that this engine has computed tokens of, the last ones of all."""

    def __init__(self) -> None:
        self._with: OrderedDict[bytes, bytes] = OrderedDict()
        """What entries carry of the metadata, by the digests of names: clients make long ones."""

    def __contains__(self, identifier: str) -> bool:
        return _digest(identifier) in self._with

    def note(self, identifier: str, stored: bytes) -> None:
        """The item's tokens are computed with metadata of which an entry carries these bytes.

        Empty: with unknown ones, or with more than entries carry. Nothing is known, either, of
        tokens that were computed with others before: vLLM may have both, and give the older.
        """
        digest = _digest(identifier)
        self._with[digest] = stored if self._with.get(digest, stored) == stored else _UNKNOWN
        self._with.move_to_end(digest)
        if len(self._with) > MAX_ITEMS:
            self._with.popitem(last=False)

    def had(self, identifier: str, said: Placeholder) -> bool:
        """Whether the item's tokens were computed with these metadata, and never with others."""
        return self._with.get(_digest(identifier)) == said.stored


def _digest(identifier: str) -> bytes:
    return sha256(identifier.encode(errors="surrogatepass")).digest()
