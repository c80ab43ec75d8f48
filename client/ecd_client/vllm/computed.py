"""With which metadata the tokens of items were computed: vLLM's prefix cache does not tell.

vLLM names a block of its KV cache by the block's tokens and its items' identifiers. But where the
tokens stand (M-RoPE) depends on the metadata, too, and a request without media brings its own.
"""

from __future__ import annotations

from collections import OrderedDict

from ecd_proto.placeholders import Placeholder

MAX_ITEMS = 1 << 15
"""Most items that are remembered: about as many as a KV cache has room for."""


class ComputedItems:
    """The items that this engine has computed tokens of, the last ones of all."""

    def __init__(self) -> None:
        self._with: OrderedDict[str, bytes] = OrderedDict()

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._with

    def note(self, identifier: str, said: Placeholder | None) -> None:
        """The item's tokens are computed with these metadata; None: with unknown ones."""
        self._with[identifier] = b"" if said is None else said.stored
        self._with.move_to_end(identifier)
        if len(self._with) > MAX_ITEMS:
            self._with.popitem(last=False)

    def had(self, identifier: str, said: Placeholder) -> bool:
        """Whether the item's tokens were computed with these metadata."""
        return self._with.get(identifier) == said.stored
