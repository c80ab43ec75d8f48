"""One session's DMA: the daemon learns of it before the first copy, and the pools are pinned."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ecd_client import clock
from ecd_client.device import accelerator
from ecd_client.device.attach import attach
from ecd_client.errors import DeviceError, EcdError
from ecd_client.shared.board import MappedBoard
from ecd_proto.shm.session_page import DMA, DMA_OUTLASTS, DMA_WORD, PAGE_BYTES, PINNED_WORD

if TYPE_CHECKING:
    from ecd_client.device.pool import DevicePool
    from ecd_client.pools import MappedPool
    from ecd_proto.v1 import cache_pb2 as pb

logger = logging.getLogger(__name__)

NEAR_AGAIN_S, NEAR_WAIT_S = 1.0, 75.0
"""Between two looks for a device pool whose memory the daemon waits for, and how long it may."""


def is_wanted() -> bool:
    """Whether `ECD_PIN` allows pinning: `auto`, the default, or `off`."""
    return os.environ.get("ECD_PIN", "auto").strip().lower() not in ("off", "0", "false", "no")


def mps_place() -> str | None:
    """The directory of the server of CUDA's MPS (Multi-Process Service) that processes use here.

    It has the work of all of them on the device, also of those that have ended.
    """
    place = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return place if os.path.exists(os.path.join(place, "control")) else None


class SessionDma:
    """Lets one session's copies go to and from pinned memory.

    A process that is killed leaves copies that its GPU goes on with. So the daemon takes a
    descriptor of the process as the session attaches, and a word in the session's page says from
    the first copy into the pool on that there may be such copies; docs/gpu-rules.md has the rule.
    """

    def __init__(
        self,
        attach_path: str,
        token: str,
        board: MappedBoard,
        devices: Mapping[str, pb.PoolFile],
        uid: int,
    ) -> None:
        """`devices` are the device pools that the daemon named, by their GPUs' UUIDs.

        `uid` is the daemon's user.
        """
        self._attach_path, self._token, self._uid = attach_path, token, uid
        self._devices = devices
        self._words = board.page.view(0, PAGE_BYTES).cast("Q")
        self._lock = threading.RLock()  # which a garbage-collected item may take within
        self._has_begun = False
        self._ended = threading.Event()
        self._has_written = False
        """Whether the page announces copies. Otherwise it may be another session's by now."""
        self._word = DMA_OUTLASTS if _has_forked or mps_place() else DMA
        _all.add(self)
        self._pools: tuple[MappedPool, ...] = ()
        self.may_write = False
        """Whether the daemon knows of this process, so that copies into pinned memory may begin."""
        self.near: DevicePool | None = None
        """The device pool of the process's GPU, once it is mapped."""

    def add(self, pools: Iterable[MappedPool]) -> None:
        """Name the session's pools, once, before `begin`."""
        self._pools = tuple(pools)

    def begin(self, device: int) -> None:
        """Attach, and pin the pools if that is wanted, on a thread; later calls do nothing."""
        if self._has_begun:
            return
        with self._lock:
            if self._has_begun:
                return
            self._has_begun = True
        thread = threading.Thread(target=self._run, args=(device,), name="ecd-attach", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("copies from the GPU are not pinned: %s", error)

    def _run(self, device: int) -> None:
        has_near = True
        try:
            fds = self._attach()
            self.may_write = True
            has_near = self._map(fds, device)
        except (OSError, EcdError) as error:
            logger.warning("copies from the GPU are not pinned: the daemon refused: %s", error)
        if is_wanted():
            self._pin(device)
        if not has_near:
            self._map_late(device)

    def _attach(self) -> dict[int, int]:
        return attach(self._attach_path, self._token, uid=self._uid)

    def _pin(self, device: int) -> None:
        for pool in self._pools:
            try:
                pool.pin(device)
            except (OSError, RuntimeError) as error:  # the latter: no more threads
                logger.warning("a pool cannot be pinned: %s", error)
        pinned_bytes = sum(pool.wait_pinned() for pool in self._pools)
        with self._lock:  # after the end the page is another session's
            if not self._ended.is_set():
                self._has_written = True
                self._words[PINNED_WORD] = pinned_bytes

    def _map_late(self, device: int) -> None:
        """Map the pool of this GPU once the daemon has its memory."""
        until_s = clock.now_s() + NEAR_WAIT_S
        with contextlib.suppress(OSError, EcdError):  # the session is over, most likely
            while clock.now_s() < until_s and not self._ended.wait(NEAR_AGAIN_S):
                if self._map(self._attach(), device):
                    return

    def _map(self, fds: dict[int, int], device: int) -> bool:
        """Map the pool of this GPU, of those whose descriptors came, and close all of these.

        False: the daemon has this pool, and no memory yet.
        """
        try:
            if not self._devices:
                return True
            from ecd_client.device import copies, driver
            from ecd_client.device.pool import DevicePool

            uuid = driver.uuid_of(device)
            file = self._devices.get(uuid)
            if file is None:
                logger.info("the daemon has no device pool on this process's %s", uuid)
                return True
            if file.pool not in fds:
                return False
            own = copies.for_number(device)
            if own is None:
                return True
            near = DevicePool(file.pool, file.nbytes, fds.pop(file.pool), own)
            with self._lock:
                is_late = self._ended.is_set()
                if not is_late:
                    self.near = near
            if is_late:
                near.close()
        except DeviceError as error:
            logger.warning("the device pool is not used: %s", error)
        finally:
            for fd in fds.values():
                os.close(fd)
        return True

    def note_write(self) -> None:
        """Announce that copies by DMA into the pool may be under way, until `end`."""
        self._has_written = True
        if self._words[DMA_WORD] != self._word:
            with self._lock:
                self._words[DMA_WORD] = self._word

    def note_fork(self) -> None:
        """Announce that copies may outlast this process, as a child has the device's files."""
        with self._lock:
            self._word = DMA_OUTLASTS
            if self._has_written and self._words[DMA_WORD] and not self._ended.is_set():
                self._words[DMA_WORD] = DMA_OUTLASTS

    def end(self) -> None:
        """Announce that no copy is under way, and none will be."""
        with self._lock:
            self._ended.set()
            self._pools = ()  # which refer to this object, and would keep each other mapped
            near, self.near = self.near, None
            if self._has_written:
                self._words[PINNED_WORD] = self._words[DMA_WORD] = 0
        if near is not None:
            near.close()

    def cut_off(self) -> None:
        """In a forked child: the session is the parent's."""
        self._lock = threading.RLock()
        self._has_begun, self._ended = True, threading.Event()
        near, self.near = self.near, None
        if near is not None:
            near.cut_off()


_all: weakref.WeakSet[SessionDma] = weakref.WeakSet()
_has_forked = False
"""Whether a child may have the files of this process's device, until it begins another program."""


def _before_fork() -> None:
    global _has_forked
    if accelerator.may_have_context():
        _has_forked = True
        for dma in list(_all):
            dma.note_fork()


def _in_child() -> None:
    global _has_forked
    _has_forked = False
    _all.clear()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
