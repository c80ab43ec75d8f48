"""The engine's namespace, in memory that its API server reads: it moves as weights change.

vLLM runs the scheduler and the API server in two processes, and tells the latter nothing of a
connector. What they have in common is the instance's id: the memory is found by it. Any user may
make memory of that name, so the reader takes none but its own user's, and none that can shrink
under its mapping.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import stat
import struct
from zlib import crc32

from ecd_proto.mapped_file import keeps_size, memory_file

logger = logging.getLogger(f"vllm.{__name__}")

_NAME = "ecd-namespace-"
_HEADER = struct.Struct("<IH")
"""crc of the rest, and the bytes that follow: none where nothing is shared."""
_TRIES = 3


class SharedNamespace:
    """One engine's namespace; the scheduler writes it. Does nothing where no memory can be made."""

    def __init__(self, instance_id: str) -> None:
        self._fd = -1
        try:
            fd = memory_file(_NAME + instance_id, mmap.PAGESIZE)
            try:
                self._page = mmap.mmap(fd, mmap.PAGESIZE)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            logger.warning(
                "ecd: no memory can be made (%s): the API server will preprocess every picture",
                error,
            )
            return
        self._fd = fd

    def write(self, namespace: str | None) -> None:
        if self._fd < 0:
            return
        said = (namespace or "").encode()
        length = struct.pack("<H", len(said))
        record = _HEADER.pack(crc32(length + said), len(said)) + said
        self._page[: len(record)] = record

    def close(self) -> None:
        if self._fd >= 0:
            self._page.close()
            os.close(self._fd)
            self._fd = -1


def _links(process: str) -> list[str]:
    """The paths of a process's descriptors; none if it is another user's, or gone."""
    with contextlib.suppress(OSError):
        return [link.path for link in os.scandir(f"/proc/{process}/fd")]
    return []


def _is_own(found: os.stat_result) -> bool:
    """Whether it is a file of this process's user."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


class SeenNamespace:
    """An engine's namespace as another process of its user reads it."""

    def __init__(self, instance_id: str) -> None:
        """Raises FileNotFoundError where no engine of this id can be found."""
        target = f"/memfd:{_NAME}{instance_id} (deleted)"
        for process in filter(str.isdigit, os.listdir("/proc")):
            for link in _links(process):
                with contextlib.suppress(OSError):  # closed meanwhile
                    if os.readlink(link) == target and _is_own(os.stat(link)):
                        # The process may have put another file there meanwhile.
                        fd = os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                        try:
                            if _is_own(os.fstat(fd)) and keeps_size(fd):
                                self._page = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
                                return
                        finally:
                            os.close(fd)
        raise FileNotFoundError(target)

    def read(self) -> str | None:
        """The namespace. None: the engine shares nothing."""
        for _ in range(_TRIES):  # the scheduler may be writing
            crc, nbytes = _HEADER.unpack_from(self._page)
            checked = self._page[_HEADER.size - 2 : _HEADER.size + nbytes]
            if crc == crc32(checked):
                return checked[2:].decode() or None
        return None
