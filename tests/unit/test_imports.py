"""No module imports one that imports it, but for the names of types."""

from __future__ import annotations

import graphlib

import grimp
import pytest


@pytest.mark.parametrize("package", ["ecd", "ecd_client", "ecd_proto"])
def test_no_module_is_in_a_circle_of_imports(package: str) -> None:
    graph = grimp.build_graph(package, cache_dir=None, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()
