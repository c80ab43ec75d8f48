"""Mooncake's TransferEngine, as configured, and the memory that other nodes may read.

Mooncake's behaviour was found by experiment; docs/mooncake.md has the reason for each line that
looks odd.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

from ecd.cluster.transport.handshake import describe
from ecd.cluster.transport.reads import Reads
from ecd.cluster.transport.transfers import LANES, Progress
from ecd_proto.mapped_file import MappedFile

logger = logging.getLogger(__name__)

VARIABLES = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_LANES_PER_PEER": str(LANES),
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "2",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
"""ecd's defaults for Mooncake. The environment comes before them."""
OWN_S = 30.0
"""How long a daemon that starts waits for its own engine: the machine may be busy."""
_ended: list[ReadEngine] = []
"""Engines that were closed, with the memory that peers may still read."""
_OVER = {1: Progress.ARRIVED, -1: Progress.FAILED}
"""Mooncake's statuses of a transfer that is over; 0 (under way) and -2 (late) are not."""


class EngineError(Exception):
    """The engine cannot run as configured; the message says what to change."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a TransferEngine; `ports` is a range, "18200-18231"."""

    host: str
    protocol: str
    ports: str
    device: str = ""


class MooncakeTransfers:
    """The transfers of one TransferEngine."""

    def __init__(self, mooncake: Any) -> None:
        self._mooncake = mooncake

    def submit(self, engine: str, target: int, source: int, nbytes: int) -> int:
        """Begin one transfer. The engine reports the first entry's status for a whole batch, so
        each batch has one entry.
        """
        try:
            transfer: int = self._mooncake.batch_transfer_async_read(
                engine, [target], [source], [nbytes]
            )
        except Exception:  # the transfer fails as one that was begun does
            logger.exception("Mooncake does not take a read from %s", engine)
            return 0
        return transfer

    def progress(self, transfer: int) -> Progress:
        """The state of a transfer. Asking about a transfer that is over crashes the process."""
        if not transfer:
            return Progress.FAILED
        return _OVER.get(self._mooncake.transfer_check_status(transfer), Progress.UNDER_WAY)


class ReadEngine:
    """One TransferEngine, and its `reads`, on the event loop that made this object."""

    def __init__(self, settings: EngineSettings, identity: bytes) -> None:
        """Start the engine. Peers read `identity` to know whose memory they have read.

        Raises EngineError. Blocks for some milliseconds.
        """
        self.protocol = ""
        self._engine = start_transfer_engine(settings)
        self.endpoint = f"{settings.host}:{self._engine.get_rpc_port()}"
        self._transfers = MooncakeTransfers(self._engine)
        self.reads = Reads(self._transfers)
        is_tcp = settings.protocol == "tcp"
        # A device registers only memory that it may write to, and reads only into such memory.
        page = MappedFile.of_memory(os.sysconf("SC_PAGESIZE"), identity, writable=not is_tcp)
        self.identity_address = page.address
        self._registered = [page] if is_tcp else [page, self.reads.scratch]

    async def verify(self, protocol: str) -> None:
        """Start reading, if Mooncake installed this protocol. Raises EngineError.

        Mooncake falls back to tcp silently.
        """
        self.protocol = str((await self._describe()).get("protocol"))
        if self.protocol != protocol:
            raise EngineError(
                f"ECD_PROTOCOL is {protocol}, but Mooncake installed {self.protocol}: this machine "
                f"has no device for {protocol}, or this build of Mooncake does not know it. See "
                "ECD_DEVICE, or set ECD_PROTOCOL=tcp"
            )
        self.reads.start()

    async def register(self, *pools: MappedFile) -> None:
        """Let other nodes read the pools and this node's identity. Raises EngineError.

        Registration runs in a thread: a device pins whole pools, for some seconds if large.
        """
        self._registered += pools  # keeps them mapped as long as peers may read them
        addresses = [memory.address for memory in self._registered]
        sizes = [memory.nbytes for memory in self._registered]
        loop = asyncio.get_running_loop()
        # `register_memory` would hold the interpreter's lock. This call does not, but it returns 0
        # even where a device refuses.
        register = self._engine.batch_register_memory
        failed = await loop.run_in_executor(None, register, addresses, sizes)
        told = {buffer["addr"] for buffer in (await self._describe()).get("buffers") or ()}
        if failed or not told.issuperset(addresses):
            raise EngineError(
                f"Mooncake does not register {sum(sizes)} bytes; memlock may be too low"
            )

    async def _describe(self) -> dict[str, Any]:
        try:
            return await describe(self.endpoint, OWN_S)
        except OSError as error:
            raise EngineError(f"Mooncake does not answer on {self.endpoint}: {error}") from None

    def close(self) -> None:
        """Read no more. Over tcp, transfers and peers' reads go on until the process ends.

        A device might write for longer than the kernel keeps the lock of the pool.
        """
        self.reads.close()
        if self.protocol == "tcp":
            _ended.append(self)
        else:
            del self._transfers._mooncake, self._engine


def end_process(code: int) -> None:
    """End the process with this exit code if it had an engine.

    An engine is destroyed in a second, or in a minute if a peer stands still, during which no other
    thread of Python runs. What ends with the process needs none of it.
    """
    if _ended:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start_transfer_engine(settings: EngineSettings) -> Any:
    """Start Mooncake's TransferEngine with the variables that ecd sets. Raises EngineError."""
    first, last = settings.ports.split("-")
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ.update(MC_MIN_RPC_PORT=first, MC_MAX_RPC_PORT=last)
    if settings.protocol == "tcp":  # else Mooncake would use an RDMA device if it finds one
        os.environ["MC_FORCE_TCP"] = "1"
    try:
        from mooncake.engine import TransferEngine  # reads the variables
    except ImportError as error:
        raise EngineError(
            f"Mooncake cannot be loaded: {error}. Install ecd with [cpu] or [cuda], and Debian's "
            "libibverbs1, libnuma1 and libcurl4; [cuda] needs ibverbs-providers too"
        ) from None
    engine = TransferEngine()
    host, protocol = settings.host, settings.protocol
    if engine.initialize(host, "P2PHANDSHAKE", protocol, settings.device) != 0:
        raise EngineError(
            f"Mooncake cannot start {protocol} on {host}: no port of ECD_ENGINE_PORTS "
            f"({settings.ports}) is free, or ECD_DEVICE is not a device of this machine"
        )
    return engine
