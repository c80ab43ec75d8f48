"""`ec_transfer_params` of forms that no engine writes, and anybody can send."""

from __future__ import annotations

BODY_BYTES = 17 << 20
IDENTIFIERS = [None, {"k", *(f"{n:064x}" for n in range(20))}]
"""The items that a request needs: it does not say, or a few."""


def item(number: int) -> dict:
    return {"ecd_node": f"10.0.{number // 250 % 250}.1:9465", "ecd_extent": [0, number, 100]}


def deep() -> dict:
    outermost: dict = {}
    inner = outermost
    for _ in range(500):
        inner["k"] = inner["ec_items"] = {}
        inner = inner["k"]
    return outermost


def huge(shape: str) -> object:
    match shape:
        case "many items":
            return {f"{number:064x}": item(number) for number in range(70_000)}
        case "a long list":
            return {"ec_items": [{"mm_hash": f"{n:064x}", **item(n)} for n in range(70_000)]}
        case "many of one item":
            return {"ec_items": [{"mm_hash": "k", **item(number)} for number in range(70_000)]}
        case "no items at all":
            return {"ec_items": [[number] for number in range(BODY_BYTES // 8)]}
        case "a long name":
            return {"k" * BODY_BYTES: item(0), "ec_items": None}
        case "a long node":
            return {"k": {"ecd_node": "1" * BODY_BYTES, "ecd_extent": [0, 0, 1]}}
        case "a long extent":
            return {"k": {"ecd_node": "10.0.0.1:9465", "ecd_extent": [0] * BODY_BYTES}}
        case "a large number":
            return {"k": {"ecd_node": "10.0.0.1:9465", "ecd_extent": [0, 1 << (8 * BODY_BYTES), 1]}}
        case "names that are none":
            return {"ec_items": [{"mm_hash": ["k"] * 1000}, {"mm_hash": {}}, {"mm_hash": None}]}
        case "many consumers":
            return {"ecd_consumers": ["1" * 1000] * (BODY_BYTES // 1000)}
        case "deep":
            return deep()
    return shape


SHAPES = (
    *("many items", "a long list", "many of one item", "no items at all", "a long name"),
    *("a long node", "a long extent", "a large number", "names that are none", "many consumers"),
    *("deep", "not even a dict"),
)
