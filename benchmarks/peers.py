"""Other stores that hand a tensor to another process of the node, behind the same verbs.

A `Peer` is one process's view of it, made the default way; `WARM` prepares what a long life may.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import MIB, open_store

from ecd_client import Client

FILES_BYTES = 512 * MIB
ECD = "ecd"
FILES = "safetensors on tmpfs"
REDIS = "Redis, unix socket"
STORE = "Mooncake Store, tcp"
ALONE = "LMCache's engine, in one process"
EXAMPLE = "vLLM's ECExampleConnector"


class Peer:
    needs: tuple[str, ...] = ()
    """The modules that a user imports for it."""
    hold: Callable[[str], None] | None = None
    """Find it and let it go, without a copy of its bytes."""
    into = True  # `copy` writes to its target
    maps = False
    """Whether `load` maps a file, and has read no byte of it yet."""

    def __init__(self, place: str, nbytes: int) -> None:
        """`place` is a socket's or a directory's path; tensors have `nbytes` each."""

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Return once another process can get it."""
        raise NotImplementedError

    def look(self, key: str) -> object | None:
        """Hold the entry until the result is dropped; None at once if it is not stored."""
        raise NotImplementedError

    def load(self, key: str) -> torch.Tensor:
        """The tensor as a user gets it."""
        raise NotImplementedError

    def fresh(self, key: str) -> torch.Tensor:
        """A tensor of the caller's own, with every byte read."""
        return self.load(key).clone() if self.maps else self.load(key)

    def copy(self, key: str, target: torch.Tensor) -> None:
        """The bytes, into memory that the caller had before."""
        target.copy_(self.load(key))

    def contains(self, key: str) -> bool:
        raise NotImplementedError

    def tidy(self) -> None:
        """Remove old entries, if nothing evicts them."""


class Ecd(Peer):
    def __init__(self, place: str, nbytes: int, **options: Any) -> None:
        self._client = Client(place, namespace=str(nbytes), **options)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._client.put(key, tensor)

    def hold(self, key: str) -> None:
        with self._client.get(key) as item:
            _ = item.tensor

    def look(self, key: str) -> object | None:
        item, _ = self._client.get_now(key)
        if item is not None:
            _ = item.tensor
        return item

    def load(self, key: str) -> torch.Tensor:
        with self._client.get(key) as item:
            return item.to("cpu")

    def copy(self, key: str, target: torch.Tensor) -> None:
        with self._client.get(key) as item:
            target.copy_(item.tensor)
            item.check()

    def contains(self, key: str) -> bool:
        return self._client.contains([key])[0]


class Files(Peer):
    """A safetensors file for each tensor, on tmpfs, written aside and renamed."""

    needs = ("safetensors.torch",)
    maps = True

    def __init__(self, place: str, nbytes: int) -> None:
        self._directory = Path(place) / str(nbytes)
        self._directory.mkdir(exist_ok=True)
        self._keep = FILES_BYTES // nbytes
        self._stored: deque[str] = deque()

    def put(self, key: str, tensor: torch.Tensor) -> None:
        from safetensors.torch import save_file

        aside = self._directory / f"{key}.tmp"
        save_file({"t": tensor}, aside)
        aside.rename(self._directory / key)
        self._stored.append(key)

    def tidy(self) -> None:
        while len(self._stored) > self._keep:
            (self._directory / self._stored.popleft()).unlink()

    def hold(self, key: str) -> None:
        from safetensors import safe_open

        with safe_open(self._directory / key, "pt") as file:
            file.get_slice("t")

    def look(self, key: str) -> object | None:
        from safetensors import safe_open

        if not self.contains(key):
            return None
        file: Any = safe_open(self._directory / key, "pt")
        file.get_slice("t")
        return file

    def load(self, key: str) -> torch.Tensor:
        from safetensors.torch import load_file

        tensor: torch.Tensor = load_file(self._directory / key)["t"]
        return tensor

    def contains(self, key: str) -> bool:
        return (self._directory / key).exists()


class Redis(Peer):
    needs = ("redis",)

    def __init__(self, place: str, nbytes: int) -> None:
        import redis

        warnings.filterwarnings("ignore", "The given buffer is not writable")  # it is read only
        self._prefix = f"{nbytes}/"
        self._redis = redis.Redis(unix_socket_path=place)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._redis.set(self._prefix + key, tensor.numpy().data)

    def load(self, key: str) -> torch.Tensor:
        return torch.frombuffer(self._redis.get(self._prefix + key), dtype=torch.uint8)

    def contains(self, key: str) -> bool:
        return bool(self._redis.exists(self._prefix + key))


