"""Daemons with all that `encoder-cache-daemon[cuda]` installs, Mooncake's build for CUDA among it.

That build does not load without NVIDIA's libraries, for which stand-ins are there. It is large, so
these tests are not collected with the others: `make cuda-wheel` installs it and runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ecd_client import Client
from support.cuda.standin import Control, environment
from support.daemon import Daemon
from support.pairs import start_all
from support.processes import run
from support.waiting import HANG_S

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs/cuda/bin/python"
SIZES = (64 << 10, 8 << 20)


def test_it_is_the_build_for_cuda() -> None:
    script = "import mooncake, pathlib; print(pathlib.Path(mooncake.__file__).parent)"
    told = run([PYTHON, "-c", script], capture_output=True, text=True, check=True).stdout
    [engine] = Path(told.strip()).glob("engine*.so")
    needed = run(["ldd", engine], capture_output=True, text=True, check=True).stdout
    assert "libcuda.so.1" in needed


def test_entries_come_from_a_node_by_tcp(make_peer: Callable[..., Daemon], tmp_path: Path) -> None:
    """And each daemon has a device pool beside that."""
    nodes = []
    for number in range(2):
        variables = environment(Control(tmp_path / f"control-{number}"))
        node = make_peer(**variables, ECD_DEVICE_POOL_BYTES="16MiB")
        node.command = (str(PYTHON), "-m", "ecd", "serve")
        nodes.append(node)
    start_all(*nodes)
    here, there = nodes
    with Client(here.address) as writer, Client(there.address) as reader:
        for nbytes in SIZES:
            tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
            writer.put(str(nbytes), tensor)
            with reader.get(str(nbytes), HANG_S, nodes=[writer.node]) as item:
                assert torch.equal(item.tensor, tensor)
    assert there.peers().fetches["fetched"] == len(SIZES)
    assert [pool.kind for pool in there.status().pools] == ["host", "device"]
    for node in nodes:
        node.check_nothing_leaked()
