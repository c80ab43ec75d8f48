"""What else keeps a tensor for another process of one node, each behind the same four verbs.

A `Peer` is one process's view of it; a `Place` is what lies between the processes: servers, files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from common import MIB, end_daemon, start_daemon

from ecd_client import Client

FILES_BYTES = 512 * MIB
ALONE = "LMCache's engine, in one process"
EXAMPLE = "vLLM's ECExampleConnector"


class Peer(Protocol):
    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Return once another process can get it."""

    def hold(self, key: str) -> None:
        """Find it and let it go, without a copy of its bytes."""

    def copy(self, key: str, target: torch.Tensor) -> None:
        """The bytes, into memory of the caller's own."""

    def contains(self, key: str) -> bool: ...


class Ecd:
    def __init__(self, place: str, nbytes: int) -> None:
        self._client = Client(place, namespace=str(nbytes), prefault=True)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._client.put(key, tensor)

    def hold(self, key: str) -> None:
        with self._client.get(key) as item:
            _ = item.tensor

    def copy(self, key: str, target: torch.Tensor) -> None:
        with self._client.get(key) as item:
            target.copy_(item.tensor)
            item.check()

    def contains(self, key: str) -> bool:
        return self._client.contains([key])[0]


class Files:
    """One safetensors file a tensor, in a directory on tmpfs, written aside and renamed."""

    def __init__(self, place: str, nbytes: int) -> None:
        self._directory = Path(place) / str(nbytes)
        self._directory.mkdir(exist_ok=True)
        self._keep = FILES_BYTES // nbytes
        self._stored: deque[str] = deque()

    def put(self, key: str, tensor: torch.Tensor) -> None:
        from safetensors.torch import save_file

        path = self._directory / key
        save_file({"t": tensor}, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
        self._stored.append(key)

    def tidy(self) -> None:
        """Nothing evicts files."""
        while len(self._stored) > self._keep:
            (self._directory / self._stored.popleft()).unlink()

    def hold(self, key: str) -> None:
        from safetensors import safe_open

        with safe_open(self._directory / key, "pt") as file:
            file.get_slice("t")

    def copy(self, key: str, target: torch.Tensor) -> None:
        from safetensors.torch import load_file

        target.copy_(load_file(self._directory / key)["t"])

    def contains(self, key: str) -> bool:
        return (self._directory / key).exists()


class Redis:
    def __init__(self, place: str, nbytes: int) -> None:
        import redis

        warnings.filterwarnings("ignore", "The given buffer is not writable")  # it is read only
        self._prefix = f"{nbytes}/"
        self._redis = redis.Redis(unix_socket_path=place)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._redis.set(self._prefix + key, memoryview(tensor.numpy()))

    hold = None

    def copy(self, key: str, target: torch.Tensor) -> None:
        target.copy_(torch.frombuffer(self._redis.get(self._prefix + key), dtype=torch.uint8))

    def contains(self, key: str) -> bool:
        return bool(self._redis.exists(self._prefix + key))


class Store:
    """Mooncake Store over tcp, with registered buffers on both sides."""

    def __init__(self, place: str, nbytes: int) -> None:
        self._store = _store(place, 0)
        self._prefix = f"{nbytes}/"
        self._keep = FILES_BYTES // nbytes
        self._stored: deque[str] = deque()
        self._known: set[int] = set()

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._register(tensor)
        assert self._store.put_from(self._prefix + key, tensor.data_ptr(), tensor.nbytes) == 0
        self._stored.append(self._prefix + key)

    def tidy(self) -> None:
        """It evicts behind its puts, and refuses one that comes before that."""
        while len(self._stored) > self._keep:
            self._store.remove(self._stored.popleft())

    hold = None

    def copy(self, key: str, target: torch.Tensor) -> None:
        self._register(target)
        got = self._store.get_into(self._prefix + key, target.data_ptr(), target.nbytes)
        assert got == target.nbytes

    def contains(self, key: str) -> bool:
        return bool(self._store.is_exist(self._prefix + key) == 1)

    def _register(self, tensor: torch.Tensor) -> None:
        """Once for each buffer: the rounds come back to the same ones."""
        if tensor.data_ptr() not in self._known:
            self._known.add(tensor.data_ptr())
            self._store.register_buffer(tensor.data_ptr(), tensor.nbytes)


class LMCache:
    """LMCache's encoder-cache engine, in one process: memory, and a small disk because it must."""

    def __init__(self, place: str, nbytes: int) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.ec_engine import ECCacheEngine
        from lmcache.v1.metadata import LMCacheMetadata

        shape = (1, 2, 256, 1, 1)  # of a KV cache: it does not matter here
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.uint8, shape, role="worker")
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True,
            max_local_cpu_size=FILES_BYTES / (1 << 30),
            local_disk=f"{place}/",
            max_local_disk_size=0.01,
        )
        self._engine = ECCacheEngine(config, metadata, torch.uint8)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        assert self._engine.put(key, tensor.view(1, -1))

    hold = None

    def copy(self, key: str, target: torch.Tensor) -> None:
        """The engine's own copy: it gives no other."""
        assert self._engine.get(key, "cpu") is not None

    def contains(self, key: str) -> bool:
        return bool(self._engine.contains(key))


