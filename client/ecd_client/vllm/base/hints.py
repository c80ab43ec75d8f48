"""Hints that engines on different nodes pass each other in a request's `ec_transfer_params`.

A producer's answer names, with each item, the node whose daemon has the embedding (`ecd_node`) and
the extent there (`ecd_extent`: pool, offset and bytes). A request may name, beside the
items, the nodes that will want them (`ecd_consumers`). Anybody who sends requests can write these
fields, so nothing is taken for granted about their form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from ecd_proto.contract import MAX_HINTS, MAX_NODE_LENGTH, MAX_POOLS, NODE_PATTERN, Hint

NODE, EXTENT, CONSUMERS = "ecd_node", "ecd_extent", "ecd_consumers"
DECODING = "ecd_decoding"
"""A digest of the decoders and options with which an engine reads what it has encoded elsewhere."""
MAX_ITEMS = 128
"""Items of one request that are searched for hints; they take the scheduler half a ms."""


def hints_in(
    params: object,
    identifiers: Collection[str] | None = None,
    count: Callable[[str], None] | None = None,
) -> dict[str, list[Hint]]:
    """The nodes that are said to have each item of `ec_transfer_params`, by mm_hash.

    `identifiers` limits them to the items that the request needs. Only MAX_ITEMS items are read,
    and only MAX_HINTS of one item are taken; `count` is told of a request that has more.
    """
    if not isinstance(params, dict):
        return {}
    listed = params.get("ec_items")  # vLLM 0.28 has a list, later ones a dict by mm_hash
    named: Iterable[tuple[Any, Any]]
    if isinstance(listed, list):
        said = len(listed)
        named = ((i.get("mm_hash"), i) for i in listed[:MAX_ITEMS] if isinstance(i, dict))
    elif identifiers is None:
        said = len(params)
        named = islice(params.items(), MAX_ITEMS)
    else:
        said = len(identifiers)
        named = ((name, params.get(name)) for name in islice(identifiers, MAX_ITEMS))
    found: dict[str, list[Hint]] = {}
    dropped = said > MAX_ITEMS
    for mm_hash, item in named:
        if not (isinstance(mm_hash, str) and isinstance(item, dict)):
            continue
        if identifiers is not None and mm_hash not in identifiers:
            continue
        hints = found.setdefault(mm_hash, [])
        if len(hints) < MAX_HINTS:
            extent = _extent(item.get(EXTENT))
            hints += [Hint(node, *extent) for node in _nodes([item.get(NODE)])]
        else:
            dropped = True
    if dropped and count is not None:
        count("dropped_hints")
    return found


def names_items(params: object) -> bool:
    """Whether `ec_transfer_params` name items that encoders have stored."""
    if not isinstance(params, dict):
        return False
    return "ec_items" in params or any(isinstance(item, dict) for item in params.values())


def consumers_in(params: object) -> list[str]:
    """The nodes that will want the request's items."""
    if not isinstance(params, dict):
        return []
    consumers = params.get(CONSUMERS)
    return _nodes(consumers if isinstance(consumers, list) else [consumers])


def add_hints(params: dict[str, Any], hints: Mapping[str, Hint]) -> None:
    """Write into the answer to a request where its items lie."""
    for mm_hash, item in params.items():
        if hint := hints.get(mm_hash):
            item[NODE] = hint.node
            if hint.nbytes:
                item[EXTENT] = [hint.pool, hint.offset, hint.nbytes]


def _extent(said: object) -> tuple[int, ...]:
    if isinstance(said, list) and len(said) == 3 and all(map(_is_size, said)):
        pool, offset, nbytes = said
        return (pool, offset, nbytes) if pool < MAX_POOLS else ()
    return ()


def _is_size(said: object) -> bool:
    return type(said) is int and 0 <= said < 1 << 63


def _nodes(said: list[Any]) -> list[str]:
    return [node for node in said[:MAX_HINTS] if isinstance(node, str) and _is_node(node)]


def _is_node(said: str) -> bool:
    return len(said) <= MAX_NODE_LENGTH and re.fullmatch(NODE_PATTERN, said) is not None
