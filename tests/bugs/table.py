"""The bugs: the rule that each breaks, how, and the test that finds it.

An edit replaces the one place in a file where its text stands. A bug without one is put in by its
test, which passes if it has found it.
"""

from __future__ import annotations

from typing import NamedTuple

from simulation.bugs import BUGS as SIMULATED
from support.cuda.dma_stress import COPY_STEPS
from support.cuda.dma_stress import RULES as COPYING
from support.pin_stress import STEPS as READING


class Edit(NamedTuple):
    file: str
    right: str
    wrong: str


class Bug(NamedTuple):
    rule: str
    """A page of docs/, or an invariant of the design by its number."""
    found_by: str
    """A test, below `tests/`."""
    edit: Edit | None = None


CACHE, EXAMPLES = "unit/test_cache.py", "unit/test_cache_examples.py"

EDITED = {
    # -- leases and pins -----------------------------------------------------------------------
    "one release ends all leases of an entry": Bug(
        "invariant 2",
        CACHE,
        Edit("ecd/core/pool/pool.py", "        entry.leases -= 1\n", "        entry.leases = 0\n"),
    ),
    "a lease is renewed after its end": Bug(
        "invariant 2",
        EXAMPLES,
        Edit("ecd/core/leases.py", " or self._deadlines.due_s(lease) <= now_s", ""),
    ),
    "a scan's pins do not hold an entry": Bug(
        "reading-without-a-call",
        CACHE,
        Edit(
            "ecd/core/pins.py",
            "                self._entries.pool_of(entry).hold(entry)\n",
            "                entry.leases += 0\n",
        ),
    ),
    "an entry hidden during a scan is decided by it": Bug(
        "reading-without-a-call",
        CACHE,
        Edit(
            "ecd/core/pins.py",
            "return entry in self._scanned or entry in self._retired",
            "return entry in self._scanned",
        ),
    ),
    "an evicted entry whose lease ends is free at once": Bug(
        "reading-without-a-call",
        CACHE,
        Edit(
            "ecd/core/pins.py",
            "            self._retired[entry.id] = entry\n        self.let",
            "            pass\n        self.let",
        ),
    ),
    "an entry that a lease's end has retired anew is decided by the scan before": Bug(
        "reading-without-a-call",
        CACHE,
        Edit("ecd/core/pins.py", "if is_over and not self.keeps(entry.id):", "if is_over:"),
    ),
    "the start of a put that was just taken is forgotten": Bug(
        "reading-without-a-call",
        CACHE,
        Edit(
            "ecd/core/pins.py",
            "        self._taken[entry.extent.start] = entry.id\n",
            "        self._taken.pop(entry.extent.start, None)\n",
        ),
    ),
    "an entry is hidden before its copies": Bug(
        "reading-without-a-call",
        "unit/test_replicas.py",
        Edit(
            "ecd/core/evictor.py",
            "        for copy in self._entries.replicas_of(entry):\n"
            "            self.evict(copy, reason)\n",
            "        self._board.hide(entry.id, entry.key, entry.replica_in)\n"
            "        for copy in self._entries.replicas_of(entry):\n"
            "            self.evict(copy, reason)\n",
        ),
    ),
    "a copy is committed after its entry has gone": Bug(
        "reading-without-a-call",
        "unit/test_replicas.py",
        Edit(
            "ecd/core/cache.py",
            "entry.original is not None and entry.original.state is not EntryState.COMMITTED",
            "entry.original is not None and entry.original.leases < 0",
        ),
    ),
    # -- writers -------------------------------------------------------------------------------
    "an aborted reservation keeps its extent": Bug(
        "invariant 3",
        CACHE,
        Edit(
            "ecd/core/writers.py",
            "        self._stop_writing(entry)\n        self._free(owner, entry)\n",
            "        self._stop_writing(entry)\n        self._take(owner, entry)\n",
        ),
    ),
    "a grant that is taken back frees what is being written": Bug(
        "reading-without-a-call",
        CACHE,
        Edit(
            "ecd/core/writers.py",
            "        self.give_back(session, begun)\n        pool.grants",
            "        self.give_back(session, [])\n        pool.grants",
        ),
    ),
    "a daemon waits for the end of Mooncake's engine": Bug(
        "nodes",
        "cluster/test_mooncake.py::test_a_daemon_ends_though_its_engine_does_not",
        Edit(
            "ecd/cluster/transport/engine.py",
            "        _ended.append(self)\n",
            "        del self._transfers._mooncake, self._engine\n",
        ),
    ),
    "a pool is left before its process has ended": Bug(
        "nodes",
        "integration/test_warm_restart.py::test_the_next_daemon_gets_the_pool_when_the_process_of_"
        "the_last_has_ended",
        Edit("ecd/memory/host.py", "close(keep=bool(kept))", "close()"),
    ),
    "a claimed key is reserved": Bug(
        "reading-without-a-call",
        CACHE,
        Edit("ecd/core/writers.py", "if self._board.is_claimed(key):", "if key is None:"),
    ),
    "the second of two puts of a key wins": Bug(
        "invariant 6",
        CACHE,
        Edit(
            "ecd/core/granted.py",
            "        refusal = self._writers.taken(key, pool)\n        if refusal is not None:\n"
            "            self._pins.retire",
            "        refusal = None\n        if refusal is not None:\n"
            "            self._pins.retire",
        ),
    ),
    "waits of a session have no bound": Bug(
        "invariant 7",
        EXAMPLES,
        Edit(
            "ecd/core/readers.py",
            "if self.waits.count(session) >= limit:",
            "if self.waits.count(session) < 0:",
        ),
    ),
    "leases of a session have no bound": Bug(
        "invariant 7",
        EXAMPLES,
        Edit(
            "ecd/core/readers.py",
            "if self.leases.count(session) >= limit:",
            "if self.leases.count(session) < 0:",
        ),
    ),
    # -- eviction ------------------------------------------------------------------------------
    "reads do not count": Bug(
        "eviction",
        "unit/test_value_density.py",
        Edit(
            "ecd/core/policy/value_density.py",
            "entry.frequency = min(entry.frequency + 1, MAX_FREQUENCY)",
            "entry.frequency = min(entry.frequency, MAX_FREQUENCY)",
        ),
    ),
    "the floor does not rise with what is given up": Bug(
        "eviction",
        "unit/test_value_density.py",
        Edit("ecd/core/policy/value_density.py", "self._floor = coldest", "self._floor = 0.0"),
    ),
    "a read does not move an entry in the order of lru": Bug(
        "eviction",
        EXAMPLES,
        Edit(
            "ecd/core/policy/policy.py",
            "        if entry.warmer is not None:  # ranked",
            "        if entry.warmer is entry:  # ranked",
        ),
    ),
    "the plan takes the first window that fits": Bug(
        "eviction",
        "unit/test_eviction.py",
        Edit("ecd/core/pool/eviction.py", "elif lost < least:", "elif best is None:"),
    ),
    "a quota refuses nothing": Bug(
        "eviction",
        "unit/test_terms.py",
        Edit("ecd/core/evictor.py", "if excess_bytes <= 0:", "if excess_bytes != 0.5:"),
    ),
    "no entry grows old": Bug(
        "eviction",
        "unit/test_terms.py",
        Edit("ecd/core/retention.py", "put_s + ttl_s", "put_s + 1e9 * ttl_s"),
    ),
    "an entry that an operator keeps is evicted": Bug(
        "eviction",
        "unit/test_terms.py",
        Edit(
            "ecd/core/pool/pool.py",
            "        self.kept_bytes += entry.block.nbytes\n        if entry.leases == 0:",
            "        self.kept_bytes += entry.block.nbytes\n        if entry.leases < 0:",
        ),
    ),
    "what is read from disk as slowly as encoded is written": Bug(
        "eviction",
        "unit/test_disk_limits.py",
        Edit("ecd/core/demotion.py", "if read_s < cost_s / 2:", "if read_s < cost_s * 1e9:"),
    ),
    # -- the event loop ------------------------------------------------------------------------
    "a large batch takes one turn": Bug(
        "invariant 8",
        "unit/test_turns.py",
        Edit(
            "ecd/live/turns.py",
            "if not self._left or self._turns.clock.now_s() - self._started_s > PIECE_S:",
            "if self._left < -1_000_000:",
        ),
    ),
    # -- what comes from outside ---------------------------------------------------------------
    "a size that is not its shape's is believed": Bug(
        "invariant 12",
        "fuzz/test_named.py",
        Edit("ecd/base/wire.py", "if content.nbytes != nbytes:", "if content.nbytes < 0:"),
    ),
    "a cost that is no number is believed": Bug(
        "invariant 12",
        "fuzz/test_named.py",
        Edit(
            "ecd/base/wire.py",
            "if not (isfinite(content.cost_s) and content.cost_s >= 0.0):",
            "if content.cost_s is None:",
        ),
    ),
    "a proof of the token is not looked at": Bug(
        "nodes",
        "cluster/test_fetch.py",
        Edit(
            "ecd/rpc/peer/peer_token.py",
            'if not hmac.compare_digest(expected, str(said.get("ecd-proof", ""))):',
            'if expected == "":',
        ),
    ),
    "a proof of the token is accepted twice": Bug(
        "security",
        "cluster/test_links.py",
        Edit(
            "ecd/rpc/peer/peer_token.py",
            "        if proof in self._spent:\n",
            "        if not proof:\n",
        ),
    ),
    "a view's hold goes by the dropping thread's stream alone": Bug(
        "gpu",
        "gpu/test_device_pool.py::test_a_view_may_be_dropped_by_any_thread",
        Edit(
            "client/ecd_client/device/copies.py",
            "streams.add(self._gpu.current_stream(self.device))",
            "streams.clear() or streams.add(self._gpu.current_stream(self.device))",
        ),
    ),
    "a view's end is asked of a graph that is being captured": Bug(
        "gpu",
        "gpu/test_device_pool.py::test_a_view_may_be_dropped_amid_a_capture",
        Edit(
            "client/ecd_client/device/driver.py",
            'raise DeviceBusy("the stream is being captured")',
            "return",
        ),
    ),
    "the model does not wait for the loads of a step": Bug(
        "gpu",
        "gpu/test_dma.py::test_loads_of_a_step_are_whole_at_its_end",
        Edit(
            "client/ecd_client/device/copies.py",
            "            over.record()\n            if stream != current:\n",
            "            over.record()\n            if stream == current:\n",
        ),
    ),
    "a load's hold ends with one of the same step that ended before": Bug(
        "gpu",
        "gpu/test_dma.py::test_a_load_is_held_though_one_of_its_step_has_ended",
        Edit(
            "client/ecd_client/device/copies.py",
            "if shared is None or not shared.is_open:",
            "if shared is None:",
        ),
    ),
    "a step's loads are used though their end could not be marked": Bug(
        "gpu",
        "gpu/test_dma.py::test_a_step_whose_end_cannot_be_marked_waits_for_its_loads",
        Edit(
            "client/ecd_client/device/copies.py",
            "came = self._outlast(stream)  # without an error all loads are over",
            "came = None",
        ),
    ),
    "a code that the bindings do not know passes every handler": Bug(
        "gpu",
        "gpu/test_dma.py::test_a_code_that_the_bindings_do_not_know_is_a_failed_call",
        Edit(
            "proto/ecd_proto/cuda.py",
            "except (KeyError, ValueError) as error:",
            "except MemoryError as error:",
        ),
    ),
    "a wait for copies ends with an exception of a signal's handler": Bug(
        "gpu",
        "gpu/test_dma.py::test_a_put_interrupted_before_it_waits_does_so_all_the_same[timeout]",
        Edit(
            "client/ecd_client/device/completions.py",
            "has_failed = has_failed or interruptions >= MAX_INTERRUPTIONS",
            "has_failed = True",
        ),
    ),
    "a put takes a place for a row that cannot be packed": Bug(
        "invariant 3",
        "integration/test_client.py::test_what_cannot_be_packed_or_timed_takes_nothing",
        Edit(
            "client/ecd_client/shared/puts.py",
            "            put, pool = self._last + 1, self._pool.number\n",
            "            put, pool, _ = self._last + 1, self._pool.number, self._places.pop()\n",
        ),
    ),
    "an API server reads memory of any user": Bug(
        "security",
        "integration/test_shared_namespace.py",
        Edit(
            "client/ecd_client/vllm/base/identity/shared_namespace.py",
            " and found.st_uid == os.geteuid()",
            "",
        ),
    ),
    "the HTTP port answers another site": Bug(
        "security",
        "browser/test_status_page.py",
        Edit("ecd/ops/http_port.py", "            check_host(environ)\n", ""),
    ),
    # -- restarts ------------------------------------------------------------------------------
    "bytes that changed over a restart are served": Bug(
        "invariant 1",
        "integration/test_warm_restart.py",
        Edit(
            "ecd/memory/recovery.py",
            "if checksum == leftover.checksum:",
            "if checksum is not None:",
        ),
    ),
    "a put without a row is lost by kill -9": Bug(
        "invariant 11",
        "integration/test_kill.py",
        Edit(
            "ecd/memory/leftovers.py",
            "            if not given_away:\n                for put",
            "            if given_away is None:\n                for put",
        ),
    ),
    "an older daemon's row without a checksum is believed": Bug(
        "reading-without-a-call",
        "integration/test_kill.py",
        Edit(
            "ecd/memory/leftovers.py",
            "given_away |= not _header(index)[RECOVERING_WORD]",
            "given_away |= False",
        ),
    ),
    "a daemon killed while its pool grows loses its entries": Bug(
        "reading-without-a-call",
        "integration/test_warm_restart.py",
        Edit(
            "ecd/memory/leftovers.py",
            "max(_header(index)[POOL_BYTES_WORD] for _, index in same) or stat.st_size",
            "stat.st_size",
        ),
    ),
    "a pool that cannot grow keeps the length it was to have": Bug(
        "reading-without-a-call",
        "integration/test_warm_restart.py",
        Edit(
            "ecd/memory/host.py",
            "            if not was_served:",
            "            if keep and not was_served:",
        ),
    ),
    # -- other nodes ---------------------------------------------------------------------------
    "a hint leads to any node": Bug(
        "nodes",
        "simulation/test_hints.py",
        Edit(
            "ecd/cluster/peers/admission.py",
            "return _Standing.HINTED if is_within(host, self._networks) else _Standing.UNKNOWN",
            "return _Standing.HINTED",
        ),
    ),
    "a node of another zone comes first": Bug(
        "nodes",
        "cluster/test_directory.py",
        Edit(
            "ecd/cluster/peers/candidates.py",
            "candidate.zone != self._zone",
            "candidate.zone == self._zone",
        ),
    ),
    "a making ends while its encoder works on it": Bug(
        "nodes",
        "simulation/test_makers.py",
        Edit("ecd/live/makings.py", " or self.locks.is_key_locked(key)", ""),
    ),
    "a making ends with nobody but its session": Bug(
        "nodes",
        "simulation/test_makers.py",
        Edit("ecd/live/makings.py", "return [] if key in self else self.take([key])", "return []"),
    ),
    "the note of a maker is not renewed": Bug(
        "nodes",
        "simulation/test_makers.py",
        Edit(
            "ecd/cluster/directory/redis_publisher.py",
            'await self._begin_making(dict.fromkeys(made[start : start + BATCH], ""))',
            "assert made[start]",
        ),
    ),
    "a flight that waits for a maker ends as any other": Bug(
        "nodes",
        "simulation/test_makers.py",
        Edit(
            "ecd/cluster/fetcher.py",
            "self.deliveries.timeout_s + flight.patience_s",
            "self.deliveries.timeout_s",
        ),
    ),
    "a client without an encoder is told to encode": Bug(
        "nodes",
        "simulation/test_fetch_or_encode.py",
        Edit(
            "ecd/cluster/deliveries.py",
            "if flight.is_needed or lease.data:",
            "if lease.data:",
        ),
    ),
    "a small entry is compared with its encoding": Bug(
        "nodes",
        "unit/test_rates.py",
        Edit(
            "ecd/cluster/peers/rates.py",
            "return nbytes >= LEAST_BYTES and",
            "return nbytes > 0 and",
        ),
    ),
    "tcp in the place of the transport that was asked for": Bug(
        "nodes",
        "cluster/test_fetch.py",
        Edit(
            "ecd/cluster/transport/engine.py",
            "if self.protocol != protocol:",
            'if self.protocol == "":',
        ),
    ),
    "bytes that come with a lease are not verified": Bug(
        "nodes",
        "cluster/test_failures.py",
        Edit(
            "ecd/cluster/deliveries.py",
            "if fold(digests(memoryview(lease.data))) != lease.checksum:",
            "if lease.checksum is None:",
        ),
    ),
    "the pool is registered writable over tcp": Bug(
        "nodes",
        "cluster/test_mooncake.py",
        Edit(
            "ecd/cluster/cluster.py",
            'readable if config.protocol == "tcp" else writable',
            "writable",
        ),
    ),
    "two nodes wait for each other's disk": Bug(
        "nodes",
        "simulation/test_disk.py",
        Edit(
            "ecd/live/flights.py",
            "        if flight is not None and flight.is_remote:\n",
            "        if flight is not None and flight.key != key:\n",
        ),
    ),
    "two nodes that read ahead wait for each other": Bug(
        "nodes",
        "simulation/test_fetch.py",
        Edit(
            "ecd/rpc/peer/inbound_link.py",
            "                and not self._memory.is_speculative(key)\n",
            "",
        ),
    ),
    "a fetched entry is as old as its stay": Bug(
        "eviction",
        "simulation/test_fetch.py",
        Edit("ecd/cluster/deliveries.py", "            lease.age_s,\n", "            0.0,\n"),
    ),
    "a hand-over counts as an encode saved": Bug(
        "metrics",
        "integration/test_counters.py",
        Edit(
            "ecd/core/evictor.py",
            "is_handover = self._entries.use(entry, now_s, for_another=for_another)",
            "is_handover = self._entries.use(entry, now_s, for_another=for_another) and not now_s",
        ),
    ),
    "a miss counts for no namespace": Bug(
        "metrics",
        "integration/test_counters.py",
        Edit("ecd/memory/session_page.py", "if misses else ()", "if misses < 0 else ()"),
    ),
    "a miss counts for its client's namespace alone": Bug(
        "metrics",
        "integration/test_counters.py",
        Edit(
            "client/ecd_client/shared/index.py",
            "number = namespace and self._names.number_of(namespace)",
            "number = 0",
        ),
    ),
    "a namespace's misses outrun their sum": Bug(
        "metrics",
        "unit/test_shared_index.py",
        Edit("ecd/memory/session_page.py", "now[word]), left)", "now[word]), misses)"),
    ),
    "a fetch forgets that the entry is handed over": Bug(
        "metrics",
        "cluster/test_fetch.py",
        Edit("ecd/rpc/peer/inbound_link.py", "is_handover=leased.is_handover", "is_handover=False"),
    ),
    "a look that finds nothing is a miss": Bug(
        "metrics",
        "integration/test_counters.py",
        Edit(
            "ecd/rpc/cache/cache_service.py",
            "(True, True): Answer.LOOK,",
            "(True, True): Answer.PIN,",
        ),
    ),
    "a consumer counts a lookup, not the load": Bug(
        "metrics",
        "e2e/test_counted.py",
        Edit(
            "client/ecd_client/vllm/scheduler/lookup.py",
            "item, may_come = self._client.get_now(wanted.identifier, is_use=False)",
            "item, may_come = self._client.get_now(wanted.identifier)",
        ),
    ),
    "a Redis that has just failed is asked again": Bug(
        "nodes",
        "simulation/test_directory.py",
        Edit(
            "ecd/cluster/directory/redis_health.py",
            "self._silent_until_s = now_s + PAUSE.first_s",
            "self._silent_until_s = now_s",
        ),
    ),
    "hints wait for a Redis that has just failed": Bug(
        "nodes",
        "simulation/test_directory.py",
        Edit(
            "ecd/cluster/directory/redis_lookup.py",
            "if now_s < until_s or self._health.is_silent:",
            "if now_s < until_s:",
        ),
    ),
    "a hint displaces a node of the settings": Bug(
        "nodes",
        "simulation/test_hints.py",
        Edit(
            "ecd/cluster/peers/peers.py",
            "(self._is_in_use(peer) or peer.node in self._configured)",
            "self._is_in_use(peer)",
        ),
    ),
    "any number wait for a node that only hints name": Bug(
        "nodes",
        "simulation/test_hints.py",
        Edit(
            "ecd/cluster/peers/peers.py",
            "if is_stranger and self._waiting_for_strangers >= MAX_WAITING_FOR_STRANGERS:",
            "if is_stranger and self._waiting_for_strangers < 0:",
        ),
    ),
    "an entry that may not be kept is read": Bug(
        "nodes",
        "simulation/test_fetch.py",
        Edit(
            "ecd/cluster/deliveries.py",
            """if lease is None or self._live.cache.retention.is_expired(
                flight.key.namespace, lease.age_s
            ):""",
            "if lease is None:",
        ),
    ),
    "a session ends what another one makes": Bug(
        "nodes",
        "simulation/test_makers.py",
        Edit(
            "ecd/live/makings.py",
            "making is not None and session in (None, making.session)",
            "making is not None",
        ),
    ),
    "memory that a disk may still write is reused": Bug(
        "invariant 1",
        "simulation/test_disk.py",
        Edit(
            "ecd/memory/disk/disk_reads.py",
            "            self._live.abandon(self._session, entry)",
            "            self._live.abort(self._session, entry)",
        ),
    ),
    "locate says that it heard all": Bug(
        "nodes",
        "simulation/test_locate.py",
        Edit(
            "ecd/cluster/cluster.py",
            'return found, was_heard and state.kind != "none"',
            'return found, state.kind != "none"',
        ),
    ),
    # -- clients -------------------------------------------------------------------------------
    "a row that is half written is read": Bug(
        "reading-without-a-call",
        "unit/test_shm.py",
        Edit(
            "proto/ecd_proto/shm/rows.py",
            "return entry != 0 and bool(crc == crc32(row[_CHECKED]))",
            "return entry != 0 and crc is not None",
        ),
    ),
    "a field of vLLM's configuration is left out of the namespace": Bug(
        "invariant 9",
        "e2e/test_identity.py",
        Edit(
            "client/ecd_client/vllm/base/identity/identity.py",
            '*("media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize"),',
            '*("media_io_kwargs", "mm_device_do_normalize"),',
        ),
    ),
    "weights are named without some of their tensors": Bug(
        "vllm",
        "unit/test_digest.py",
        Edit(
            "client/ecd_client/vllm/base/identity/digest.py",
            "regions += _blocks(region, TENSOR_BLOCKS)",
            "regions += _blocks(region, 1)",
        ),
    ),
    "weights that were written through a link are the hub's": Bug(
        "vllm",
        "unit/test_digest.py",
        Edit(
            "client/ecd_client/vllm/base/identity/sources.py",
            'f"commit-{commit}-{digest.hex}" if commit',
            'f"commit-{commit}" if commit',
        ),
    ),
    "an engine is told of another one with each that comes": Bug(
        "vllm",
        "unit/test_descriptions.py",
        Edit("ecd/rpc/cache/engines.py", "self._told.add(session)", "self._told.discard(session)"),
    ),
    "engines that an operator keeps apart are told of each other": Bug(
        "vllm",
        "unit/test_descriptions.py",
        Edit(
            "proto/ecd_proto/engines.py",
            "not (NAMESPACE in self.parts and NAMESPACE in other.parts)",
            "self.parts != other.parts",
        ),
    ),
    "a part of a namespace is shown as it came": Bug(
        "security",
        "unit/test_descriptions.py",
        Edit(
            "proto/ecd_proto/engines.py",
            "all(map(is_value, message.parts.values()))",
            "all(message.parts.values())",
        ),
    ),
    "a step of training is the same in every run": Bug(
        "vllm",
        "unit/test_sources.py",
        Edit(
            "client/ecd_client/vllm/base/identity/identity.py",
            'return f"run-{_readable(run)}|{named}" if run else named',
            "return named",
        ),
    ),
    "weights that a sleep has dropped are shared": Bug(
        "vllm",
        "e2e/test_identity.py::test_engines_share_on_after_what_leaves_their_weights_alone",
        Edit(
            "client/ecd_client/vllm/base/engine_core.py",
            'call["level"] == KEEPS_WEIGHTS and is_awake',
            'call["level"] > 0 and is_awake',
        ),
    ),
    "a number of metadata may be a float": Bug(
        "security",
        "unit/test_placeholders.py",
        Edit(
            "proto/ecd_proto/placeholders.py",
            "all(type(number) is int and number > 0 for number in numbers)",
            "all(type(number) in (int, float) and number > 0 for number in numbers)",
        ),
    ),
    "an entry's metadata are believed as the daemon takes a put": Bug(
        "security",
        "integration/test_daemon.py::test_impossible_requests_are_refused_and_change_nothing",
        Edit(
            "ecd/base/wire.py",
            "    if _is_nonsense(content.metadata):",
            "    if content.nbytes < 0:",
        ),
    ),
    "metadata of a grid that no embeddings fit are believed": Bug(
        "security",
        "unit/test_placeholders.py",
        Edit(
            "proto/ecd_proto/placeholders.py",
            "        if any(side % (merge or 1) for grid in grids for side in grid[1:]):",
            "        if not grids and merge == 0:",
        ),
    ),
    "a request's nonsense is scheduled": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/scheduler/scheduler.py",
            "            if is_wrong or (brought is not None",
            "            if (brought is not None",
        ),
    ),
    "a put that is listed between two looks is not shown": Bug(
        "reading-without-a-call",
        "integration/test_puts.py",
        Edit(
            "client/ecd_client/shared/index.py",
            "listed = self._find(record)  # perhaps since before the claims were read",
            "listed = None",
        ),
    ),
    "the lock of what a step encodes ends amid the step": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/scheduler/encodes.py",
            "            self._lock_for(wanted.identifier, STEP_S)\n",
            "",
        ),
    ),
    "a lost load is looked at by steps alone": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit("client/ecd_client/vllm/scheduler/loads.py", "                self.look()\n", ""),
    ),
    "the decoder of a role is part of its namespace": Bug(
        "vllm",
        "e2e/test_identity.py::test_equal_flags_give_each_role_one_namespace",
        Edit(
            "client/ecd_client/vllm/base/identity/identity.py",
            "_without_device(_without_chosen_decoder(value))",
            "_without_device(value)",
        ),
    ),
    "scales of fp8 are named by their path": Bug(
        "vllm",
        "e2e/test_identity.py::test_the_namespace_holds_what_changes_embeddings_and_not_where_work_is_done",
        Edit(
            "client/ecd_client/vllm/base/identity/identity.py",
            "return content_of(value) or value",
            "return value",
        ),
    ),
    "metadata of a directory are told as they came": Bug(
        "security",
        "unit/test_link.py",
        Edit(
            "ecd/base/wire.py",
            'return b"" if _is_nonsense(metadata) else metadata',
            "return metadata",
        ),
    ),
    "what a drafter reads further on is not locked": Bug(
        "vllm",
        "e2e/test_one_node.py::test_what_a_step_encodes_is_left_to_this_engine_by_others",
        Edit(
            "client/ecd_client/vllm/base/compat.py",
            "if drafts is not None and drafts.use_eagle():",
            "if drafts is not None and not drafts.use_eagle():",
        ),
    ),
    "a step is taken to encode no more than it computes": Bug(
        "vllm",
        "e2e/test_one_node.py::test_what_a_step_encodes_is_left_to_this_engine_by_others",
        Edit(
            "client/ecd_client/vllm/base/compat.py",
            "budget.encoder_compute_budget",
            "scheduler.max_num_encoder_input_tokens",
        ),
    ),
    "workers of two context ranks report as one": Bug(
        "vllm",
        "e2e/test_one_node.py::test_each_worker_that_loads_has_a_number_of_its_own",
        Edit(
            "client/ecd_client/vllm/worker/worker.py",
            "context.rank_in_group * tensor.world_size + tensor.rank_in_group",
            "tensor.rank_in_group",
        ),
    ),
    "an engine starts that vLLM never answers with": Bug(
        "vllm",
        "e2e/test_apart.py",
        Edit(
            "client/ecd_client/vllm/base/settings.py",
            "if transfer_config.is_encode_only:",
            "if not transfer_config.ec_connector:",
        ),
    ),
    "a salt counts for nothing": Bug(
        "vllm",
        "unit/test_item_names.py",
        Edit(
            "client/ecd_client/vllm/base/names.py", "    if salt:\n", "    if salt and not name:\n"
        ),
    ),
    "embeddings that a client brought have a picture's name": Bug(
        "vllm",
        "unit/test_item_names.py",
        Edit(
            "client/ecd_client/vllm/base/names.py",
            "    if brought_with(feature) is not None:\n",
            "    if not named:\n",
        ),
    ),
    "an item's own prefix counts as its name": Bug(
        "vllm",
        "unit/test_item_names.py",
        Edit(
            "client/ecd_client/vllm/base/names.py",
            "if getattr(feature, _NAMED, None) == feature.identifier:",
            "if feature.identifier.startswith(stored_name('', salt) or ' '):",
        ),
    ),
    "a client's name is that of embeddings that another brought": Bug(
        "vllm",
        "unit/test_item_names.py",
        Edit(
            "client/ecd_client/vllm/base/names.py",
            "name.startswith((SALTED, ALONE, OUTLINE))",
            "name.startswith((SALTED, OUTLINE))",
        ),
    ),
    "a video is announced without the rate of its frames": Bug(
        "vllm",
        "e2e/test_metadata.py",
        Edit(
            "client/ecd_client/vllm/base/fields.py",
            "return value.numel() == 1 and bool(value == ASSUMED[name])",
            "return value.numel() == 1",
        ),
    ),
    "lists that no server takes are announced": Bug(
        "vllm",
        "e2e/test_metadata.py",
        Edit(
            "client/ecd_client/vllm/base/metadata.py",
            "and not any(isinstance(each, list) for",
            "and not any(isinstance(each, str) for",
        ),
    ),
    "an engine keeps its lock of what it does not encode": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/scheduler/encodes.py",
            "            if self._is_producer and not wanted.gave_way:",
            "            if self._is_producer:",
        ),
    ),
    "a connector for KV sees names without the salt": Bug(
        "vllm",
        "e2e/test_requests.py::test_a_salted_request_beside_a_connector_for_kv_is_answered",
        Edit(
            "client/ecd_client/vllm/base/engine_core.py",
            "            connector.name_items(request)",
            "            pass",
        ),
    ),
    "metadata of a picture that the prefix cache has count for nothing": Bug(
        "vllm",
        "e2e/test_attacker.py::test_requests_that_did_harm_do_none",
        Edit(
            "client/ecd_client/vllm/scheduler/scheduler.py",
            "        if other := self._computed.others_in(request, state, num_computed_tokens):",
            "        if other := None:",
        ),
    ),
    "a picture's last block is named in two ways": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/base/engine_core.py",
            "            connector.name_items(request)",
            "            pass",
        ),
    ),
    "tokens of an item of which its entry says nothing are used": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/scheduler/computed.py",
            "self.remember(identifier, self._metadata.packed(feature))",
            "self.remember(identifier, self._metadata.of_item(feature).stored)",
        ),
    ),
    "tokens are judged once, though a preemption has them looked up anew": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/scheduler/request_items.py",
            "        self.judged = self.noted = 0  # its tokens may be others' now",
            "        self.noted = 0",
        ),
    ),
    "tokens computed with other metadata are used": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/scheduler/computed.py",
            "            return noted == said.stored",
            "            return True",
        ),
    ),
    "an entry without metadata serves whatever a request says": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/scheduler/wanted.py",
            "said is None or said.is_of(self.item.metadata)",
            "not self.item.metadata or said is None or said.is_of(self.item.metadata)",
        ),
    ),
    "metadata are announced that the entry has not": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/base/metadata.py",
            "if said is None or not said.is_of(metadata) or not",
            "if said is None or not",
        ),
    ),
    "tokens that are to be loaded are joined to any": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/scheduler/computed.py",
            "if not self._may_join(item, item.described):",
            "if not self._may_join(item, item.described) and is_taken:",
        ),
    ),
    "tokens that are to be loaded are judged once": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/scheduler/computed.py",
            "state.judged += is_taken",
            "state.judged += 1",
        ),
    ),
    "an item that says nothing of its place is scheduled": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/base/metadata.py",
            "return self._places_by_fields() or bool(",
            "return bool(",
        ),
    ),
    "a field that vLLM strips says where an item stands": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/base/metadata.py",
            "if must_stay and not placeholder.fields.keys() <= stay:",
            "if must_stay and not placeholder.fields:",
        ),
    ),
    "all of a field is read, however long it is": Bug(
        "vllm",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/base/metadata.py",
            "if any(is_long(data[name]) for name in wanted if name in data):",
            "if not data and wanted and feature.data:",
        ),
    ),
    "a name apart is no hexadecimal number": Bug(
        "vllm",
        "unit/test_item_names.py",
        Edit(
            "client/ecd_client/vllm/base/names.py",
            'SALTED, ALONE = "5a17ed0ecd", "a10e0ecd0d"',
            'SALTED, ALONE = "salt-", "alone-"',
        ),
    ),
    "the prefix cache takes a client's tensor for a picture": Bug(
        "vllm",
        "e2e/test_attacker.py::test_a_clients_tensor_is_not_taken_for_the_picture_of_its_name",
        Edit(
            "client/ecd_client/vllm/base/names.py",
            "    if brought_with(feature) is not None:",
            "    if brought_with(feature) is not None and is_private:",
        ),
    ),
    "a video of Qwen2.5-Omni without its media is a whole one": Bug(
        "vllm",
        "e2e/models/test_architectures.py::test_an_architecture",
        Edit(
            "client/ecd_client/vllm/base/fields.py",
            "name not in fields and not element.field.keep_on_cpu",
            "name not in fields",
        ),
    ),
    "a node that is tried again is not unreachable": Bug(
        "nodes",
        "simulation/test_hints.py",
        Edit(
            "ecd/cluster/peers/peers.py",
            "if peer.last_error:\n            return",
            "if peer.last_error and node not in self._connecting:\n            return",
        ),
    ),
    "a peer's answer may be about more keys than were asked for": Bug(
        "security",
        "unit/test_link.py",
        Edit(
            "ecd/cluster/peers/link.py",
            "return len(answer.found) == keys >= max(",
            "return len(answer.found) >= max(",
        ),
    ),
    "entries are evicted for a place that a hint names": Bug(
        "security",
        "simulation/test_hints.py",
        Edit(
            "ecd/core/pool/pool.py",
            "return is_below and self.rounded_bytes(nbytes) <= self.largest_free_bytes",
            "return is_below or nbytes <= self.nbytes",
        ),
    ),
    "a peer is answered that reads nothing": Bug(
        "security",
        "cluster/test_links.py",
        Edit(
            "ecd/rpc/peer/peer_service.py",
            "await link.outbox.room()",
            "assert link.outbox is not None",
        ),
    ),
    "an item without media may have any field": Bug(
        "security",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_client/vllm/base/compat.py",
            "if refused:",
            "if refused and not data:",
        ),
    ),
    "nobody looks at what comes without media": Bug(
        "security",
        "e2e/test_one_node.py::test_nothing_that_a_request_says_or_does_ends_the_scheduler",
        Edit(
            "client/ecd_vllm/__init__.py",
            'path.split(".")[:2] == CONNECTOR',
            'path.split(".")[:2] != CONNECTOR',
        ),
    ),
    "a place goes to one who leaves": Bug(
        "vllm",
        "unit/test_places.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/places.py",
            "next((turn for turn in self.turns if not turn.done()), None)",
            "next(iter(self.turns), None)",
        ),
    ),
    "one caller takes all places of the hop": Bug(
        "vllm",
        "unit/test_places.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/places.py",
            "if not self._free or self._held[asker.caller] >= self._share:",
            "if not self._free:",
        ),
    ),
    "one picture waits for all pictures of large requests": Bug(
        "vllm",
        "unit/test_places.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/places.py",
            "if self._goes_by_age or asker.media == 1:",
            "if chosen:",
        ),
    ),
    "a large request waits for all small ones": Bug(
        "vllm",
        "unit/test_places.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/places.py",
            "self._goes_by_age = not self._goes_by_age",
            "self._goes_by_age = not after",
        ),
    ),
    "a name that a client chose leaves encoders out": Bug(
        "vllm",
        "integration/test_encode_hop.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "        if look.names is None:",
            "        if not look.promised:",
        ),
    ),
    "a video has as long as a picture": Bug(
        "vllm",
        "integration/test_encode_hop_media.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            " + min(sum(seconds.values()), MAX_SECONDS)",
            " + min(0.0, MAX_SECONDS)",
        ),
    ),
    "an encoder that hangs holds a video up for all of its time": Bug(
        "vllm",
        "integration/test_encode_hop_media.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "if not answer.done() and not alive.result():",
            "if answer.done() and not alive.result():",
        ),
    ),
    "an encoder that was late with a video holds up the next one": Bug(
        "vllm",
        "integration/test_encode_hop_media.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "until_s > alive_by_s and not encoder.is_hurried(began_s)",
            "until_s > alive_by_s",
        ),
    ),
    "an outline is waited for that its encoder does not store": Bug(
        "vllm",
        "integration/test_encode_hop_media.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "if answer.has_outline and missing.can_outline:",
            "if missing.can_outline:",
        ),
    ),
    "who joins a call waits for as long as another request": Bug(
        "vllm",
        "integration/test_encode_hop_bounds.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "left_s = until_s - clock.now_s() if until_s < flight.until_s else None",
            "left_s = None",
        ),
    ),
    "an encoder is asked once whether it lives": Bug(
        "vllm",
        "integration/test_encode_hop_bounds.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "pause_s = bound_s = self._within_s",
            "pause_s = bound_s = until_s",
        ),
    ),
    "a video that an answer cannot describe leaves its encoder out": Bug(
        "vllm",
        "integration/test_encode_hop_bounds.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "if hints or self._checked(missing.kind, said) or self._is_here(missing):",
            "if self._is_here(missing):",
        ),
    ),
    "a medium over which encoders end goes to all of them": Bug(
        "vllm",
        "integration/test_encode_hop_bounds.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "if lost >= MAX_LOST:",
            "if lost < 0:",
        ),
    ),
    "an encoder decodes otherwise while its middleware begins": Bug(
        "vllm",
        "e2e/test_one_node.py",
        Edit(
            "client/ecd_client/vllm/middleware/reuse.py",
            "if body is not None and DECODING.encode() in body:",
            "if body is None:",
        ),
    ),
    "an encoder that decodes otherwise ends the search": Bug(
        "vllm",
        "integration/test_encode_hop_media.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "if error.is_by_all:",
            "if error:",
        ),
    ),
    "videos on their way have no bound in bytes": Bug(
        "vllm",
        "integration/test_encode_hop_media.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "if self._sent_bytes and self._sent_bytes + nbytes > MAX_SENT_BYTES:",
            "if nbytes < 0:",
        ),
    ),
    "a header says how long a video is waited for, whatever its bytes": Bug(
        "vllm",
        "unit/test_sizes.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/sizes.py",
            "min(frames.total, nbytes // _MIN_FRAME_BYTES)",
            "frames.total",
        ),
    ),
    "what encoders promise of one request has no bound in all": Bug(
        "vllm",
        "integration/test_encode_hop.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "if may_stand_together(look.found",
            "if promises or may_stand_together(look.found",
        ),
    ),
    "a request that failed without its media is held against others": Bug(
        "vllm",
        "unit/test_rests.py",
        Edit(
            "client/ecd_client/vllm/middleware/rests.py",
            "self._rests.get(names, (0.0, 0.0))",
            "next(iter(self._rests.values()), (0.0, 0.0))",
        ),
    ),
    "a video that a client has named gets another name": Bug(
        "vllm",
        "unit/test_media.py",
        Edit(
            "client/ecd_client/vllm/middleware/media.py",
            "return self.kind != IMAGE and not self.is_chosen",
            "return self.kind != IMAGE",
        ),
    ),
    "what was fetched is lost where a request brings its media at last": Bug(
        "vllm",
        "unit/test_media.py",
        Edit(
            "client/ecd_client/vllm/middleware/media.py",
            "        if self.is_settled:\n",
            "        if self.is_settled and not self.media:\n",
        ),
    ),
    "a name of a video's bytes does not say how they are decoded": Bug(
        "vllm",
        "e2e/test_metadata.py::test_a_video_or_a_sound_has_the_name_of_its_bytes_in_the_engine",
        Edit(
            "client/ecd_client/vllm/middleware/naming.py",
            "self._hash(ecd=_FORM, how=how, **",
            "self._hash(ecd=_FORM, **",
        ),
    ),
    "a request's fetched bytes have no bound": Bug(
        "vllm",
        "e2e/test_metadata.py::test_a_video_or_a_sound_has_the_name_of_its_bytes_in_the_engine",
        Edit(
            "client/ecd_client/vllm/middleware/fetching.py",
            "if look.fetched_bytes + nbytes > MAX_FETCHED_BYTES:",
            "if nbytes > MAX_FETCHED_BYTES:",
        ),
    ),
    "an encoder gives a video a name that engines without the middleware do not know": Bug(
        "vllm",
        "e2e/test_reuse_media.py::"
        "test_an_encoder_gives_no_names_and_engines_find_what_it_stored_by_vllms",
        Edit(
            "client/ecd_client/vllm/middleware/requests.py",
            "if self._only_encodes and any(",
            "if self._only_encodes and not any(",
        ),
    ),
    "an outline is taken for an entry with other rows": Bug(
        "vllm",
        "e2e/test_reuse_outlines.py::"
        "test_a_wrong_outline_is_not_taken_or_the_request_is_made_again",
        Edit(
            "client/ecd_client/vllm/middleware/entries.py",
            "self._metadata.fields_for(kind) and outline.embeddings == rows",
            "self._metadata.fields_for(kind)",
        ),
    ),
    "a request takes the outline that another means by its name": Bug(
        "vllm",
        "e2e/test_metadata.py::test_a_video_or_a_sound_has_the_name_of_its_bytes_in_the_engine",
        Edit(
            "client/ecd_client/vllm/middleware/outlines.py",
            "return values[0] if values and all(value == values[0] for value in values) else None",
            "return values[0] if values else None",
        ),
    ),
    "an outline rounds the times of a video": Bug(
        "vllm",
        "e2e/models/test_architectures.py::test_an_architecture[qwen3_vl]",
        Edit(
            "client/ecd_client/vllm/middleware/outlines.py",
            "torch.float64 if isinstance",
            "torch.float32 if isinstance",
        ),
    ),
    "outlines stay for requests that bring names alone": Bug(
        "vllm",
        "e2e/test_reuse_outlines.py::test_a_picture_that_a_client_has_named_keeps_that_name",
        Edit(
            "client/ecd_client/vllm/middleware/outlines.py",
            "                all_[name].remove(value)\n                if not all_[name]:",
            "                if not all_[name]:",
        ),
    ),
    "an outline has tokens that its model does not": Bug(
        "vllm",
        "unit/test_outlines.py",
        Edit(
            "client/ecd_client/vllm/middleware/outline.py",
            "all(0 <= token < vocabulary for",
            "all(token is not None for",
        ),
    ),
    "a client may name an item as an outline is": Bug(
        "vllm",
        "unit/test_outlines.py",
        Edit(
            "client/ecd_client/vllm/base/names.py",
            "name.startswith((SALTED, ALONE, OUTLINE))",
            "name.startswith((SALTED, ALONE))",
        ),
    ),
    "ECD_PIN=off pins": Bug(
        "gpu",
        "gpu/test_dma.py",
        Edit(
            "client/ecd_client/device/dma.py",
            'not in ("off", "0", "false", "no")',
            'not in ("0", "false", "no")',
        ),
    ),
    "the pool is pinned in one call": Bug(
        "gpu",
        "gpu/test_dma.py",
        Edit(
            "client/ecd_client/device/pinned.py",
            "PINNED_PIECE_BYTES = 32 << 20",
            "PINNED_PIECE_BYTES = 1 << 40",
        ),
    ),
    "a fork leaves a killed engine's memory its second": Bug(
        "gpu",
        "gpu/test_dma.py::test_a_process_that_forks_says_that_its_copies_may_outlast_it",
        Edit(
            "client/ecd_client/device/dma.py",
            "            dma.note_fork()",
            "            pass",
        ),
    ),
    "copies that outlast their process are waited for as others": Bug(
        "gpu",
        "integration/test_dma_grace.py::test_a_killed_clients_memory_waits_for_its_device",
        Edit("ecd/rpc/cache/sessions.py", "word == DMA_OUTLASTS", "word == -1"),
    ),
    "all engines of a node pin at once": Bug(
        "gpu",
        "gpu/test_dma.py::test_engines_pin_in_turn",
        Edit("client/ecd_client/device/pinned.py", "fcntl.LOCK_EX |", "fcntl.LOCK_SH |"),
    ),
    "an engine that is stopped as it pins stops the others": Bug(
        "gpu",
        "gpu/test_dma.py::test_an_engine_that_is_stopped_as_it_pins_stops_no_other",
        Edit(
            "client/ecd_client/device/pinned.py",
            "if clock.now_s() >= until_s:",
            "if until_s < 0:",
        ),
    ),
    # -- figures -------------------------------------------------------------------------------
    "a wait that ends with nothing is no miss": Bug(
        "invariant 14",
        CACHE,
        Edit(
            "ecd/core/readers.py",
            "            self.count_miss(wait.key, wait.answer)\n        return (",
            "        return (",
        ),
    ),
    # -- encoders that register themselves -----------------------------------------------------
    "an encoder outlives its server's session": Bug(
        "vllm-middleware",
        "unit/test_descriptions.py",
        Edit(
            "ecd/rpc/cache/engines.py",
            "        self._registered.pop(session, None)\n",
            "",
        ),
    ),
    "an engine that shares nothing is an encoder": Bug(
        "vllm-middleware",
        "unit/test_descriptions.py",
        Edit("ecd/rpc/cache/engines.py", " if engine.stores}", "}"),
    ),
    "servers that register have no bound": Bug(
        "vllm-middleware",
        "unit/test_descriptions.py",
        Edit("ecd/rpc/cache/engines.py", "len(urls) >= MAX_ENCODERS", "not session"),
    ),
    "a server on all addresses is reached at none": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit("ecd/rpc/cache/engines.py", "encoder.reached_at(self._host), self", "encoder, self"),
    ),
    "other nodes hear of a server on loopback": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit(
            "ecd/cluster/peers/encoders.py", " if e.host == host or not is_loopback(e.host)]", "]"
        ),
    ),
    "an encoder on any host is called": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit("ecd/cluster/peers/encoders.py", "(is_within(host, self._networks) and", "(host and"),
    ),
    "a peer names an encoder on our loopback": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit("ecd/cluster/peers/encoders.py", " and not is_loopback(host)):", "):"),
    ),
    "a node that only hints name is asked for encoders": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit(
            "ecd/cluster/peers/encoders.py",
            "nodes = {*self._configured, ",
            "nodes = {*(peer.node for peer in self._peers), ",
        ),
    ),
    "a node speaks for another one's encoders": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit("ecd/cluster/peers/encoders.py", "replace(each, node=node)", "each"),
    ),
    "an older peer is asked for encoders": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit(
            "ecd/cluster/peers/link.py",
            "if not self.description.takes_find_encoders:",
            "if not self.alive:",
        ),
    ),
    "a peer may name any number of encoders": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit("ecd/cluster/peers/link.py", "len(answer.encoders) <= MAX_ENCODERS", "True"),
    ),
    "encoders of another namespace are named": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit("ecd/rpc/cache/cache_service.py", ' if namespace in ("", each.namespace)]', "]"),
    ),
    "each engine's question goes to all nodes": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit(
            "ecd/cluster/peers/encoders.py",
            "if self._asking is None or (self._asking.done() and now_s >= self._known_until_s):",
            "if now_s >= 0.0:",
        ),
    ),
    "a Redis that stands still hides encoders": Bug(
        "vllm-middleware",
        "simulation/test_encoders.py",
        Edit(
            "ecd/cluster/directory/redis_lookup.py",
            "if self._clock.now_s() < until_s or self._health.is_silent:\n            return nodes",
            "if self._health.is_silent:\n            return ()",
        ),
    ),
    "an engine sends itself pictures": Bug(
        "vllm-middleware",
        "unit/test_encoders.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/registered.py",
            " if each.engine != own_engine]",
            "]",
        ),
    ),
    "an engine that prefills gets pictures of others": Bug(
        "vllm-middleware",
        "unit/test_encoders.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/registered.py", "encode_only or others", "others"
        ),
    ),
    "an encoder that has left is called": Bug(
        "vllm-middleware",
        "unit/test_encoders.py",
        Edit("client/ecd_client/vllm/middleware/hop/encoders.py", " if each not in left]", "]"),
    ),
    "an encoder that stays forgets that it failed": Bug(
        "vllm-middleware",
        "unit/test_encoders.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encoders.py",
            "known.setdefault(url, Encoder(url))._listed_s = now_s",
            "known[url] = Encoder(url, _listed_s=now_s)",
        ),
    ),
    "a daemon's restart takes a hop's encoders away": Bug(
        "vllm-middleware",
        "integration/test_registered.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/registered.py",
            "self._engine), KEPT_S)",
            "self._engine), 0.0)",
        ),
    ),
    "encoders of the namespace before are kept": Bug(
        "vllm-middleware",
        "integration/test_registered.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/registered.py",
            "            self._hop.use([], 0.0)  # they store under another name\n",
            "",
        ),
    ),
    "an encoder that leaves during a call leaves a series": Bug(
        "vllm-middleware",
        "integration/test_registered.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "                    self._metrics.forget(encoder.url)\n",
            "                    pass\n",
        ),
    ),
    "the series of encoders that left add up": Bug(
        "vllm-middleware",
        "integration/test_registered.py",
        Edit(
            "client/ecd_client/vllm/middleware/hop/encode_hop.py",
            "            self._metrics.forget(gone.url)\n",
            "            pass\n",
        ),
    ),
    "another node's read counts as a hit here": Bug(
        "invariant 14",
        EXAMPLES,
        Edit(
            "ecd/core/readers.py",
            "            counters.peer_leases += 1\n",
            "            counters.hits += 1\n",
        ),
    ),
}

