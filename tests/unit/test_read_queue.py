"""The read queue against a network that delays, fails and hangs transfers and restarts peers."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ecd.base.checksum import digests
from ecd.base.clock import Clock
from ecd.cluster.transport.identity import IDENTITY_BYTES, VOUCHED_S, Identities
from ecd.cluster.transport.read_queue import (
    MAX_LARGE_READS_PER_PEER,
    MAX_READS_PER_PEER,
    POLL_S,
    READ_BYTES,
    SWEEP_S,
    ReadQueue,
)
from ecd.cluster.transport.reads import Reads
from ecd.cluster.transport.transfers import LANES, LARGE_BYTES, Ended, Progress, Read, RemoteExtent
from ecd_proto.mapped_file import MappedFile
from support.examples import drawn, draws
from support.waiting import within_hang

MIB = 1 << 20
STRIDE_BYTES = 1 << 30
"""Between the targets of two reads, and between the sources."""
IDENTITY_ADDRESS = 1 << 60
NOWHERE = 1 << 61
"""Not an address of any peer's memory: transfers from there fail."""
HANG_S = 3.0
"""Longest time that a transfer is under way: the engine's own limit."""
FETCH_S = 1.0
"""How long a read is wanted if it does not end before."""
SMALL = [0, 1, 4096, LARGE_BYTES]
LARGE = [LARGE_BYTES + 1, READ_BYTES, READ_BYTES + 1, 5 * READ_BYTES - 1]
MAX_LIVE = 150
FOREIGN = b"another node's m"
"""The identity that a lying peer claims for its engine."""


@dataclass
class Peer:
    """An engine's address, and the daemons that answered there one after the other."""

    name: str
    identity: bytes | None = None
    """None: nobody answers."""
    died_s: dict[bytes, float] = field(default_factory=dict)
    restarts: int = 0
    shown: bytes = b""
    """The identity that was read last."""
    identity_failures: int = 0
    """Reads of the identity that failed in a row."""


@dataclass(eq=False)
class Transfer:
    peer: Peer
    target: int
    source: int
    nbytes: int
    begun_s: float
    number: int
    read: Wanted | None
    """None: it reads the peer's identity."""
    brought: bytes | None = None
    """The identity of the daemon whose bytes were written."""
    progress: Progress = Progress.UNDER_WAY


@dataclass(eq=False)
class Wanted:
    """The model of one read."""

    read: Read
    peer: Peer
    number: int
    since_s: float
    doomed_s: float | None = None
    """When it was given up, or failed once too often."""
    arrived: dict[int, Transfer] = field(default_factory=dict)  # by offset
    in_flight: dict[int, Transfer] = field(default_factory=dict)
    failures: int = 0
    begun: int = 0
    overtaken_by: set[int] = field(default_factory=set)
    """Reads of which a piece began while this one waited for its first."""
    complete_since: int | None = None
    """The number of the last transfer begun when the last byte was reported."""
    verified: bool = False

    @property
    def nbytes(self) -> int:
        return self.read.source.nbytes

    @property
    def wants_more(self) -> bool:
        covered = sum(piece.nbytes for piece in (*self.arrived.values(), *self.in_flight.values()))
        return self.read.wanted and self.failures <= LANES and covered < self.nbytes


