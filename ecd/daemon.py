"""The daemon: the only place that knows every part."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

from ecd.base.clock import Clock
from ecd.base.identity import NodeIdentity
from ecd.cluster.cluster import Cluster, Outside, PoolMemory
from ecd.core.model.board import Uses
from ecd.holdings import Holdings, StartError
from ecd.live.background import Background, until_first
from ecd.live.flights import Flights
from ecd.live.live import LiveCache
from ecd.live.slow_log import SlowLog
from ecd.memory.checksums import Checksums
from ecd.memory.disk.disk import DiskTier
from ecd.memory.recovery import Recovery
from ecd.memory.session_files import SessionFiles
from ecd.node import Node, live_cache, make_cache
from ecd.ops.events import Events
from ecd.ops.health import Health
from ecd.ops.history import History
from ecd.ops.http import PATH, LocateOverHttp
from ecd.ops.metrics.registry import Metrics
from ecd.ops.service_manager import ServiceManager, is_supervised
from ecd.ops.status import PooledMemory, Status
from ecd.ops.status_page import StatusPage
from ecd.ops.trace import Recorder
from ecd.rpc.cache.cache_service import Monitor
from ecd.rpc.cache.origins import NoOtherNodes, NothingToRecover, Recovering
from ecd.rpc.peer.peer_server import PeerServer
from ecd.rpc.peer.peer_service import PeerService
from ecd.rpc.peer.peer_token import TokenCheck
from ecd.rpc.server import Server
from ecd.settings.config import RULES, Config, ConfigError
from ecd.settings.reloading import taken_over
from ecd_proto.contract import DISTRIBUTION, count_text, size_text
from ecd_proto.leftovers import TOUCH_S
from ecd_proto.v1 import cache_pb2 as pb

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Longest time that calls in flight get to finish after the daemon is told to stop."""

PROGRESS_S = 0.5

DEVICE_WAIT_S = 3.0
"""How long a start waits for memory of GPUs: clients that attach before it comes get none."""


class _Parts(NamedTuple):
    """The parts of a daemon on its event loop."""

    node: Node
    status: Status
    checksums: Checksums
    recovery: Recovering
    disk: DiskTier | None
    events: Events | None
    server: Server
    peer_server: PeerServer | None
    history: History


