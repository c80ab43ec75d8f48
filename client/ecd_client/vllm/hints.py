"""What engines on different nodes tell each other through a request's `ec_transfer_params`.

A producer's answer names, with each item, the node whose daemon has its embedding (`ecd_node`); a
request may name, beside the items, the nodes that will want them (`ecd_consumers`). Both come back
from whoever sends requests, so that nothing is taken for granted about their form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ecd_proto.contract import MAX_HINTS, NODE_PATTERN

NODE, CONSUMERS = "ecd_node", "ecd_consumers"


def nodes_in(params: object) -> dict[str, list[str]]:
    """For each mm_hash of `ec_transfer_params`, the nodes that are said to have it."""
    if not isinstance(params, dict):
        return {}
    listed = params.get("ec_items")  # vLLM 0.28 has a list, later ones a dict by mm_hash
    if isinstance(listed, list):
        named = [(item.get("mm_hash"), item) for item in listed if isinstance(item, dict)]
    else:
        named = list(params.items())
    found: dict[str, list[str]] = {}
    for mm_hash, item in named:
        if isinstance(mm_hash, str) and isinstance(item, dict):
            found.setdefault(mm_hash, []).extend(_nodes([item.get(NODE)]))
    return found


def consumers_in(params: object) -> list[str]:
    """The nodes that will want the request's items."""
    if not isinstance(params, dict):
        return []
    consumers = params.get(CONSUMERS)
    return _nodes(consumers if isinstance(consumers, list) else [consumers])


def add_node(params: dict[str, Any], node: str, shared: Iterable[str]) -> None:
    """Name the node that has these items in the answer to a request."""
    identifiers = set(shared)
    for mm_hash, item in params.items():
        if mm_hash in identifiers:
            item[NODE] = node
    for item in params.get("ec_items", ()):
        if item["mm_hash"] in identifiers:
            item[NODE] = node


def _nodes(said: list[Any]) -> list[str]:
    nodes = [node for node in said[:MAX_HINTS] if isinstance(node, str)]
    return [node for node in nodes if re.match(NODE_PATTERN, node)]