class Network:
    """An engine and its network, which do no more than the protocol `Transfers` promises."""

    def __init__(self, identities: Identities) -> None:
        self.identities = identities
        self.now_s = 1000.0
        self.refuses = 0
        self.open: dict[int, Transfer] = {}
        """Transfers that may still write, as nobody was told that they are over."""
        self.targets: dict[int, Wanted] = {}
        self.peers: dict[str, Peer] = {}
        self.numbers = itertools.count(1)
        self.began: Callable[[Transfer], None] = lambda _: None
        self.told: Callable[[Transfer], None] = lambda _: None

    def submit(self, engine: str, target: int, source: int, nbytes: int) -> int:
        number = next(self.numbers)
        slot = target - self.identities.scratch.address
        is_identity = 0 <= slot < self.identities.scratch.nbytes
        read = None if is_identity else self.targets[target // STRIDE_BYTES]
        transfer = Transfer(self.peers[engine], target, source, nbytes, self.now_s, number, read)
        for other in self.open.values():
            apart = other.target + other.nbytes <= target or target + nbytes <= other.target
            assert apart, "two transfers write to one place"
        self.began(transfer)
        self.open[number] = transfer
        if self.refuses:
            self.refuses -= 1
            transfer.progress = Progress.FAILED
        return number

    def progress(self, transfer: int) -> Progress:
        found = self.open[transfer]  # KeyError: the number means nothing any more
        if found.progress is not Progress.UNDER_WAY:
            del self.open[transfer]
            self.told(found)
        return found.progress

    def bring(self, transfer: Transfer) -> None:
        """Write the bytes that lie there now; whether they have arrived is told later."""
        if transfer.progress is not Progress.UNDER_WAY or transfer.brought is not None:
            return
        identity = transfer.peer.identity
        if identity is None or transfer.source == NOWHERE:
            transfer.progress = Progress.FAILED
            return
        transfer.brought = identity
        if transfer.read is None:
            offset = transfer.target - self.identities.scratch.address
            self.identities.scratch.view(offset, IDENTITY_BYTES)[:] = identity

    def end(self, transfer: Transfer, fails: bool) -> None:
        if transfer.progress is Progress.UNDER_WAY:
            over = fails or transfer.brought is None
            transfer.progress = Progress.FAILED if over else Progress.ARRIVED

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for transfer in self.open.values():
            if self.now_s - transfer.begun_s >= HANG_S:
                self.end(transfer, fails=True)


class ReadQueueMachine(RuleBasedStateMachine):
    @initialize(peers=st.integers(1, 3), slots=st.integers(1, 3))
    def create(self, peers: int, slots: int) -> None:
        self.identities = Identities(slots)
        self.slots = set(self.identities.free_slots)
        self.network = Network(self.identities)
        self.network.began, self.network.told = self.began, self.told
        self.live: list[Wanted] = []
        self.free_targets: list[int] = []
        self.numbers = itertools.count(1)
        self.queues: dict[str, ReadQueue] = {}
        for number in range(peers):
            peer = Peer(f"10.0.0.{number}")
            self.network.peers[peer.name] = peer
            self.start(peer)

    @property
    def peers(self) -> list[Peer]:
        return list(self.network.peers.values())

    # -- what is wanted ------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(
        which=st.integers(0, 2),
        sizes=st.lists(st.sampled_from(SMALL + LARGE), min_size=1, max_size=6),
        times=st.sampled_from([1, 1, 1, 30]),
        age_s=st.sampled_from([0.0, 0.0, 0.0, 0.001, VOUCHED_S, 0.5]),
        whose=st.sampled_from([*["the peer's"] * 6, "the last", "foreign", "nowhere"]),
    )
    def want(self, which: int, sizes: list[int], times: int, age_s: float, whose: str) -> None:
        peer = self.peers[which % len(self.peers)]
        last = list(peer.died_s)[-1]
        identity = {"the last": last, "foreign": FOREIGN}.get(whose, peer.identity or last)
        where = NOWHERE if whose == "nowhere" else IDENTITY_ADDRESS
        queue = self.queues.setdefault(
            peer.name, ReadQueue(peer.name, self.network, self.identities)
        )
        for nbytes in sizes * times:
            number = next(self.numbers)
            place = self.free_targets.pop() if self.free_targets else number
            source = RemoteExtent(peer.name, number * STRIDE_BYTES, nbytes, where, identity)
            read = Read(source, place * STRIDE_BYTES, self.network.now_s - age_s)
            wanted = Wanted(read, peer, number, self.network.now_s)
            if nbytes == 0:
                wanted.complete_since = next(self.network.numbers)
            self.network.targets[place] = wanted
            self.live.append(wanted)
            queue.add(read)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 1000), step=st.sampled_from([1, 7, 1000, 1000, 1000]))
    def give_up(self, which: int, step: int) -> None:
        for wanted in self.live[which % len(self.live) :: step]:
            self.stop_wanting(wanted)

    def stop_wanting(self, wanted: Wanted) -> None:
        wanted.read.wanted = False
        if wanted.doomed_s is None:
            wanted.doomed_s = self.network.now_s

    # -- the network ---------------------------------------------------------------------------

    @precondition(lambda self: self.network.open)
    @rule(
        which=st.integers(0, 1000),
        step=st.sampled_from([1, 1, 2, 1000]),
        what=st.sampled_from(["bring", "arrive", "arrive", "fail"]),
    )
    def transfers_end(self, which: int, step: int, what: str) -> None:
        transfers = list(self.network.open.values())
        for transfer in transfers[which % len(transfers) :: step]:
            if what != "fail":
                self.network.bring(transfer)
            if what != "bring":
                self.network.end(transfer, what == "fail")

    @rule(count=st.sampled_from([1, 5, LANES + 2, 200]))
    def engine_refuses_transfers(self, count: int) -> None:
        self.network.refuses = count

    @rule(which=st.integers(0, 2), loses=st.booleans(), restarts=st.booleans())
    def peer_dies(self, which: int, loses: bool, restarts: bool) -> None:
        peer = self.peers[which % len(self.peers)]
        if peer.identity is not None:
            peer.died_s[peer.identity] = self.network.now_s
            peer.identity = None
            for transfer in self.network.open.values():
                if loses and transfer.peer is peer:
                    self.network.end(transfer, fails=True)
        if restarts:
            self.network.now_s += VOUCHED_S  # nobody restarts in less
            self.start(peer)

    def start(self, peer: Peer) -> None:
        if peer.identity is None:
            peer.restarts += 1
            peer.identity = f"{peer.name}/{peer.restarts}".encode().ljust(IDENTITY_BYTES)
            peer.died_s[peer.identity] = float("inf")

    @rule(seconds=st.sampled_from([1e-6, 0.001, 0.001, 0.01, 0.01, SWEEP_S, HANG_S]))
    def time_passes(self, seconds: float) -> None:
        self.network.pass_time(seconds)

    # -- what the queue does -------------------------------------------------------------------

    @rule(
        count=st.sampled_from([1, 1, 2, 5, 40]),
        arrives=st.booleans(),
        seconds=st.sampled_from([0.0, 1e-6, 0.001]),
    )
    def turns(self, count: int, arrives: bool, seconds: float) -> None:
        """Several turns of a network that is fast and faultless meanwhile, or silent."""
        for _ in range(count):
            self.turn(0.0)
            self.network.pass_time(seconds)
            for transfer in self.network.open.values() if arrives else ():
                self.network.bring(transfer)
                self.network.end(transfer, fails=False)

    @rule(seconds=st.sampled_from([0.0, 0.001, VOUCHED_S]))
    def turn(self, seconds: float) -> None:
        """One turn of the polling thread, which may be held up between `poll` and the clock."""
        for wanted in self.live:
            if self.network.now_s - wanted.since_s >= FETCH_S:
                self.stop_wanting(wanted)
        for name, queue in list(self.queues.items()):
            for piece in queue.poll():
                wanted = self.wanted(piece.read)
                assert wanted.arrived[piece.offset].nbytes == piece.nbytes
                if sum(piece.nbytes for piece in wanted.arrived.values()) == wanted.nbytes:
                    wanted.complete_since = next(self.network.numbers)
            self.network.now_s += seconds
            for ended in queue.advance(self.network.now_s):
                self.ended(ended)
            self.bounds_hold_and_nobody_idles(name)
            if queue.is_empty:
                del self.queues[name]

    def wanted(self, read: Read) -> Wanted:
        return self.network.targets[read.target // STRIDE_BYTES]

    def began(self, transfer: Transfer) -> None:
        if transfer.read is None:
            assert transfer.nbytes == IDENTITY_BYTES
            return
        wanted, read = transfer.read, transfer.read.read
        offset = transfer.target - read.target
        assert transfer.source - read.source.address == offset
        assert wanted in self.live, "a read that is over"
        assert read.wanted, "a read that was given up"
        assert offset not in wanted.arrived, "this piece has arrived"
        assert 0 < transfer.nbytes <= READ_BYTES
        assert offset + transfer.nbytes <= wanted.nbytes
        wanted.in_flight[offset] = transfer
        wanted.begun += 1
        for other in self.live:
            alike = other.peer is wanted.peer and other.read.is_large == read.is_large
            if alike and other.begun == 0 and other.wants_more:
                assert other.number > wanted.number, "a later read comes first"
                assert wanted.number not in other.overtaken_by, "two turns in a row"
                other.overtaken_by.add(wanted.number)

    def told(self, transfer: Transfer) -> None:
        """The queue is told that a transfer is over: it no longer writes."""
        wanted, peer = transfer.read, transfer.peer
        arrived = transfer.progress is Progress.ARRIVED
        if wanted is None:
            peer.identity_failures = 0 if arrived else peer.identity_failures + 1
            if arrived:
                assert transfer.brought is not None
                peer.shown = transfer.brought
                for each in self.live:
                    since = each.complete_since
                    if each.peer is peer and since is not None and since < transfer.number:
                        each.verified |= transfer.brought == each.read.source.identity
            return
        offset = transfer.target - wanted.read.target
        del wanted.in_flight[offset]
        if arrived:
            wanted.arrived[offset] = transfer
        else:
            wanted.failures += 1
            if wanted.failures > LANES and wanted.doomed_s is None:
                wanted.doomed_s = self.network.now_s

    def ended(self, ended: Ended) -> None:
        wanted = self.wanted(ended.read)
        assert wanted in self.live, "it ends a second time"
        assert not wanted.in_flight, "a transfer may still write to the target"
        if ended.failure is None:
            self.is_right(wanted)
        else:
            self.has_cause(wanted, ended.failure)
        self.live.remove(wanted)
        place = ended.read.target // STRIDE_BYTES
        del self.network.targets[place]
        self.free_targets.append(place)

    def is_right(self, wanted: Wanted) -> None:
        """Every byte has arrived, and from the daemon that was asked for the lease."""
        read, peer = wanted.read, wanted.peer
        reached = 0
        for offset, transfer in sorted(wanted.arrived.items()):
            assert offset == reached, "a piece is missing"
            reached += transfer.nbytes
        assert reached == wanted.nbytes, "a piece is missing"
        identity = read.source.identity
        if not wanted.verified:
            assert peer.shown == identity, "an identity never seen there"
            assert self.network.now_s < read.asked_s + VOUCHED_S, "it took too long"
            assert wanted.failures == 0, "a connection broke"
        # Without a lease, granted by a daemon that was alive when it was asked, nobody believes it.
        if wanted.verified or peer.died_s.get(identity, float("inf")) >= read.asked_s:
            for transfer in wanted.arrived.values():
                assert transfer.brought == identity, "another daemon's bytes"

    def has_cause(self, wanted: Wanted, failure: str) -> None:
        is_foreign = wanted.peer.shown != wanted.read.source.identity
        causes = {
            "given up": not wanted.read.wanted,
            "another node's memory": is_foreign and wanted.complete_since is not None,
            f"{wanted.failures} reads failed": wanted.failures > LANES,
            f"{LANES} reads failed": wanted.peer.identity_failures > LANES,
        }
        assert causes[failure], failure

    # -- what always holds ---------------------------------------------------------------------

    def bounds_hold_and_nobody_idles(self, name: str) -> None:
        """After a turn of this peer's queue."""
        live = [wanted for wanted in self.live if wanted.peer.name == name]
        open_ = [each for each in self.network.open.values() if each.peer.name == name]
        pieces = [transfer for transfer in open_ if transfer.read is not None]
        large = [piece for piece in pieces if piece.read and piece.read.read.is_large]
        assert len(pieces) <= MAX_READS_PER_PEER
        assert len(large) <= MAX_LARGE_READS_PER_PEER
        assert len(open_) - len(pieces) <= 1, "one read of the identity at a time"
        small_is_full = (
            len(pieces) - len(large) >= MAX_READS_PER_PEER - 2 * MAX_LARGE_READS_PER_PEER
        )
        large_is_full = len(large) == MAX_LARGE_READS_PER_PEER
        is_checking = len(pieces) < len(open_) or not self.identities.free_slots
        for wanted in live:
            has_turn = not (large_is_full if wanted.read.is_large else small_is_full)
            if wanted.wants_more:
                assert not has_turn, "it waits for nothing, or a small read for large ones"
            elif wanted.doomed_s is not None and not wanted.in_flight:
                assert not has_turn or not wanted.read.wanted, "failed, and kept"
                late_s = self.network.now_s - wanted.doomed_s
                assert late_s < SWEEP_S + 1e-6, "given up, and kept"
            elif not wanted.in_flight:
                assert is_checking or (wanted.nbytes == 0 and not has_turn), "nobody checks it"
            assert self.network.now_s - wanted.since_s < FETCH_S + 2 * HANG_S + 1, "past its time"
        queue = self.queues[name]
        assert queue.is_empty == (not live and not open_)
        assert POLL_S[0] <= queue.pause(self.network.now_s) <= POLL_S[1]

    @invariant()
    def slots_are_free_or_written_to(self) -> None:
        free = self.identities.free_slots
        base = self.identities.scratch.address
        taken = {each.target - base for each in self.network.open.values() if each.read is None}
        assert len(set(free)) == len(free)
        assert taken.isdisjoint(free)

    def teardown(self) -> None:
        """Left alone, all ends: what is wanted arrives, and nothing is left."""
        if not hasattr(self, "network"):
            return
        self.network.refuses = 0
        for peer in self.peers:
            self.start(peer)
        for _ in range(1000):
            if not self.queues:
                break
            self.turns(1, arrives=True, seconds=1e-6)
        assert not self.live
        assert not self.network.open
        assert set(self.identities.free_slots) == self.slots


ReadQueueMachine.TestCase.settings = draws(60, steps=60)
TestReadQueue = drawn(ReadQueueMachine.TestCase)


# -- by example ------------------------------------------------------------------------------------

PEER, IDENTITY = "10.0.0.1", b"i" * IDENTITY_BYTES


class Scripted:
    """Transfers that end when the test says so, by number from 1."""

    def __init__(self, identities: Identities) -> None:
        self.identities = identities
        self.begun: list[tuple[int, int]] = []
        """Target and bytes of each."""
        self.over: dict[int, Progress] = {}

    def submit(self, engine: str, target: int, source: int, nbytes: int) -> int:
        self.begun.append((target, nbytes))
        return len(self.begun)

    def progress(self, transfer: int) -> Progress:
        return self.over.get(transfer, Progress.UNDER_WAY)

    def arrive(self, *transfers: int) -> None:
        for transfer in transfers:
            target, nbytes = self.begun[transfer - 1]
            slot = target - self.identities.scratch.address
            if 0 <= slot < self.identities.scratch.nbytes:
                self.identities.scratch.view(slot, nbytes)[:] = IDENTITY
            self.over[transfer] = Progress.ARRIVED


@pytest.fixture
def transfers() -> Scripted:
    return Scripted(Identities())


@pytest.fixture
def queue(transfers: Scripted) -> ReadQueue:
    return ReadQueue(PEER, transfers, transfers.identities)


def read_of(nbytes: int, target: int = 0, asked_s: float = 0.0) -> Read:
    return Read(RemoteExtent(PEER, 0, nbytes, IDENTITY_ADDRESS, IDENTITY), target, asked_s)


def turn_of(queue: ReadQueue, now_s: float) -> list[Ended]:
    queue.poll()
    return queue.advance(now_s)


def test_a_first_read_is_checked_and_the_next_is_vouched_for(
    queue: ReadQueue, transfers: Scripted
) -> None:
    first, second, third = read_of(4096), read_of(4096, asked_s=1.0), read_of(4096, asked_s=1.0)
    queue.add(first)
    assert turn_of(queue, 0.0) == []
    transfers.arrive(1)
    assert turn_of(queue, 0.001) == [], "nothing was seen of this peer"
    assert transfers.begun[-1][1] == IDENTITY_BYTES
    transfers.arrive(2)
    assert turn_of(queue, 0.002) == [Ended(first, None)]
    queue.add(second)
    queue.add(third)
    assert turn_of(queue, 1.0) == []
    transfers.arrive(3)
    assert turn_of(queue, 1.0 + VOUCHED_S / 2) == [Ended(second, None)]
    transfers.arrive(4)
    assert turn_of(queue, 1.0 + VOUCHED_S) == [], "a peer may have restarted by now"
    transfers.arrive(5)
    assert turn_of(queue, 1.1) == [Ended(third, None)]
    assert queue.is_empty


def test_a_check_counts_only_for_what_had_arrived_before_it(
    queue: ReadQueue, transfers: Scripted
) -> None:
    early, late = read_of(4096), read_of(4096)
    queue.add(early)
    queue.add(late)
    turn_of(queue, 1.0)
    transfers.arrive(1)
    turn_of(queue, 1.1)
    transfers.arrive(2)  # while 3 reads the identity for `early`
    turn_of(queue, 1.2)
    transfers.arrive(3)
    assert turn_of(queue, 1.3) == [Ended(early, None)]
    transfers.arrive(4)
    assert turn_of(queue, 1.4) == [Ended(late, None)]


def test_a_read_given_up_ends_when_its_last_transfer_does(
    queue: ReadQueue, transfers: Scripted
) -> None:
    read = read_of(6 * READ_BYTES)
    queue.add(read)
    turn_of(queue, 1.0)
    assert [nbytes for _, nbytes in transfers.begun] == [READ_BYTES] * MAX_LARGE_READS_PER_PEER
    read.wanted = False
    transfers.arrive(1, 2, 3)
    assert turn_of(queue, 60.0) == [], "the fourth may still write"
    transfers.over[4] = Progress.FAILED
    assert turn_of(queue, 60.1) == [Ended(read, "given up")]
    assert queue.is_empty


def test_a_pause_depends_on_the_small_reads_in_flight(
    queue: ReadQueue, transfers: Scripted
) -> None:
    shortest_s, longest_s = POLL_S
    queue.add(read_of(8 * READ_BYTES))
    turn_of(queue, 1.0)
    assert queue.pause(1.0) == longest_s
    queue.add(read_of(4096))
    queue.add(read_of(LARGE_BYTES))
    turn_of(queue, 1.0)
    both_s = queue.pause(1.0)
    transfers.arrive(6)
    turn_of(queue, 1.0)
    assert shortest_s == queue.pause(1.0) < both_s < longest_s
    assert queue.pause(1.5) == longest_s, "whatever is in flight takes long"


# -- the thread that drives it ---------------------------------------------------------------------


class Local:
    """A peer in this process: transfers copy when they are polled, which takes `delay_s`.

    Its clock stands still otherwise.
    """

    delay_s = now_s = 0.0

    def __init__(self, nbytes: int) -> None:
        self.memory = MappedFile.of_memory(IDENTITY_BYTES + nbytes, IDENTITY)
        self.target = MappedFile.of_memory(nbytes)
        self.identity_reads = 0
        self.begun: list[tuple[int, int, int]] = []

    def submit(self, engine: str, target: int, source: int, nbytes: int) -> int:
        self.identity_reads += source == self.memory.address
        self.begun.append((target, source, nbytes))
        return len(self.begun) - 1

    def progress(self, transfer: int) -> Progress:
        self.now_s += self.delay_s
        ctypes.memmove(*self.begun[transfer])
        return Progress.ARRIVED

    def source(self, nbytes: int) -> RemoteExtent:
        address = self.memory.address
        return RemoteExtent(PEER, address + IDENTITY_BYTES, nbytes, address, IDENTITY)


def test_reads_give_the_digests_of_what_arrived() -> None:
    local = Local(2 * READ_BYTES + MIB // 2)
    local.memory.view(IDENTITY_BYTES, 3)[:] = b"abc"
    local.memory.view(local.memory.nbytes - 3, 3)[:] = b"xyz"

    async def read_all() -> None:
        reads = Reads(local)
        reads.start()
        for nbytes in (0, 3, LARGE_BYTES, LARGE_BYTES + 1, local.target.nbytes):
            reading = reads.read(local.source(nbytes), local.target.address, asked_s=math.inf)
            digests_read = await within_hang(reading.ended)
            assert digests_read == digests(local.memory.view(IDENTITY_BYTES, nbytes))
        reads.close()

    asyncio.run(read_all())


def test_a_thread_held_up_while_it_polls_takes_no_lease_for_a_proof() -> None:
    """The clock is read after the last byte was seen: it may have arrived just then."""
    local = Local(4096)

    class LocalClock(Clock):
        def now_s(self) -> float:
            return local.now_s

    async def read_slowly() -> None:
        reads = Reads(local, LocalClock())
        reads.start()
        for delay_s, identity_reads in ((0.0, 1), (2 * VOUCHED_S, 2)):
            local.delay_s = delay_s
            reading = reads.read(local.source(4096), local.target.address, local.now_s)
            await within_hang(reading.ended)
            assert local.identity_reads == identity_reads
        reads.close()

    asyncio.run(read_slowly())