class Store(Peer):
    """Mooncake Store over tcp."""

    needs = ("mooncake.store",)

    def __init__(self, place: str, nbytes: int) -> None:
        self._store = open_store(place, 0)
        self._prefix = f"{nbytes}/"
        self._keep = FILES_BYTES // nbytes
        self._stored: deque[str] = deque()

    def put(self, key: str, tensor: torch.Tensor) -> None:
        assert self._store.put_tensor(self._prefix + key, tensor) == 0
        self._stored.append(self._prefix + key)

    def tidy(self) -> None:
        """Remove old entries: the store evicts behind a put, and refuses one that comes sooner."""
        while len(self._stored) > self._keep:
            self._store.remove(self._stored.popleft())

    def load(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._store.get_tensor(self._prefix + key)
        return tensor

    def contains(self, key: str) -> bool:
        return bool(self._store.is_exist(self._prefix + key) == 1)


class RegisteredStore(Store):
    """The same with registered buffers on both sides."""

    def __init__(self, place: str, nbytes: int) -> None:
        super().__init__(place, nbytes)
        self._known: set[int] = set()

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._register(tensor)
        assert self._store.put_from(self._prefix + key, tensor.data_ptr(), tensor.nbytes) == 0
        self._stored.append(self._prefix + key)

    def copy(self, key: str, target: torch.Tensor) -> None:
        self._register(target)
        got = self._store.get_into(self._prefix + key, target.data_ptr(), target.nbytes)
        assert got == target.nbytes

    def _register(self, tensor: torch.Tensor) -> None:
        """Once for each buffer: the rounds come back to the same ones."""
        if tensor.data_ptr() not in self._known:
            self._known.add(tensor.data_ptr())
            self._store.register_buffer(tensor.data_ptr(), tensor.nbytes)


class LMCache(Peer):
    """LMCache's encoder-cache engine, in one process: memory, and a small disk because it must."""

    needs = ("lmcache.v1.config", "lmcache.v1.ec_engine", "lmcache.v1.metadata")
    into = False

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

    def load(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor | None = self._engine.get(key, "cpu")
        assert tensor is not None
        return tensor

    def copy(self, key: str, target: torch.Tensor) -> None:
        """The engine's own copy: it gives no other."""
        self.load(key)

    def contains(self, key: str) -> bool:
        return bool(self._engine.contains(key))


class ExampleConnector(Peer):
    """vLLM's ECExampleConnector: what its worker saves and loads, what its scheduler looks for."""

    needs = ("vllm.distributed.ec_transfer.ec_connector.example_connector", "vllm.platforms")
    maps = True

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
        while len(self._stored) > self._keep:
            shutil.rmtree(self._path / self._stored.popleft())

    def contains(self, key: str) -> bool:
        return bool(self._connector.has_cache_item(key))

    def load(self, key: str) -> torch.Tensor:
        wanted = self._example.ECExampleConnectorMetadata()
        wanted.add_mm_data(self._example.MMMeta(key, 1))
        self._connector.bind_connector_metadata(wanted)
        loaded: dict[str, torch.Tensor] = {}
        self._connector.start_load_caches(loaded)
        return loaded[key]


PEERS: dict[str, type[Peer]] = {
    ECD: Ecd,
    FILES: Files,
    REDIS: Redis,
    STORE: Store,
    ALONE: LMCache,
    EXAMPLE: ExampleConnector,
}
Make = Callable[[str, int], Peer]
WARM: dict[str, Make] = {**PEERS, STORE: RegisteredStore}
ENVIRONMENTS = Path(__file__).parents[1] / ".venvs"


def _environment_of(name: str) -> tuple[str, dict[str, str]]:
    """The interpreter that has what the peer needs, and what to add to its environment."""
    if name == ALONE:
        return str(ENVIRONMENTS / "lmcache/bin/python"), {
            "LMCACHE_LOG_LEVEL": "ERROR",
            "LMCACHE_TRACK_USAGE": "false",
        }
    if name == EXAMPLE:
        tree = ENVIRONMENTS.parent
        paths = tree / "tests/e2e/site", tree / "client", tree / "proto"
        found = os.pathsep.join(map(str, paths))
        return str(ENVIRONMENTS / "vllm-0.32.0/bin/python"), {"PYTHONPATH": found}
    return sys.executable, {}


def run_for(peer: str, module: str, function: str, *arguments: object) -> dict[str, float]:
    """Run a function of a module beside this one in the environment that the peer needs."""
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
