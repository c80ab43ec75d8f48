"""The daemon: the only place that knows every part."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import grp
import logging
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

from ecd.cluster.checksum import Checksums
from ecd.cluster.cluster import Cluster
from ecd.config import RELOADABLE, Config, ConfigError
from ecd.core.cache import DEFAULT_LIMITS, Cache
from ecd.core.types import SessionId
from ecd.memory.host import HostPool
from ecd.memory.mapped_index import MappedIndex
from ecd.memory.pool_dir import clear_others
from ecd.metrics import Metrics
from ecd.rpc.cache_service import CacheService, NoOtherNodes
from ecd.rpc.peer_service import PeerServer, PeerService
from ecd.rpc.puts import Bell, Puts
from ecd.rpc.server import Server
from ecd.rpc.sessions import Sessions
from ecd.rpc.socket import OwnedSocket
from ecd.service_manager import ServiceManager, is_supervised
from ecd.takeover import Takeover
from ecd_proto.contract import CONTRACT_VERSION
from ecd_proto.leftovers import TOUCH_S
from ecd_proto.shm import BELL_SUFFIX, has_barriers
from ecd_proto.v1 import cache_pb2 as pb

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long calls in flight may take after the daemon was told to stop."""

PROGRESS_S = 0.5
LOOK_S = 0.25
"""How often those who read without a call are looked at when nothing else asks for it."""

State = pb.StatusReply.State


class StartError(Exception):
    """The daemon cannot start; the message says what to change."""


