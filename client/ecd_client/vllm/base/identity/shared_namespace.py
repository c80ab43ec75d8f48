"""The engine's namespace, in memory that its API server reads: it moves as weights change.

vLLM runs the scheduler and the API server in two processes, and tells the latter nothing of a
connector. What they have in common is the instance's id, or their parent: the memory is found by
that. Any user may make memory of that name, so the reader takes none but its own user's, and none
that can shrink under its mapping.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
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
    """The namespace of a server's engines as another process of their user reads it."""

    def __init__(self, instance_id: str, engines: int = 1, *, has_siblings: bool = False) -> None:
        """Find the pages of `engines` data-parallel ranks of this instance.

        With `has_siblings` the server is one of several, which do not know the instance's id: its
        engines are other children of the process that started it. Raises FileNotFoundError where
        another number of engines is found.
        """
        said = "[^ ]+" if has_siblings else f"{re.escape(instance_id)}(?:_dp[0-9]+)?"
        name = re.compile(f"/memfd:{_NAME}({said}) \\(deleted\\)")
        self._pages: dict[tuple[int, int], mmap.mmap] = {}
        self.instance_id = instance_id
        for process in _siblings() if has_siblings else _processes():
            for link in _links(process):
                with contextlib.suppress(OSError):  # closed meanwhile
                    found = name.fullmatch(os.readlink(link))
                    if found is not None and _is_own(os.stat(link)):
                        self._map(link)
                        self.instance_id = found[1]
        if len(self._pages) != engines:
            raise FileNotFoundError(f"{len(self._pages)} of {engines} engines")

    def _map(self, link: str) -> None:
        # The process may have put another file there meanwhile.
        fd = os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            file = found.st_dev, found.st_ino  # which an engine's children may have open, too
            if file not in self._pages and _is_own(found) and keeps_size(fd):
                self._pages[file] = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    def read(self) -> str | None:
        """The namespace. None: an engine shares nothing, or they have different ones."""
        said = {_read(page) for page in self._pages.values()}
        return said.pop() if len(said) == 1 else None


def _read(page: mmap.mmap) -> str | None:
    for _ in range(_TRIES):  # the scheduler may be writing
        crc, nbytes = _HEADER.unpack_from(page)
        checked = page[_HEADER.size - 2 : _HEADER.size + nbytes]
        if crc == crc32(checked):
            return checked[2:].decode() or None
    return None


def _processes() -> Iterator[str]:
    return filter(str.isdigit, os.listdir("/proc"))


def _siblings() -> Iterator[str]:
    """The processes that this one's parent has started."""
    parent = str(os.getppid())
    for process in _processes():
        with contextlib.suppress(OSError):
            said = Path(f"/proc/{process}/stat").read_text()
            if said.rpartition(")")[2].split()[1] == parent:
                yield process