class Daemon:
    """One run of a daemon, from `run` to a signal."""

    def __init__(
        self, config: Config, reload: Callable[[], Config] | None = None, cold: bool = False
    ) -> None:
        """Take the socket's path and the pool's directory.

        `reload` reads the settings anew, and raises ConfigError; with `cold` nothing of the last
        daemon is taken over. Raises SocketError, PoolError and StartError.
        """
        self._config, self._reload = config, reload
        self._clock = clock = Clock()
        self._manager = ServiceManager(clock)
        self._identity = NodeIdentity(
            config.name,
            clock.secret(16).hex(),
            f"ecd {version(DISTRIBUTION)}",
            config.peer_address or "",
        )
        self._cluster: Cluster | None = None
        self._flights: Flights | None = None
        self._live: LiveCache | None = None
        self._disk: DiskTier | None = None
        self._slow_log: SlowLog | None = None
        self._background = Background()
        self._own = Holdings(config, self._identity.incarnation, cold)

    def _idle(
        self, live: LiveCache, node: Node, checksums: Checksums, recovery: Recovering
    ) -> pb.Idle:
        """The state of each part that works in the background."""
        cluster, disk = self._cluster, self._disk
        is_drained, is_hashed = live.is_drained, recovery.is_done and checksums.is_idle
        is_settled = is_drained and not len(node.flights)  # else more is evicted, and then told
        return pb.Idle(
            drained=is_drained,
            hashed=is_hashed and (cluster is None or cluster.is_hashed),
            settled=is_settled and (cluster is None or cluster.is_settled),
            written=disk is None or (is_drained and disk.is_idle),
        )

    # -- its life ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises what a part raises.

        After SIGTERM the pool and its index are left to the next daemon if one is expected, else no
        file is. A daemon that never served leaves the files that it found. SIGHUP reloads the
        settings if they can be read anew; it never ends the daemon, so that a closed terminal
        does not.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number, stop)
        loop.add_signal_handler(signal.SIGHUP, self._read_settings)
        with contextlib.closing(self._own):
            async with contextlib.AsyncExitStack() as running:
                metrics = Metrics(version(DISTRIBUTION), self._clock)
                running.callback(metrics.close)
                running.push_async_callback(self._background.close)
                parts = self._make_parts(metrics, running)
                running.push_async_callback(self._end, parts)
                await parts.server.start(
                    self._own.socket, self._own.gid, self._config.health_address
                )
                await until_first(
                    stop.wait(),
                    self._serve(parts),
                    parts.node.live.run(),
                    metrics.watch_loop(),
                    parts.history.run(),
                    self._touch_directory(),
                )

    def _make_parts(self, metrics: Metrics, running: contextlib.AsyncExitStack) -> _Parts:
        """Make the serving parts, in order of need.

        Raises EventsError, MetricsError, ClusterError, EngineError.
        """
        config, board, pools, clock = self._config, self._own.board, self._own.pools, self._clock
        recorder = self._make_recorder(metrics, running)
        cache = make_cache(
            pools,
            config.lease_ttl_s,
            board,
            clock,
            self._own.devices,
            config.eviction,
            recorder,
            config.rules(self._own.pool.nbytes),
        )
        doorbell_path = None if board.doorbell is None else board.doorbell.path
        attach_path = None if self._own.attach is None else self._own.attach.path
        files = SessionFiles(pools, board.index, doorbell_path, attach_path, self._own.devices)
        slow_log = self._slow_log = SlowLog(clock, config.slow_log_s, metrics.count_slow)

        def observe(method: str, seconds: float, *about: Any) -> None:
            metrics.observe_call(method, seconds)
            slow_log.call(method, seconds, *about)

        live = self._live = live_cache(cache, board, observe, clock)
        node = Node(live, files, self._identity, slow_log)
        if self._own.attach is not None:
            self._own.attach.listen(node.streams, self._own.devices)
        memory_of: dict[int, PooledMemory] = {**pools, **self._own.devices}
        status = Status(self._identity, cache, memory_of, board.index, node.streams, clock)
        checksums = Checksums(live, pools)
        running.callback(checksums.close)
        recovery = self._make_recovery(live, checksums)
        disk = self._disk = self._make_disk(node, status, running)

        def figures() -> pb.StatusReply:
            live.scan()  # or what was read a moment ago would be missing
            return status.read()

        metrics.watch_core(figures)
        events = self._make_events(live, status, metrics, running)
        peer_server: PeerServer | None = None
        if config.peer_address is not None:
            memory = PoolMemory(pools, checksums)
            about = self._identity, metrics.observe_fetch
            cluster = Cluster(config, live, node.flights, memory, *about, Outside())
            running.push_async_callback(cluster.close)
            metrics.watch_peers(cluster.status, cluster.hints, cluster.never_reached)
            token = TokenCheck(config.peer_address, config.token, clock, live.refuse)
            peers = PeerService(live, cluster, token, config.readers_per_entry)
            peer_server = PeerServer(peers, cluster.server_credentials, clock)
            cluster.encoders.own = node.streams.engines.encoders
            self._cluster, status.peers = cluster, cluster.peer_states
        self._flights = node.flights
        self._flights.reload(config.fetch_timeout_s)
        running.push_async_callback(node.flights.close)
        status.idle = lambda: self._idle(live, node, checksums, recovery)
        monitor = Monitor(status.read, observe, slow_log)
        others = self._cluster or NoOtherNodes()
        service = node.service(others, recovery, monitor, disk)
        server = Server(service, status.unavailable, observe, clock)
        locate = LocateOverHttp(service.Locate, status.unavailable, clock)
        history = History(status.figures, clock)
        page = StatusPage(figures, others.status, history, clock)
        health = Health(status.unavailable)
        address = metrics.listen(
            config.metrics_address, {PATH: locate, **page.answers, **health.answers}
        )
        logger.info("status page on http://%s/, metrics on http://%s/metrics", address, address)
        return _Parts(node, status, checksums, recovery, disk, events, server, peer_server, history)

    def _make_disk(
        self, node: Node, status: Status, running: contextlib.AsyncExitStack
    ) -> DiskTier | None:
        if self._own.disk_dir is None:
            return None
        config = self._config
        disk = DiskTier(
            node.live,
            self._own.disk_dir,
            self._own.pools,
            config.disk_pool_bytes,
            config.disk_write_bytes_per_s,
        )
        running.callback(disk.close)
        node.flights.sources.append(disk.reads)
        node.streams.has_disk = True
        status.disk = disk.status
        return disk

    def _make_recorder(
        self, metrics: Metrics, running: contextlib.AsyncExitStack
    ) -> Recorder | None:
        """The trace, if one is configured. Raises StartError."""
        path = self._config.trace
        if path is None:
            return None
        try:
            recorder = Recorder(path, self._clock.now_s())
        except OSError as error:
            raise StartError(f"ECD_TRACE={path}: {error.strerror}") from None
        running.callback(recorder.close)
        metrics.watch_trace(lambda: recorder.lost)
        logger.info("tracing evictions to %s", path)
        return recorder

    def _make_events(
        self,
        live: LiveCache,
        status: Status,
        metrics: Metrics,
        running: contextlib.AsyncExitStack,
    ) -> Events | None:
        """The stream of changes, if one is configured. Raises EventsError."""
        address, identity = self._config.events_address, self._identity
        if address is None:
            return None
        events = Events(address, identity.holder, identity.incarnation, live)
        running.push_async_callback(events.close)
        metrics.watch_events(lambda: vars(events.counters))
        status.events = events.address, events.replay_address
        logger.info("events on tcp://%s, replayed on tcp://%s", *status.events)
        return events

    def _make_recovery(self, live: LiveCache, checksums: Checksums) -> Recovering:
        leftovers, index = self._own.pool.leftovers, self._own.board.index
        if leftovers is None or index is None:
            if index is not None:
                index.begin_counting(Uses())
            return NothingToRecover()
        return Recovery(live, checksums, leftovers, index)

    async def _serve(self, parts: _Parts) -> None:
        """Populate the pool, let other nodes read it, and serve until cancelled."""
        await self._populate()
        if self._cluster is not None and parts.peer_server is not None:
            parts.peer_server.bind(self._cluster.node)
            logger.info("registering the pool with Mooncake")
            self._manager.say("registering the pool")
            await self._cluster.start()
            await parts.peer_server.start()
        gc.collect()
        gc.freeze()  # or all that was imported is looked through now and then: tens of ms
        self._own.begin_serving()
        config, cache = self._config, parts.node.live.cache
        parts.status.serving()
        logger.info("serving on %s, incarnation %s", config.address, self._identity.incarnation)
        await parts.server.set_serving(True)
        self._manager.ready()
        await asyncio.gather(
            self._manager.keep_alive(lambda: f"serving {count_text(cache.views.entries, 'entry')}"),
            self._follow_puts(parts.checksums) if self._cluster is None else self._cluster.run(),
            parts.recovery.run(),
            *([] if parts.events is None else [parts.events.run()]),
            *([] if parts.disk is None else [parts.disk.run()]),
        )

    async def _populate(self) -> None:
        logger.info("populating %s: %s", self._own.pool.path, size_text(self._own.pool.nbytes))
        last_s = self._clock.now_s()

        def progress(nbytes: int) -> None:
            nonlocal last_s
            if self._clock.now_s() - last_s >= PROGRESS_S:
                last_s = self._clock.now_s()
                percent = 100 * nbytes / self._own.pool.nbytes
                logger.info("populating %.0f %%", percent)
                self._manager.say(f"populating {percent:.0f} %")

        loop = asyncio.get_running_loop()
        await asyncio.gather(
            loop.run_in_executor(None, self._own.pool.populate, progress), self._take_devices()
        )

    async def _take_devices(self) -> None:
        """Take the memory of device pools; after DEVICE_WAIT_S this goes on in the background."""
        takes = [self._background.spawn(device.take()) for device in self._own.devices.values()]
        if takes:
            await asyncio.wait(takes, timeout=DEVICE_WAIT_S)

    async def _follow_puts(self, checksums: Checksums) -> None:
        """Hash stored entries for the next daemon; a cluster already does so for other nodes."""
        if self._config.warm_restart is not False:
            await checksums.follow()

    async def _touch_directory(self) -> None:
        """Keep the directory's time recent: after a SIGKILL it says since when it is unused."""
        while True:
            self._own.pool.directory.touch()
            await self._clock.sleep(TOUCH_S)

    # -- its end -------------------------------------------------------------------------------

    def _stop(self, number: int, stop: asyncio.Event) -> None:
        warm = self._config.warm_restart
        self._own.keep = number == signal.SIGTERM and (is_supervised() if warm is None else warm)
        logger.info("stopping: %s", signal.Signals(number).name)
        stop.set()

    async def _end(self, parts: _Parts) -> None:
        """Let calls in flight finish; hash the rest of a pool that the next daemon takes over."""
        self._own.keep &= self._own.has_served
        parts.status.stopping()
        self._manager.say("stopping")
        await parts.server.set_serving(False)
        parts.node.streams.end_all()
        cache = parts.node.live.cache
        parts.node.live.scan()
        told = cache.counters
        logger.info("counted: hits %d, misses %d, puts %d", told.hits, told.misses, told.puts)
        servers = [each for each in (parts.server, parts.peer_server) if each is not None]
        await asyncio.gather(*(server.stop(GRACE_S) for server in servers))
        if self._own.keep:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(parts.checksums.complete(), GRACE_S)
            logger.info(
                "%s and %s in %s are left for the next start; `ecd clear` frees them",
                count_text(cache.views.entries, "entry"),
                size_text(self._own.pool.nbytes),
                self._own.pool.directory.path,
            )

    # -- settings ------------------------------------------------------------------------------

    def _read_settings(self) -> None:
        """Apply settings that can change while the daemon runs, and log those that cannot."""
        if self._reload is None:
            logger.info("SIGHUP changes nothing: there is no --config that can be read again")
            return
        try:
            new = self._reload()
        except ConfigError as error:
            logger.error("the settings stay as they are: %s", error)
            return
        changed, self._config = taken_over(self._config, new)
        logging.getLogger().setLevel(self._config.log_level.upper())
        if self._flights is not None:
            self._flights.reload(self._config.fetch_timeout_s)
        if self._slow_log is not None:
            self._slow_log.slow_s = self._config.slow_log_s
        if self._cluster is not None:
            self._cluster.reload(self._config)
        if self._live is not None and any(name in RULES for name in changed):
            self._live.operators.use_rules(self._config.rules(self._own.pool.nbytes))
            if self._disk is not None:
                self._background.spawn(self._disk.reapply_rules())
