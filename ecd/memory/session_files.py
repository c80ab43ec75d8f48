"""The files in shared memory that a client opens at the start of its session."""

from __future__ import annotations

from pathlib import Path

from ecd.core.types import SessionId
from ecd.memory.host import HostPool
from ecd.memory.shared_index import SharedIndex
from ecd_proto.v1 import cache_pb2 as pb


class SessionFiles:
    """The pool, the index and the doorbell's path, as they are told to clients."""

    def __init__(self, pool: HostPool, index: SharedIndex | None, doorbell: Path | None) -> None:
        """Without an `index` every get is a call; without a `doorbell` every put is one."""
        self._pool, self._index, self._doorbell = pool, index, doorbell

    def pool_file(self) -> pb.PoolFile:
        pool = self._pool
        return pb.PoolFile(
            pool=0,
            kind="host",
            path=str(pool.path),
            nbytes=pool.nbytes,
            inode=pool.inode,
            huge_bytes=pool.huge_bytes,
        )

    def index_file(self, session: SessionId) -> pb.IndexFile | None:
        """Open a page for the session. None: it must call for everything."""
        offset = None if self._index is None else self._index.open_page(session)
        if self._index is None or offset is None:
            return None
        return pb.IndexFile(
            path=str(self._index.path),
            pins_path=str(self._index.pins_path),
            pins_offset=offset,
            doorbell_path="" if self._doorbell is None else str(self._doorbell),
        )

    def lock_path(self) -> str:
        return str(self._pool.sessions_path)

    def is_session_locked(self, offset: int) -> bool:
        return self._pool.is_session_locked(offset)
