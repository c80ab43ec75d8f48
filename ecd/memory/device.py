"""Device pools: memory of GPUs that the daemon owns, and that clients alone map and use.

The daemon creates it and keeps it by a descriptor. It has no context on a GPU, which would take
half a GiB, and neither reads nor writes there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ecd.memory.pool_dir import PoolError
from ecd_proto.contract import size_text

logger = logging.getLogger(__name__)

MEMORY_WAIT_S = 3.0
"""How long a start waits for memory of a GPU: engines give back what the daemon before had."""
RETRY_S = 0.2


class DevicePool:
    """The memory of one device pool, all of one size from `take` to `close`."""

    huge_bytes = 0

    def __init__(self, device: int, uuid: str, nbytes: int) -> None:
        self.device, self.uuid, self.nbytes = device, uuid, nbytes
        self.path = Path(uuid)
        self.fd: int | None = None
        """The descriptor by which clients import it; None: there is no memory."""
        self._is_closed = False

    @property
    def populated_bytes(self) -> int:
        return 0 if self.fd is None else self.nbytes

    def take(self, wait_s: float = MEMORY_WAIT_S) -> None:
        """Take the memory, waiting for it. Without it the pool stays unused; the log says so."""
        from ecd_proto.cuda import CudaError, create

        until_s = time.monotonic() + wait_s
        while not self._is_closed:
            try:
                self.fd = create(self.device, self.nbytes)
                logger.info("%s of %s are the device pool", size_text(self.nbytes), self.uuid)
                return
            except CudaError as error:
                if error.name != "CUDA_ERROR_OUT_OF_MEMORY" or time.monotonic() >= until_s:
                    logger.error(
                        "no device pool on %s until the next start: %s. Start the daemon before "
                        "the engines, or lower ECD_DEVICE_POOL_BYTES (%s)",
                        self.uuid,
                        error,
                        size_text(self.nbytes),
                    )
                    return
            time.sleep(RETRY_S)

    def close(self) -> None:
        """Let go of the memory, which lasts as long as clients have it mapped."""
        self._is_closed = True
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
            pools.append(DevicePool(number, found[number], -(-nbytes // unit) * unit))
        return dict(enumerate(pools, first))
    except cuda.CudaError as error:
        raise PoolError(f"ECD_DEVICE_POOL_BYTES needs a GPU: {error}") from None


def _number(name: str, found: Mapping[int, str]) -> int:
    """The number here of a GPU that is named by its UUID, or by that number."""
    for number, uuid in found.items():
        if name == str(number) or name.partition("-")[2] == uuid.partition("-")[2]:
            return number
    known = ", ".join(f"{number} ({uuid})" for number, uuid in found.items())
    raise PoolError(f"ECD_DEVICES: there is no GPU {name}; known are {known or 'none'}")
