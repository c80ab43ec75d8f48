"""Copies of items for vLLM's encoder cache, from the memory that the scheduler's role holds.

On a GPU a copy is only queued: the step that needs it waits on the GPU, and no step waits on the
host. The worker holds the entry itself meanwhile, so that the load is over for the scheduler at
once; where it cannot, the scheduler hears of the load in the first step that finds the copy done.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.device.completions import under_way
from ecd_client.device.copies import Copies, for_device
from ecd_client.device.pinned import Pinning
from ecd_client.errors import DeviceBusy, DeviceError, EcdError
from ecd_client.item import Handle, Item
from ecd_client.pools import address_of
from ecd_client.tensors import load as start_load
from ecd_client.tensors import private_copy
from ecd_client.vllm.base.stats import EcdStats
from ecd_client.vllm.base.transfer import Load
from ecd_proto.contract import shown
from ecd_proto.mapped_file import MappedFile

if TYPE_CHECKING:
    from ecd_client.device.driver import Event

logger = init_logger(f"vllm.{__name__}")

MAX_INCARNATIONS = 2
"""Incarnations whose pools stay mapped: the daemon's, and the one before."""


class Loader:
    """Loads items onto this worker's device, and remembers which loads to report as done."""

    def __init__(
        self, client: Client, timeout_s: float, stats: EcdStats, device_views: bool = False
    ) -> None:
        """`timeout_s` bounds the call for an item whose lease ran out before its load.

        With `device_views` a copy in the device pool is used where it lies.
        """
        self._client, self._timeout_s, self._stats = client, timeout_s, stats
        self._device_views = device_views
        self._pools: dict[tuple[str, str], MappedFile] = {}  # by incarnation and path
        self._done: list[int] = []
        self._under_way: list[tuple[Event, int]] = []
        self._pinning = Pinning()
        self._has_failed = False  # so that torch makes the copies

    @cached_property
    def device(self) -> torch.device:
        """The device of this worker's encoder cache."""
        return _device()

    def pin(self) -> None:
        """Pin the pool in the background, where this device is a GPU."""
        with contextlib.suppress(DeviceError):  # the first load says what is wrong
            self._client.pin(self.device)

    def load(self, loads: Collection[Load], into: dict[str, torch.Tensor]) -> None:
        """Put the items on this device, whole for what is queued next, under their identifiers.

        On a GPU their copies end as one. `take_done` says when they are done. Raises RuntimeError
        where an item is gone; those before it are there.
        """
        if not loads:
            return
        copies, marks = self._copies(), (len(self._done), len(self._under_way))
        try:
            with contextlib.nullcontext() if copies is None else copies.together():
                for load in loads:
                    into[load.identifier] = self._load(load)
        except DeviceError as error:  # no copy is under way: each once more by itself
            logger.debug("ecd: the loads of a step had no common end: %s", error)
            del self._done[marks[0] :], self._under_way[marks[1] :]
            for load in loads:
                into[load.identifier] = self._load(load)

    def _copies(self) -> Copies | None:
        """Copies to this device. None: torch makes them, or there are none for now."""
        with contextlib.suppress(DeviceError):  # the first load says what is wrong
            return None if self._has_failed else for_device(self.device)
        return None

    def _load(self, load: Load) -> torch.Tensor:
        """Load one item. Raises RuntimeError where it is gone."""
        if not self._has_failed:
            try:
                copies = for_device(self.device)
                if copies is not None:
                    return self._queue(load, copies)
            except DeviceBusy:
                pass
            except DeviceError as error:  # torch will say the same, if the device is lost
                self._has_failed = True
                self._stats.count("copy_failures")
                logger.warning("ecd: copies are made by torch from now on: %s", error)
            except OSError:
                pass  # its pool cannot be mapped
        copy = self._load_leased(load)
        self.note_done(load.id)
        return copy

    def note_done(self, load: int) -> None:
        """Have the next `take_done` name a load that needs the scheduler's hold no more."""
        self._done.append(load)

    def take_done(self) -> list[int]:
        """The loads finished since the last step, without waiting."""
        if self.device.type == "cuda":
            self._note_pinning()
        if self._under_way:
            left = set(under_way(over for over, _ in self._under_way))
            self._done += [load for over, load in self._under_way if over not in left]
            self._under_way = [each for each in self._under_way if each[0] in left]
        done, self._done = self._done, []
        return done

    # -- ways to load --------------------------------------------------------------------------

    def _queue(self, load: Load, copies: Copies) -> torch.Tensor:
        """Queue a copy. Raises DeviceError, and OSError where the item's pool cannot be mapped."""
        handle = load.handle
        held = self._client.hold(load.identifier, handle)
        if held is not None:
            with held:  # until the copy is over
                loaded = self._viewed(held) if self._device_views else None
                if loaded is None:
                    loaded = held.to(self.device, non_blocking=True)
                if held.was_near:
                    self._stats.count("device_loads")
            self.note_done(load.id)
            return loaded
        view = self._view(handle)
        loads: list[Event] = []
        parts = [(address_of(view), view.nbytes)] if view.nbytes else []
        copy = start_load(parts, handle.dtype, handle.shape, copies, loads.append)
        [over] = loads
        if handle.expires_s == inf:  # the scheduler's pin, which outlasts the copy
            self._under_way.append((over, load.id))
            return copy
        over.wait()
        if clock.now_s() >= handle.expires_s:
            copy = self._load_anew(load, "its lease may have run out before this step")
        self.note_done(load.id)
        return copy

    def _viewed(self, item: Item) -> torch.Tensor | None:
        """A view of the item's copy in the device pool, if there is one."""
        try:
            return item.device_view(self.device)
        except Exception as error:
            self._device_views = False
            logger.warning("ecd: copies in the device pool are not used in place: %s", error)
            return None

    def _load_leased(self, load: Load) -> torch.Tensor:
        """Copy while the scheduler's lease holds, and look at the clock after that."""
        handle = load.handle
        try:
            copy = private_copy(self._view(handle), handle.dtype, handle.shape, self.device)
            if clock.now_s() < handle.expires_s:
                return copy
            cause = "its lease may have run out before this step"
        except OSError as error:
            cause = f"its pool cannot be mapped: {error}"
        return self._load_anew(load, cause)

    def _load_anew(self, load: Load, cause: str) -> torch.Tensor:
        """Get the item once more: a lease of our own proves what the scheduler may have renewed.

        Raises RuntimeError.
        """
        self._stats.count("reloads")
        name = shown(load.identifier)
        try:
            item = self._client.get(load.identifier, self._timeout_s, is_use=False)
        except EcdError as error:
            raise RuntimeError(f"ecd: {name} was promised, but {cause}; {error}") from error
        handle = load.handle
        if item is None or item.shape != handle.shape or item.dtype != handle.dtype:
            raise RuntimeError(f"ecd: {name} was promised, but {cause} and it is gone")
        with item:
            if not self._has_failed:
                with contextlib.suppress(DeviceError):
                    return item.to(self.device, non_blocking=True)
            copy = private_copy(item.view, handle.dtype, handle.shape, self.device)
            item.check()
            return copy

    # -- memory --------------------------------------------------------------------------------

    def _view(self, handle: Handle) -> memoryview:
        """The item's bytes. Raises OSError."""
        pool = self._pool(handle)
        view = pool.view(handle.offset, handle.nbytes)
        pool.populate_once(handle.offset, handle.nbytes)
        return view

    def _pool(self, handle: Handle) -> MappedFile:
        place = handle.incarnation, handle.pool_path
        pool = self._pools.get(place)
        if pool is None:
            try:
                fd = os.open(handle.pool_path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # the daemon was restarted: the scheduler still has it open
                fd = os.open(handle.pool_fd_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                pool = self._pools[place] = MappedFile(fd, handle.pool_bytes, writable=False)
            finally:
                os.close(fd)
            incarnations = list(dict.fromkeys(incarnation for incarnation, _ in self._pools))
            for left in incarnations[:-MAX_INCARNATIONS]:
                self._pools = {at: each for at, each in self._pools.items() if at[0] != left}
        return pool

    def _note_pinning(self) -> None:
        """Count the pinned bytes and the time, or a refusal, once for each pool."""
        pinning = self._client.pinning
        if pinning == self._pinning:
            return
        self._pinning = pinning
        if pinning.failure is not None:
            self._stats.count("pin_failures")
        if pinning.nbytes:
            self._stats.count("pinned_bytes", pinning.nbytes)
            self._stats.count("pin_ms", round(1000 * pinning.took_s))
            logger.info("ecd: %d MiB pinned in %.2f s", pinning.nbytes >> 20, pinning.took_s)


def _device() -> torch.device:
    """The device of this worker's encoder cache."""
    from vllm.platforms import current_platform

    device: Any = current_platform.device_type
    if current_platform.is_cuda_alike():
        return torch.device(f"{device}:{current_platform.current_device()}")
    return torch.device(device)
