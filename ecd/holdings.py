"""The socket, pools, index and directories that a daemon owns before its event loop runs."""

from __future__ import annotations

import contextlib
import grp
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ecd.core.cache import DEFAULT_LIMITS
from ecd.memory.device import device_pools
from ecd.memory.disk.disk_dir import DiskDir
from ecd.memory.host import HostPool
from ecd.memory.pool_dir import PoolDir, clear_others
from ecd.memory.shared_index import SharedIndex
from ecd.node import SharedBoard
from ecd.rpc.cache.attach import AttachSocket
from ecd.rpc.cache.puts import Doorbell
from ecd.rpc.socket import OwnedSocket
from ecd.settings.config import Config
from ecd_proto.shm.barriers import has_barriers
from ecd_proto.shm.files import ATTACH_SUFFIX, DOORBELL_SUFFIX
from ecd_proto.shm.session_page import GRANTED_POOL

logger = logging.getLogger(__name__)

MAX_GID = 2**32 - 2
"""The one above stands for no change of the group (chown(2))."""

BoundSocket = TypeVar("BoundSocket", Doorbell, AttachSocket)


class StartError(Exception):
    """The daemon cannot start; the message says what to change."""


class Holdings:
    """Files, sockets and memory of one daemon, until it is closed."""

    def __init__(self, config: Config, incarnation: str, cold: bool) -> None:
        """`cold`: nothing of the last daemon is taken over.

        Raises SocketError, PoolError and StartError.
        """
        self.gid = _gid(config.group)
        self.keep = False  # the pool, for the next daemon
        self.has_served = False
        self._incarnation = incarnation
        with contextlib.ExitStack() as opened:
            self.socket = OwnedSocket(config.address)
            opened.callback(self.socket.close)
            # Before there are files that a failure would leave.
            devices = device_pools(config.device_pool_bytes, config.devices, GRANTED_POOL + 1)
            self.devices = devices
            for device in devices.values():
                opened.callback(device.close)
            self.disk_dir: DiskDir | None = None  # locked until the process ends
            if config.disk_pool_bytes:
                self.disk_dir = DiskDir(config.disk_dir, config.name)
            clear_others(config.shm_dir, config.name)
            self.pool = HostPool(
                PoolDir(config.shm_dir, config.name, self.gid),
                incarnation,
                config.host_pool_bytes,
                # Without an index nothing can be recovered.
                cold or config.warm_restart is False or not has_barriers(),
            )
            self.pools = {GRANTED_POOL: self.pool}
            opened.callback(lambda: self.pool.close(self.keep, self.has_served))
            index = self._make_index()
            if index is not None:
                opened.callback(index.close)
                index.note_populated(self.pool.populated_bytes)
            doorbell = attach = None
            if index is not None:
                doorbell = self._bind(Doorbell, DOORBELL_SUFFIX, "Every put is a call")
                attach = self._bind(AttachSocket, ATTACH_SUFFIX, "No client copies by DMA")
            if attach is None and self.devices:
                logger.warning("no device pool: clients attach for it, and cannot")
                self.devices = {}
            self.board, self.attach = SharedBoard(index, doorbell), attach
            for bound in (doorbell, attach):
                if bound is not None:
                    opened.callback(bound.close)
            self._opened = opened.pop_all()

    def begin_serving(self) -> None:
        """Record, before the first client maps it, that the next daemon may take the whole pool."""
        if self.board.index is not None:
            self.board.index.note_populated(self.pool.nbytes)
        self.has_served = True

    def close(self) -> None:
        """Release all of it, in reverse order."""
        self._opened.close()

    def _make_index(self) -> SharedIndex | None:
        """The index; None if clients have to call for everything. Raises PoolError."""
        if not has_barriers():
            logger.warning(
                "this kernel, or what confines this process, has no membarrier(2): every get "
                "is a call, which takes some 0.5 ms"
            )
            return None
        return SharedIndex(
            self.pool.directory,
            self._incarnation,
            sum(pool.nbytes for pool in self.pools.values())
            + sum(pool.nbytes for pool in self.devices.values()),
            DEFAULT_LIMITS.sessions,
            self.pool.generation,
        )

    def _bind(
        self, make: Callable[[Path], BoundSocket], suffix: str, without: str
    ) -> BoundSocket | None:
        """Bind a socket in the pool's directory. None: there is none, and `without` is logged."""
        path = self.pool.directory.path / f"{self._incarnation}{suffix}"
        try:
            bound = make(path)
            self.pool.directory.share(path.name)
            return bound
        except OSError as error:
            logger.warning("no socket at %s: %s. %s", path, error, without)
            return None


def _gid(group: str | None) -> int | None:
    if group is None:
        return None
    if group.isdecimal() and int(group) <= MAX_GID:
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise StartError(f"no such group: {group} (ECD_GROUP or --group)") from None
