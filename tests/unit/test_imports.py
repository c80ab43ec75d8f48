"""What modules import, beyond the contracts in pyproject.toml."""

from __future__ import annotations

import graphlib
import sys

import grimp
import pytest

from support.processes import run


@pytest.mark.parametrize("package", ["ecd", "ecd_client", "ecd_proto"])
def test_no_module_is_in_a_circle_of_imports(package: str) -> None:
    graph = grimp.build_graph(package, cache_dir=None, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()


def test_a_daemon_loads_no_more_of_the_replay_than_its_options() -> None:
    code = (
        "import ecd.commands, sys; print(*(n for n in sys.modules if n.startswith('ecd.replay.')))"
    )
    done = run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert set(done.stdout.split()) == {"ecd.replay.command", "ecd.replay.policies"}
