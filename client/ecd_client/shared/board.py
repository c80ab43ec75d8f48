"""The board as a client maps it: the daemon's index, all sessions' pages, this session's own."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from ecd_client.files import open_file
from ecd_proto.mapped_file import MappedFile
from ecd_proto.shm.barriers import join_barriers
from ecd_proto.shm.index import INDEX_HEADER_BYTES, IndexShape, unpack_index_header
from ecd_proto.shm.session_page import PAGE_BYTES
from ecd_proto.v1 import cache_pb2 as pb


@dataclass(frozen=True, eq=False)
class MappedBoard:
    """Files of the board, mapped: `page`, number `page_number`, is this session's to write."""

    shape: IndexShape
    index: MappedFile
    pages: MappedFile
    page: MappedFile
    page_number: int

    @classmethod
    def open(cls, files: pb.IndexFile, uid: int | None = None) -> MappedBoard | None:
        """Map files that must be user `uid`'s. Raises OSError.

        None: this process cannot use them, and makes calls instead.
        """
        with contextlib.ExitStack() as opened:
            fds = []
            for path, flags in ((files.path, os.O_RDONLY), (files.pins_path, os.O_RDWR)):
                fds.append(open_file(path, flags, uid))
                opened.callback(os.close, fds[-1])
            index = MappedFile(fds[0], os.fstat(fds[0]).st_size, writable=False)
            shape = unpack_index_header(index.view(0, INDEX_HEADER_BYTES).tobytes())
            if shape is None or not join_barriers():
                return None
            pages_bytes = os.fstat(fds[1]).st_size
            if not shape.fits(index.nbytes, pages_bytes):
                return None
            page = MappedFile(fds[1], PAGE_BYTES, writable=True, offset=files.pins_offset)
            pages = MappedFile(fds[1], pages_bytes, writable=False)
            return cls(shape, index, pages, page, files.pins_offset // PAGE_BYTES)
