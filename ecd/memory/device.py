"""Device pools: memory of GPUs that the daemon owns, and that clients alone map and use.

The daemon creates it and keeps it by a descriptor. It has no context on a GPU, which would take
half a GiB, and neither reads nor writes there.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ecd.base.clock import REAL, Clock
from ecd.memory.pool_dir import PoolError
from ecd_proto.contract import size_text
from ecd_proto.findings import utilization_left

logger = logging.getLogger(__name__)

MEMORY_WAIT_S = 60.0
"""How long the daemon retries to get memory of a full GPU: engines may still map the last pool."""
RETRY_S = 0.2
"""The pause before the next attempt."""


class DevicePool:
    """The memory of one device pool, all of one size from `take` to `close`."""

    huge_bytes = 0

    def __init__(
        self, device: int, uuid: str, nbytes: int, device_bytes: int, clock: Clock = REAL
    ) -> None:
        """`device_bytes` are all that the GPU has."""
        self.device, self.uuid, self.nbytes, self._clock = device, uuid, nbytes, clock
        self.device_bytes = device_bytes
        self.path = Path(uuid)
        self.fd: int | None = None
        """The descriptor by which clients import it; None: there is no memory."""
        self.problem = "waiting for memory"
        """Why there is no memory, or none yet; empty: there is."""

    @property
    def populated_bytes(self) -> int:
        return 0 if self.fd is None else self.nbytes

    async def take(self) -> None:
        """Take the memory, and wait MEMORY_WAIT_S for it where the GPU has none free.

        Without it the pool stays unused; `problem` and the log say why.
        """
        from ecd_proto.cuda import CudaError, create

        loop = asyncio.get_running_loop()
        until_s = self._clock.now_s() + MEMORY_WAIT_S
        while True:
            try:
                self.fd = await loop.run_in_executor(None, create, self.device, self.nbytes)
                break
            except CudaError as error:
                if error.name != "CUDA_ERROR_OUT_OF_MEMORY" or self._clock.now_s() >= until_s:
                    self.problem = f"no memory until the next start ({error})"
                    advice = "Start the daemon before the engines, or lower ECD_DEVICE_POOL_BYTES"
                    logger.error("no device pool on %s: %s. %s", self._name, self.problem, advice)
                    return
                waiting = f"waiting for memory ({error})"
                if self.problem != waiting:
                    self.problem = waiting
                    logger.warning("no device pool on %s yet: %s", self._name, waiting)
            await self._clock.sleep(RETRY_S)
        self.problem = ""
        left = utilization_left(self.nbytes, self.device_bytes)
        logger.info("%s are the device pool: %s", self._name, left)

    @property
    def _name(self) -> str:
        return f"{size_text(self.nbytes)} of {self.uuid}"

    def close(self) -> None:
        """Release the memory, which lasts as long as clients have it mapped."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def device_pools(nbytes: int, names: Iterable[str], first: int) -> dict[int, DevicePool]:
    """A pool for each GPU that `names` has, by UUID or number; without names for each there is.

    The pools are numbered from `first` on; none where `nbytes` is 0. Raises PoolError.
    """
    if not nbytes:
        return {}
    try:
        from ecd_proto import cuda
    except ImportError as error:
        raise PoolError(
            f"ECD_DEVICE_POOL_BYTES needs cuda-bindings: pip install "
            f"'encoder-cache-daemon[cuda]' ({error})"
        ) from None
    try:
        found = cuda.devices()
        chosen = [_number(name, found) for name in names] or list(found)
        pools = []
        for number in dict.fromkeys(chosen):
            unit = cuda.granularity(number)
            total_bytes = cuda.total_bytes(number)
            rounded = -(-nbytes // unit) * unit
            pools.append(DevicePool(number, found[number], rounded, total_bytes))
        return dict(enumerate(pools, first))
    except cuda.CudaError as error:
        raise PoolError(
            f"ECD_DEVICE_POOL_BYTES needs a GPU: {error}. If nvidia-smi shows one, the daemon may "
            "not open /dev/nvidia*, or nothing has made /dev/nvidia-uvm since boot: run "
            "`nvidia-modprobe -c0 -u`, and under systemd install devices.conf"
        ) from None


def _number(name: str, found: Mapping[int, str]) -> int:
    """The number here of a GPU that is named by its UUID, or by that number."""
    for number, uuid in found.items():
        if name == str(number) or name.partition("-")[2] == uuid.partition("-")[2]:
            return number
    known = ", ".join(f"{number} ({uuid})" for number, uuid in found.items())
    raise PoolError(f"ECD_DEVICES: there is no GPU {name}; known are {known or 'none'}")