class ExampleConnector:
    """vLLM's ECExampleConnector: what its worker saves and loads, what its scheduler looks for."""

    def __init__(self, place: str, nbytes: int) -> None:
        from types import SimpleNamespace

        from vllm.config import ECTransferConfig
        from vllm.distributed.ec_transfer.ec_connector import example_connector as example
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

        path = Path(place) / str(nbytes)
        path.mkdir(exist_ok=True)
        transfer = ECTransferConfig(
            ec_connector="ECExampleConnector",
            ec_role="ec_both",
            ec_connector_extra_config={"shared_storage_path": str(path)},
        )
        config = SimpleNamespace(ec_transfer_config=transfer, model_config=None)
        self._example = example
        self._connector = example.ECExampleConnector(config, ECConnectorRole.WORKER)
        self._path, self._keep = path, FILES_BYTES // nbytes
        self._stored: deque[str] = deque()

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._connector.save_caches({key: tensor}, key)
        self._stored.append(key)

    def tidy(self) -> None:
        """Nothing evicts files."""
        while len(self._stored) > self._keep:
            shutil.rmtree(self._path / self._stored.popleft())

    hold = None

    def copy(self, key: str, target: torch.Tensor) -> None:
        wanted = self._example.ECExampleConnectorMetadata()
        wanted.add_mm_data(self._example.MMMeta(key, 1))
        self._connector.bind_connector_metadata(wanted)
        loaded: dict[str, torch.Tensor] = {}
        self._connector.start_load_caches(loaded)
        target.copy_(loaded[key])

    def contains(self, key: str) -> bool:
        return bool(self._connector.has_cache_item(key))


def _store(place: str, segment_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 * MIB, "tcp", "", place)
    assert store.setup(*arguments) == 0
    return store


PEERS: dict[str, Callable[[str, int], Any]] = {
    "ecd": Ecd,
    "safetensors on tmpfs": Files,
    "Redis, unix socket": Redis,
    "Mooncake Store, tcp": Store,
    ALONE: LMCache,
    EXAMPLE: ExampleConnector,
}
ENVIRONMENTS = Path(__file__).parents[1] / ".venvs"


def _environment_of(name: str) -> tuple[str, dict[str, str]]:
    """The interpreter that has what the peer needs, and what to add to its environment."""
    if name == ALONE:
        return str(ENVIRONMENTS / "lmcache/bin/python"), {
            "LMCACHE_LOG_LEVEL": "ERROR",
            "LMCACHE_TRACK_USAGE": "false",
        }
    if name == EXAMPLE:
        site = ENVIRONMENTS.parent / "tests/e2e/site"
        return str(ENVIRONMENTS / "vllm-0.32.0/bin/python"), {"PYTHONPATH": str(site)}
    return sys.executable, {}


def run_for(peer: str, module: str, function: str, *arguments: object) -> dict[str, float]:
    """What a function of a module beside this one gives in the environment that the peer needs."""
    python, environment = _environment_of(peer)
    program = (
        f"import json, os, sys, {module}; "
        f"results = {module}.{function}(*json.loads(sys.argv[1])); "
        "print(json.dumps(results), file=sys.stderr, flush=True); "
        "os._exit(0)"  # LMCache's threads would go on
    )
    done = subprocess.run(
        [python, "-c", program, json.dumps(arguments)],
        env=os.environ | environment,
        cwd=Path(__file__).parent,
        text=True,
        capture_output=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{peer}:\n{done.stderr}")
    results: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return results


@contextlib.contextmanager
def open_place(name: str, nbytes: int) -> Iterator[str]:
    """What lies between the processes, with room for `nbytes`; how they find it."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if name == "ecd":
            daemon, address = start_daemon(directory, "ecd", nbytes)
            stack.callback(end_daemon, daemon)
            yield address
        elif name in ("safetensors on tmpfs", ALONE, EXAMPLE):
            files = tempfile.mkdtemp(dir="/dev/shm", prefix="ecd-bench-")
            stack.callback(shutil.rmtree, files)
            yield files
        elif name == "Redis, unix socket":
            path = directory / "redis.sock"
            limits = ["--maxmemory", str(nbytes), "--maxmemory-policy", "allkeys-lru"]
            stack.callback(
                _end,
                subprocess.Popen(
                    ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", *limits],
                    cwd=directory,
                    stdout=subprocess.DEVNULL,
                ),
            )
            _wait_for(path.exists)
            yield str(path)
        else:
            yield _open_store(directory, nbytes, stack)


def _open_store(directory: Path, nbytes: int, stack: contextlib.ExitStack) -> str:
    """A master, and a process that has the memory: this one."""
    import mooncake

    rpc, metrics = (_free_port() for _ in range(2))
    binary = Path(mooncake.__file__).parent / "mooncake_master"
    ports = [f"--rpc_port={rpc}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"]
    with (directory / "master.log").open("wb") as log:
        stack.callback(_end, subprocess.Popen([binary, *ports], stdout=log, stderr=log))
    _wait_for(lambda: _answers(rpc))
    host = _store(f"127.0.0.1:{rpc}", 2 * nbytes)
    stack.callback(host.close)
    return f"127.0.0.1:{rpc}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _wait_for(ready: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline_s, "it does not start"
        time.sleep(0.05)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
