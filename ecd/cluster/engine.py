"""Mooncake's TransferEngine, as configured, and the memory that other nodes may read.

What it does and does not do was found by experiment; where a line here looks odd, the reason is
in docs/mooncake.md.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping as MappingOf
from typing import Any

from ecd.cluster.handshake import describe
from ecd.cluster.lineup import LANES
from ecd.cluster.reads import Reads
from ecd_proto.mapping import Mapping

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
"""What we ask of Mooncake unless the settings, or the environment, say otherwise."""


class EngineError(Exception):
    """The engine cannot be had as configured; the message says what to change."""


class Engine:
    """One TransferEngine, and the `reads` that it makes, on the event loop that made it."""

    def __init__(
        self,
        host: str,
        protocol: str,
        device: str,
        ports: str,
        variables: MappingOf[str, str],
        identity: bytes,
    ) -> None:
        """Start the engine; `identity` is what others read to know whose memory they have read.

        Raises EngineError. Blocking, for some milliseconds.
        """
        self.protocol = ""
        self._engine = start_transfer_engine(host, protocol, device, ports, variables)
        self.endpoint = f"{host}:{self._engine.get_rpc_port()}"
        self.reads = Reads(self._engine)
        is_tcp = protocol == "tcp"
        # Devices register only what they may write to, and read only into what is registered.
        page = Mapping.of_memory(os.sysconf("SC_PAGESIZE"), identity, writable=not is_tcp)
        self.identity_address = page.address
        self._registered = [page] if is_tcp else [page, self.reads.scratch]

    async def verify(self, protocol: str) -> None:
        """Start reading, if what Mooncake installed is what was asked for. Raises EngineError.

        Mooncake falls back to tcp without a word.
        """
        self.protocol = str((await self._describe()).get("protocol"))
        if self.protocol != protocol:
            raise EngineError(
                f"ECD_PROTOCOL is {protocol}, but Mooncake installed {self.protocol}: this machine "
                f"has no device for {protocol}, or this build of Mooncake does not know it. See "
                "ECD_DEVICE, or set ECD_PROTOCOL=tcp"
            )
        self.reads.start()

    async def register(self, pool: Mapping) -> None:
        """Let other nodes read the pool, and whose it is. Raises EngineError.

        In a thread, as a device pins all of it: some seconds for a large one.
        """
        self._registered.append(pool)  # stays mapped as long as others may read it
        addresses = [memory.address for memory in self._registered]
        sizes = [memory.nbytes for memory in self._registered]
        loop = asyncio.get_running_loop()
        # `register_memory` would hold the interpreter. This does not, but returns 0 as well where a
        # device refuses.
        register = self._engine.batch_register_memory
        failed = await loop.run_in_executor(None, register, addresses, sizes)
        told = {buffer["addr"] for buffer in (await self._describe()).get("buffers") or ()}
        if failed or not told.issuperset(addresses):
            raise EngineError(
                f"Mooncake does not register {sum(sizes)} bytes; memlock may be too low"
            )

    async def _describe(self) -> dict[str, Any]:
        try:
            return await describe(self.endpoint)
        except OSError as error:
            raise EngineError(f"Mooncake does not answer on {self.endpoint}: {error}") from None

    def close(self) -> None:
        """Stop reading. Readings that are open stay open."""
        self.reads.close()
        del self._engine


def start_transfer_engine(
    host: str, protocol: str, device: str, ports: str, variables: MappingOf[str, str]
) -> Any:
    """Mooncake's TransferEngine with the variables that ecd sets. Raises EngineError."""
    first, last = ports.split("-")
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ.update(MC_MIN_RPC_PORT=first, MC_MAX_RPC_PORT=last)
    if protocol == "tcp":  # or an RDMA device that is there would be used
        os.environ["MC_FORCE_TCP"] = "1"
    os.environ.update(variables)
    try:
        from mooncake.engine import TransferEngine  # reads the variables
    except ImportError as error:
        raise EngineError(
            f"Mooncake cannot be loaded: {error}. Install ecd[cpu] or ecd[cuda], and Debian's "
            "libibverbs1"
        ) from None
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
        raise EngineError(
            f"Mooncake cannot start {protocol} on {host}: no port of ECD_ENGINE_PORTS ({ports}) is "
            "free, or ECD_DEVICE is not a device of this machine"
        )
    return engine