class Daemon:
    """One daemon life, from `run` to a signal."""

    def __init__(
        self, config: Config, reload: Callable[[], Config] | None = None, cold: bool = False
    ) -> None:
        """Take the socket's path and the pool's directory.

        `reload` reads the settings anew, and raises ConfigError; with `cold` nothing of the last
        daemon is taken over. Raises SocketError, PoolError and StartError.
        """
        self._config, self._reload = config, reload
        self._manager = ServiceManager()
        self._started_s = time.monotonic()
        self._incarnation = secrets.token_hex(16)
        self._state = State.STATE_POPULATING
        self._version = f"ecd {version('ecd')}"
        gid = _gid(config.group)
        self._socket = OwnedSocket(config.address)
        try:
            clear_others(config.shm_dir, config.name, config.leftover_max_age_s)
            self._pool = HostPool(
                config.shm_dir,
                config.name,
                self._incarnation,
                config.host_pool_bytes,
                cold or config.warm_restart is False,
                gid,
            )
        except BaseException:
            self._socket.close()
            raise
        try:
            self._index = self._make_index()
            self._bell = self._make_bell()
        except BaseException:
            self._pool.close()
            self._socket.close()
            raise
        self._gid = gid
        self._cache = Cache(
            self._pool.nbytes, config.lease_ttl_s, DEFAULT_LIMITS, clients=self._index
        )
        self._checksums = Checksums(self._cache, self._pool.readable)
        self._sessions = Sessions(
            self._cache,
            self,
            self._incarnation,
            self._version,
            config.peer_address or "",
            time.monotonic,
        )
        self._metrics = Metrics(
            self._cache, lambda: self._sessions.clients, self._unlisted, version("ecd")
        )
        self._cluster: Cluster | None = None
        self._peer_server: PeerServer | None = None
        self._stored = asyncio.Event()
        self._keep = self._has_served = False
        self._takeover: Takeover | None = None
        before = self._pool.before
        if before is not None and self._index is not None:
            self._takeover = Takeover(
                self._cache,
                self._checksums,
                before,
                self._sessions.deliver,
                self._index.note_unseen,
            )
            self._index.note_taken()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises what a part raises.

        After SIGTERM the pool and its index are left to the next incarnation if one is expected,
        else no file is. A daemon that never served leaves what it found.
        SIGHUP reloads the settings where they can be read anew, and else is one more such signal.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop, number, stop)
        if self._reload is not None:
            loop.add_signal_handler(signal.SIGHUP, self._read_settings, self._reload)
        try:
            metrics_address = self._metrics.listen(self._config.metrics_address)
            logger.info("metrics on http://%s/metrics", metrics_address)
            self._join()
            server = self._make_server()
            try:
                await server.start(self._socket, self._gid, self._config.health_address)
                await _first_of(
                    stop.wait(),
                    self._serve(server),
                    self._look_at_readers(),
                    self._metrics.watch_loop(),
                    self._show_life(),
                )
            finally:
                self._keep &= self._has_served
                self._state = State.STATE_STOPPING
                self._manager.say("stopping")
                await server.set_serving(False)
                logger.info("stopping")
                self._sessions.end_all()
                await asyncio.gather(
                    server.stop(GRACE_S), *(s.stop(GRACE_S) for s in (self._peer_server,) if s)
                )
                if self._keep:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._checksums.complete(), GRACE_S)
        finally:
            self._metrics.close()
            if self._cluster is not None:
                await self._cluster.close()
            if self._bell is not None:
                self._bell.close()
            if self._index is not None:
                self._index.close()
            self._checksums.close()
            if self._has_served and not self._keep and self._pool.before is not None:
                self._pool.before.remove()
            self._pool.close(keep=self._keep)
            self._socket.close()

    def _stop(self, number: int, stop: asyncio.Event) -> None:
        warm = self._config.warm_restart
        self._keep = number == signal.SIGTERM and (is_supervised() if warm is None else warm)
        stop.set()

    async def _follow_puts(self) -> None:
        """The cluster hashes what is put for its own sake; without one it is for the next life."""
        if self._config.warm_restart is not False:
            await self._checksums.follow(self._stored)

    def _read_settings(self, reload: Callable[[], Config]) -> None:
        """Take over what can change while the daemon runs, and say what cannot."""
        try:
            new = reload()
        except ConfigError as error:
            logger.error("the settings stay as they are: %s", error)
            return
        old = self._config
        changed = [
            name for name in type(new).model_fields if getattr(new, name) != getattr(old, name)
        ]
        at_once = [name for name in changed if name in RELOADABLE]
        if new.directory_kind != old.directory_kind:
            at_once = [name for name in at_once if name != "peers"]
        for name in changed:
            if name in at_once:
                logger.info("%s is %s now", name, getattr(new, name))
            else:
                logger.warning("%s changed: the next start takes it over", name)
        if not changed:
            logger.info("no setting has changed")
        self._config = old.model_copy(update={name: getattr(new, name) for name in at_once})
        logging.getLogger().setLevel(self._config.log_level.upper())
        if self._cluster is not None:
            self._cluster.reload(self._config)

    def _make_index(self) -> MappedIndex | None:
        """None: clients ask for everything. Raises PoolError."""
        if not has_barriers():
            logger.warning(
                "this kernel, or what confines this process, has no membarrier(2): every get "
                "is a call, which takes some 0.5 ms"
            )
            return None
        return MappedIndex(
            self._pool.directory,
            self._incarnation,
            self._pool.nbytes,
            DEFAULT_LIMITS.sessions,
            1 if self._pool.before is None else self._pool.before.life + 1,
        )

    def _make_bell(self) -> Bell | None:
        """None: every put is a call."""
        path = self._pool.directory.path / f"{self._incarnation}{BELL_SUFFIX}"
        if self._index is None:
            return None
        try:
            bell = Bell(path)
            self._pool.directory.share(path.name)
            return bell
        except OSError as error:
            logger.warning("no socket at %s: %s. Every put is a call", path, error)
            return None

    async def _look_at_readers(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            settled = self._cache.look_at_readers(time.monotonic())
            while not settled:
                await self._sessions.turns.next()
                settled = self._cache.look_at_pins()

    async def _show_life(self) -> None:
        """Keep the directory's time recent: after a SIGKILL it says since when nobody uses it."""
        while True:
            self._pool.directory.touch()
            await asyncio.sleep(TOUCH_S)

    def _make_server(self) -> Server:
        others = self._cluster or NoOtherNodes(self._stored.set)
        service = CacheService(
            self._cache,
            self._sessions,
            others,
            self._incarnation,
            time.monotonic,
            self.status,
            self._metrics.observe_call,
        )
        if self._takeover is not None:
            service.settle = self._takeover.settle
        if self._index is not None and self._bell is not None:

            def stored() -> None:
                service.trim_soon()
                others.changed()

            puts = Puts(
                self._cache,
                self._index,
                self._sessions,
                self._bell,
                stored,
                self._metrics.observe_call,
            )
            service.grant = puts.grant
            self._sessions.puts = puts
            puts.listen()
        return Server(
            service, self._unavailable, self._sessions.catch_up, self._metrics.observe_call
        )

    def _join(self) -> None:
        """Become one node of several, if so configured. Raises ClusterError and EngineError."""
        config = self._config
        if config.peer_address is None:
            return
        self._cluster = Cluster(
            config,
            self._cache,
            self._checksums,
            self._pool.readable,
            self._pool.writable,
            self._incarnation,
            self._version,
            self._sessions.deliver,
            self._metrics.observe_fetch,
        )
        cluster = self._cluster
        self._metrics.watch_peers(cluster.status, cluster.hints, cluster.never_reached)
        service = PeerService(
            self._cache, self._sessions, self._cluster, config.peer_address, config.token
        )
        self._peer_server = PeerServer(service, self._cluster.server_credentials)

    async def _serve(self, server: Server) -> None:
        loop = asyncio.get_running_loop()
        logger.info("populating %s: %.2f GiB", self._pool.path, self._pool.nbytes / (1 << 30))
        last_s = time.monotonic()

        def progress(nbytes: int) -> None:
            nonlocal last_s
            if time.monotonic() - last_s >= PROGRESS_S:
                last_s = time.monotonic()
                percent = 100 * nbytes / self._pool.nbytes
                logger.info("populating %.0f %%", percent)
                self._manager.say(f"populating {percent:.0f} %")

        await loop.run_in_executor(None, self._pool.populate, progress)

        if self._cluster is not None and self._peer_server is not None:
            self._peer_server.bind(self._cluster.node)
            logger.info("registering the pool with Mooncake")
            self._manager.say("registering the pool")
            await self._cluster.start()
            await self._peer_server.start()
        gc.collect()
        gc.freeze()  # or all that was imported is looked through now and then: tens of ms
        if self._pool.before is not None and self._takeover is None:
            self._pool.before.remove()  # no index will tell a later start what has been reused
        self._has_served = True
        self._state = State.STATE_SERVING
        await server.set_serving(True)
        logger.info("serving on %s, incarnation %s", self._config.address, self._incarnation)
        self._manager.ready()
        await asyncio.gather(
            self._manager.keep_alive(lambda: f"serving {self._cache.entries:,} entries"),
            self._follow_puts() if self._cluster is None else self._cluster.run(),
            *(takeover.run() for takeover in (self._takeover,) if takeover is not None),
        )

    def _unavailable(self) -> str | None:
        if self._state == State.STATE_SERVING:
            return None
        if self._state == State.STATE_STOPPING:
            return "the daemon is stopping"
        percent = 100 * self._pool.populated_bytes // self._pool.nbytes
        return f"the daemon is populating its pool: {percent} %"

    # -- what sessions need to know of the files -----------------------------------------------

    def pool_file(self) -> pb.PoolFile:
        return pb.PoolFile(
            pool=0, path=str(self._pool.path), nbytes=self._pool.nbytes, inode=self._pool.inode
        )

    def index_file(self, session: SessionId) -> pb.IndexFile | None:
        offset = None if self._index is None else self._index.open_page(session)
        if self._index is None or offset is None:
            return None
        return pb.IndexFile(
            path=str(self._index.path),
            pins_path=str(self._index.pins_path),
            pins_offset=offset,
            bell_path="" if self._bell is None else str(self._bell.path),
        )

    def lock_path(self) -> str:
        return str(self._pool.sessions_path)

    def is_session_locked(self, offset: int) -> bool:
        return self._pool.is_session_locked(offset)

    # -- status --------------------------------------------------------------------------------

    def _unlisted(self) -> int:
        return self._cache.entries if self._index is None else self._index.unlisted

    def status(self) -> pb.StatusReply:
        cache, allocator, counters = self._cache, self._cache.allocator, self._cache.counters
        cache.look_at_readers(time.monotonic())
        return pb.StatusReply(
            incarnation=self._incarnation,
            name=self._config.name,
            version=self._version,
            contract_version=CONTRACT_VERSION,
            pid=os.getpid(),
            state=self._state,
            uptime_s=time.monotonic() - self._started_s,
            populated_bytes=self._pool.populated_bytes,
            pool=pb.PoolStatus(
                path=str(self._pool.path),
                pool_bytes=allocator.pool_bytes,
                used_bytes=cache.used_bytes,
                granted_bytes=cache.granted_bytes,
                reserved_bytes=cache.reserved_bytes,
                leased_bytes=cache.leased_bytes,
                free_bytes=allocator.free_bytes + cache.granted_bytes,
                largest_free_bytes=allocator.largest_free_bytes,
                fragmentation=allocator.fragmentation,
            ),
            node=self._config.peer_address or "",
            entries=cache.entries,
            unlisted=self._unlisted(),
            sessions=self._sessions.clients,
            leases=cache.leases,
            waits=cache.waits,
            counters=pb.Counters(
                hits=counters.hits,
                misses=counters.misses,
                puts=counters.puts,
                duplicates=counters.duplicates,
                aborts=counters.aborts,
                bytes_in=counters.bytes_in,
                bytes_out=counters.bytes_out,
                saved_s=counters.saved_s,
                leases_expired=counters.leases_expired,
                waits_expired=counters.waits_expired,
                evictions=counters.evictions,
                refused=counters.refused,
            ),
        )


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Run until the first ends, cancel the rest, and raise what it raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _gid(group: str | None) -> int | None:
    if group is None or group.isdecimal():
        return None if group is None else int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise StartError(f"no such group: {group} (ECD_GROUP or --group)") from None