OWN = {
    **{
        f"simulation: {bug}": Bug(
            "nodes", f"simulation/test_simulation.py::test_a_bug_is_found[{bug}]"
        )
        for bug in SIMULATED
    },
    **{
        f"without {step}": Bug(
            "reading-without-a-call",
            f"integration/test_pins.py::test_without_this_step_a_reader_sees_wrong_bytes[{step}]",
        )
        for step in READING
    },
    **{
        f"without {rule}": Bug(
            "gpu",
            f"gpu/test_dma.py::test_without_this_rule_there_are_wrong_bytes_or_a_fault[{rule}]",
        )
        for rule in COPYING
    },
    **{
        f"without D1, {pool} pool": Bug("gpu", f"gpu/{test}[D1]")
        for pool, test in {
            "host": "test_dma.py::test_a_dead_engines_save_lands_in_no_other_entry",
            "device": "test_device_pool.py::"
            "test_a_dead_engines_memory_is_not_reused_while_its_copy_may_go_on",
        }.items()
    },
    **{
        f"device pool without {step}": Bug(
            "gpu",
            f"gpu/test_dma.py::test_without_this_step_copies_in_a_device_pool_are_wrong[{step}]",
        )
        for step in COPY_STEPS
    },
    "a scan finds no entry pinned": Bug(
        "invariant 1", "campaign/test_campaign.py::test_a_bug_is_found[pins]"
    ),
}
"""Put in by their tests."""

BUGS = {**EDITED, **OWN}
