"""What engines on different nodes tell each other through a request's `ec_transfer_params`.

A producer's answer names, with each item, the node whose daemon has its embedding (`ecd_node`) and
where in its pool that lies (`ecd_extent`: offset and bytes); a request may name, beside the items,
the nodes that will want them (`ecd_consumers`). All of it comes back from whoever sends requests,
so that nothing is taken for granted about its form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingOf
from typing import Any

from ecd_proto.contract import MAX_HINTS, NODE_PATTERN, Hint

NODE, EXTENT, CONSUMERS = "ecd_node", "ecd_extent", "ecd_consumers"


def hints_in(params: object) -> dict[str, list[Hint]]:
    """For each mm_hash of `ec_transfer_params`, the nodes that are said to have it."""
    if not isinstance(params, dict):
        return {}
    listed = params.get("ec_items")  # vLLM 0.28 has a list, later ones a dict by mm_hash
    if isinstance(listed, list):
        named = [(item.get("mm_hash"), item) for item in listed if isinstance(item, dict)]
    else:
        named = list(params.items())
    found: dict[str, list[Hint]] = {}
    for mm_hash, item in named:
        if isinstance(mm_hash, str) and isinstance(item, dict):
            extent = _extent(item.get(EXTENT))
            hints = [Hint(node, *extent) for node in _nodes([item.get(NODE)])]
            found.setdefault(mm_hash, []).extend(hints)
    return found


def consumers_in(params: object) -> list[str]:
    """The nodes that will want the request's items."""
    if not isinstance(params, dict):
        return []
    consumers = params.get(CONSUMERS)
    return _nodes(consumers if isinstance(consumers, list) else [consumers])


def add_hints(params: dict[str, Any], hints: MappingOf[str, Hint]) -> None:
    """Say in the answer to a request where these items are."""
    listed = [(item["mm_hash"], item) for item in params.get("ec_items", ())]
    for mm_hash, item in (*params.items(), *listed):
        if hint := hints.get(mm_hash):
            item[NODE] = hint.node
            if hint.nbytes:
                item[EXTENT] = [hint.offset, hint.nbytes]


def _extent(said: object) -> tuple[int, ...]:
    if isinstance(said, list) and len(said) == 2 and all(map(_is_size, said)):
        return tuple(said)
    return ()


def _is_size(said: object) -> bool:
    return type(said) is int and 0 <= said < 1 << 63


def _nodes(said: list[Any]) -> list[str]:
    nodes = [node for node in said[:MAX_HINTS] if isinstance(node, str)]
    return [node for node in nodes if re.match(NODE_PATTERN, node)]
