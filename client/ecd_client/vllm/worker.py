"""The worker's role: copy leased extents into vLLM's encoder cache, and its outputs into ecd."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict, deque
from concurrent.futures import Future, wait
from time import monotonic
from typing import Any

import torch
from vllm.logger import init_logger

from ecd_client.client import Client
from ecd_client.errors import DaemonUnavailable, EcdError
from ecd_client.tensors import private_copy
from ecd_client.vllm.settings import Settings
from ecd_client.vllm.stats import EcdStats
from ecd_client.vllm.transfer import Load
from ecd_proto.mapping import Mapping

logger = init_logger(f"vllm.{__name__}")

MAX_SAVES = 128
MAX_SAVING_BYTES = 1 << 30
"""Encoder outputs kept alive until they are copied out; what comes beyond is not stored."""
MARK: Any = object()
"""A key in vLLM's encoder cache, which is emptied as a whole only when weights change.

It is no string, so that no client can name it.
"""
SEEN_WITHIN_S = 0.1
"""How long a step waits for what it saved to be seen where it will lie."""
MAX_ORIGINS = 1 << 14
"""Items of which it is remembered where they came from, for when they have to be stored again."""
MAX_POOLS = 2
"""Pools kept mapped: the daemon's, and that of its life before."""


class WorkerRole:
    """One per worker process; called from its model runner's thread only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = Client(
            settings.address,
            name="vllm worker",
            connect_timeout=0.0,
            prefault=True,
        )
        self._stats = EcdStats()
        self._pools: OrderedDict[str, Mapping] = OrderedDict()
        self._loaded: set[str] = set()
        self._saves: deque[tuple[str, Future[bool], int]] = deque()
        self._saving_bytes = 0
        self._origins: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._is_answered = True  # the last save that was waited for
        self._encoding_since_s = monotonic()
        self._rank: int | None = None
        self._device: torch.device | None = None
        self._namespace: str | None = None
        self._move = -1
        self._marked = -1  # the move for which MARK was put there
        self.forgotten = -1
        """The move since which the encoder cache was emptied, unknown to the scheduler; or -1."""

    def close(self) -> None:
        self._client.close()

    def begin_step(self, namespace: str | None, move: int) -> None:
        """What is encoded next is encoded from now on, and stored in this namespace, if in any.

        `move` is another number whenever weights may be others, or are known again.
        """
        self._encoding_since_s = monotonic()
        if namespace is not None:
            self._client.namespace = namespace
        if move != self._move:
            self._move, self.forgotten = move, -1
        self._namespace = namespace

    def look_at(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        """See whether the cache was emptied, which says that the weights changed.

        Where the scheduler knows of it there was a move. Otherwise nothing is stored until there
        is one.
        """
        if self._move != self._marked:
            self._marked = self._move
            encoder_cache[MARK] = torch.empty(0)
        self.forgotten = -1 if MARK in encoder_cache else self._move

    # -- loading -------------------------------------------------------------------------------

    def load(self, loads: list[Load], encoder_cache: dict[str, torch.Tensor]) -> None:
        """Put every item into `encoder_cache`, complete when this returns."""
        self.look_at(encoder_cache)
        for load in loads:
            if load.identifier not in encoder_cache:
                encoder_cache[load.identifier] = self._copy(load)
                _, cost_s = self._origins.get(load.identifier, (-1, 0.0))
                self._note_origin(load.identifier, cost_s)
                self._stats.count("loads")
                self._stats.count("loaded_bytes", load.nbytes)
            self._loaded.add(f"{self._tensor_parallel_rank()}/{load.id}")
        self._encoding_since_s = monotonic()

    def take_loaded(self) -> set[str]:
        loaded, self._loaded = self._loaded, set()
        return loaded

    def _copy(self, load: Load) -> torch.Tensor:
        device = self._device = self._device or _device()
        try:
            view = self._pool(load).view(load.offset, load.nbytes)
            copy = private_copy(view, load.dtype, load.shape, device)
            if monotonic() < load.expires_s:
                return copy
            cause = "its lease may have run out before this step"
        except OSError as error:
            cause = f"its pool cannot be mapped: {error}"
        # The scheduler may well have renewed the lease; a lease of our own is proof.
        self._stats.count("reloads")
        try:
            item = self._client.get(load.identifier, self._settings.load_timeout_s)
        except EcdError as error:
            raise RuntimeError(
                f"ecd: {load.identifier} was promised, but {cause}; {error}"
            ) from error
        if item is None or item.shape != load.shape or item.dtype != load.dtype:
            raise RuntimeError(f"ecd: {load.identifier} was promised, but {cause} and it is gone")
        with item:
            return item.to(device)

    def _pool(self, load: Load) -> Mapping:
        pool = self._pools.get(load.incarnation)
        if pool is None:
            try:
                fd = os.open(load.pool_path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # the daemon was restarted: the scheduler still has it open
                fd = os.open(load.pool_fd_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                pool = self._pools[load.incarnation] = Mapping(fd, load.pool_bytes, writable=False)
            finally:
                os.close(fd)
            pool.populate_soon()
            while len(self._pools) > MAX_POOLS:
                self._pools.popitem(last=False)
        return pool

    # -- saving --------------------------------------------------------------------------------

    def save(self, identifier: str, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Store one encoder output; what takes long is done on the side, and the step goes on."""
        self.look_at(encoder_cache)
        # vLLM tells nobody what an item took: of those encoded together the first is charged all.
        # On a GPU it is the time to launch the work, so at most what the work took.
        now_s = monotonic()
        cost_s, self._encoding_since_s = now_s - self._encoding_since_s, now_s
        self._note_origin(identifier, cost_s)
        self._save(identifier, encoder_cache[identifier], cost_s)

    def save_again(self, identifiers: list[str], encoder_cache: dict[str, torch.Tensor]) -> None:
        """Store those that this engine still has, of these weights: nobody encodes them now."""
        for identifier in identifiers:
            move, cost_s = self._origins.get(identifier, (-1, 0.0))
            if move == self._move and identifier in encoder_cache:
                self._save(identifier, encoder_cache[identifier], cost_s)

    def keep(self, identifiers: list[str], encoder_cache: dict[str, torch.Tensor]) -> None:
        """Have what ecd had, so that it can be stored again: the scheduler takes it for held."""
        for identifier in identifiers:
            with contextlib.suppress(EcdError):
                item, _ = self._client.get_now(identifier)
                if item is not None:
                    with item:
                        self._device = self._device or _device()
                        encoder_cache[identifier] = item.to(self._device)
                        self._note_origin(identifier, item.cost_s)

    def _note_origin(self, identifier: str, cost_s: float) -> None:
        if self.forgotten >= 0:  # nobody knows of which weights it is
            self._origins.pop(identifier, None)
            return
        self._origins[identifier] = self._move, cost_s
        while len(self._origins) > MAX_ORIGINS:
            self._origins.popitem(last=False)

    def wait_seen(self) -> None:
        """Let the scheduler see, when it answers for this step's requests, what they stored.

        Most saves go to memory that was granted ahead, and are seen at once. For the others the
        daemon is asked, and is waited for unless it did not answer the last time.
        """
        deadline_s = monotonic() + (SEEN_WITHIN_S if self._is_answered else 0.0)
        for identifier, future, _ in self._saves:
            with contextlib.suppress(DaemonUnavailable):
                if self._client.is_shown(identifier):
                    continue
            done, _ = wait([future], max(0.0, deadline_s - monotonic()))
            self._is_answered = bool(done)

    def _save(self, identifier: str, output: torch.Tensor, cost_s: float) -> None:
        if (
            self._namespace is None
            or self._tensor_parallel_rank() != 0
            or not self._settings.shares(identifier)
        ):
            return
        self._reap()
        if self.forgotten >= 0:
            self._drop(identifier, "weights may have changed")
            return
        nbytes = output.numel() * output.element_size()
        if len(self._saves) >= MAX_SAVES or self._saving_bytes + nbytes > MAX_SAVING_BYTES:
            self._drop(identifier, "too many are on the way")
            return
        try:
            future = self._client.put_async(identifier, output, cost=cost_s)
        except EcdError as error:
            self._drop(identifier, error)
            return
        self._saves.append((identifier, future, nbytes))
        self._saving_bytes += nbytes

    def take_stats(self) -> EcdStats:
        self._reap()
        return self._stats.take()

    def _reap(self) -> None:
        """Count the saves that are over."""
        while self._saves and self._saves[0][1].done():
            identifier, future, nbytes = self._saves.popleft()
            self._saving_bytes -= nbytes
            error = future.exception()
            if error is not None:
                self._drop(identifier, error)
            elif future.result():
                self._stats.count("saves")
                self._stats.count("saved_bytes", nbytes)
            else:
                self._stats.count("duplicates")

    def _drop(self, identifier: str, cause: object) -> None:
        self._stats.count("dropped_saves")
        logger.debug("ecd: %s is not stored: %s", identifier, cause)

    def _tensor_parallel_rank(self) -> int:
        if self._rank is None:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            self._rank = get_tensor_model_parallel_rank()
        return self._rank


def _device() -> torch.device:
    """Where this worker's encoder cache lies."""
    from vllm.platforms import current_platform

    device: Any = current_platform.device_type
    if current_platform.is_cuda_alike():
        return torch.device(f"{device}:{current_platform.current_device()}")
    return torch.device(device)
