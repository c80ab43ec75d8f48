"""One thing has one name: no two classes share one, but for the two ends of one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = "ecd", "client/ecd_client", "client/ecd_vllm", "proto/ecd_proto"
TWO_ENDS = {
    *("Content", "DevicePool", "EntryTooLarge", "Extent", "KeyLocks", "Lease", "PoolFull", "Put"),
    "Session",
}
"""What the daemon has and its client sees, in a class each."""
MOST_VALUES = 2


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            if "_pb2" not in file.name:
                yield file, ast.parse(file.read_text())


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for file, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file.relative_to(ROOT))
    twins = {name: each for name, each in places.items() if len(each) > 1}

    assert set(twins) == TWO_ENDS, {name: twins.get(name) for name in set(twins) ^ TWO_ENDS}
    for name, (one, other, *more) in twins.items():
        assert not more, (name, more)
        assert {one.parts[0], other.parts[0]} == {"ecd", "client"}, (name, one, other)


def test_no_public_constant_has_three_values() -> None:
    values = defaultdict(set)
    for _, module in modules():
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, value = node.targets[0].id, ast.unparse(node.value)
                if name.isupper() and name[0] != "_" and "TypeVar" not in value:
                    values[name].add(value)
    assert values["PIECE_BYTES"], "constants are found"

    assert not {name: each for name, each in values.items() if len(each) > MOST_VALUES}
