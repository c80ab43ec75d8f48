"""Traces: a recorded run replayed evicts the same, and what-if agrees with what can be known."""

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecd.core.cache import Cache
from ecd.core.model.outcomes import Leased, LimitReached, Reserved
from ecd.core.model.types import Content, Key
from ecd.core.policy.policy import Lru
from ecd.core.policy.value_density import ValueDensity, fingerprints
from ecd.core.pool.pool import Pool
from ecd.ops.trace import MAX_WAITING, Recorder
from ecd.replay.bounds import bounds
from ecd.replay.exact import Comparison, Replay
from ecd.replay.policies import POLICIES
from ecd.replay.reading import Accesses, TracedKey, TraceError, accesses, records
from ecd.replay.whatif import Disk, simulate
from support.examples import drawn, draws
from support.reserving import reserve
from support.waiting import HANG_S, eventually
from unit.test_cache import GRANULE_BYTES, POOL_LIMITS, RuledMachine

SALTED = fingerprints(b"salt")


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A recorder whose thread is kept waiting writes all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ecd.ops.trace.CLOSE_S", 5.0)
        yield


def replayed(file: Path) -> Comparison:
    header, operations = records(file)
    return Replay(header).run(operations)


class RecordedMachine(RuledMachine):
    """Any operations on a recorded pool, with rules: leases, pins, grants, trims and evictions."""

    def pool(self, number: int, nbytes: int) -> Pool:
        self.file = Path(tempfile.mkstemp(dir=os.environ["TRACES"])[1])
        self.recorder = Recorder(self.file, 0.0)
        policy, name = (ValueDensity(nbytes, SALTED), "value") if self.by_value else (Lru(), "lru")
        place = number, nbytes, GRANULE_BYTES
        return self.recorder.pool(place, policy, name, SALTED, POOL_LIMITS)

    def teardown(self) -> None:
        super().teardown()
        self.recorder.close()
        found = replayed(self.file)
        self.file.unlink()
        assert found.difference is None
        assert found.is_whole
        assert found.evictions == self.cache.pools[0].evictions


RecordedMachine.TestCase.settings = draws(50, steps=60)


@drawn
class TestRecorded(RecordedMachine.TestCase):
    @pytest.fixture(autouse=True)
    def _traces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRACES", str(tmp_path))


def recorded_run(file: Path) -> Pool:
    """A pool of 16 pages, and 40 entries of up to three, put one after another."""
    recorder = Recorder(file, 100.5)
    pool = recorder.pool((0, 16 * 4096, 4096), Lru(), "lru", SALTED)
    cache = Cache([pool])
    session = cache.open_session()
    assert not isinstance(session, LimitReached)
    for number in range(40):
        nbytes = 4096 * (1 + number % 3)
        content = Content("int8", (number + 1, 7), nbytes, cost_s=0.25)
        reserved = reserve(cache, session, Key(f"n{number % 2}", f"k{number}"), content, 101.0)
        assert isinstance(reserved, Reserved)
        cache.commit(session, reserved.entry, 101.0 + number)
    recorder.close()
    return pool


def test_a_trace_has_no_names_no_date_and_no_other_readers(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.touch(0o644)
    recorded_run(file)
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert "k3" not in text
    assert "n1" not in text
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    admitted = [line for line in lines if line[0] == "admit"][:3]
    assert len({line[3] for line in admitted}) == 3
    assert [line[4:7] + line[8:] for line in admitted] == [
        [1, 4096, 1, 1.0],
        [2, 8192, 2, 2.0],
        [1, 12288, 3, 3.0],
    ]
    assert [line[7] for line in admitted] == pytest.approx([0.25] * 3, rel=0.01), "by the fit"


def test_room_for_an_entry_without_bytes_is_made_anew_as_any_other(tmp_path: Path) -> None:
    file = tmp_path / "t"
    recorder = Recorder(file, 0.0)
    pool = recorder.pool((0, 8 * 4096, 4096), ValueDensity(8 * 4096, SALTED), "value", SALTED)
    cache = Cache([pool])
    session = cache.open_session()
    assert not isinstance(session, LimitReached)
    for number in range(60):
        nbytes = 4096 * (3, 0, 1)[number % 3]
        content = Content("int8", (1,), nbytes, cost_s=0.01 * (1 + number % 7))
        reserved = reserve(cache, session, Key("n", f"k{number}"), content, number)
        assert isinstance(reserved, Reserved)
        cache.commit(session, reserved.entry, number)
    recorder.close()
    assert '["plan",4096,' in file.read_text()
    found = replayed(file)
    assert (found.difference, found.evictions) == (None, pool.evictions)


def test_an_entry_that_costs_more_since_its_fetch_was_long_ago_is_replayed_so(
    tmp_path: Path,
) -> None:
    file = tmp_path / "t"
    recorder = Recorder(file, 0.0)
    pool = recorder.pool((0, 128 * 4096, 4096), ValueDensity(128 * 4096, SALTED), "value", SALTED)
    cache = Cache([pool])
    session = cache.open_session()
    assert not isinstance(session, LimitReached)
    for number in range(400):
        key, now_s = Key("n", f"k{number}"), 1.0 * number
        content = Content("int8", (100,), 4096, cost_s=1.0)
        reserved = reserve(cache, session, key, content, now_s)
        assert isinstance(reserved, Reserved)
        cache.commit(session, reserved.entry, now_s, refetch_s=0.02)
        for read in (key, Key("n", "k0"))[: 2 if number == 61 else 1]:
            lease = cache.acquire(session, read, now_s)
            assert isinstance(lease, Leased)
            cache.release(session, lease.lease)
    recorder.close()
    assert '["cost",' in file.read_text()
    found = replayed(file)
    assert (found.difference, found.evictions) == (None, pool.evictions)


def test_a_read_that_only_hands_an_entry_over_is_no_access(tmp_path: Path) -> None:
    file = tmp_path / "t"
    recorder = Recorder(file, 0.0)
    cache = Cache([recorder.pool((0, 8 * 4096, 4096), Lru(), "lru", SALTED)])
    session = cache.open_session(hands_over=True)
    assert not isinstance(session, LimitReached)
    key, content = Key("n", "k"), Content("int8", (1,), 4096, cost_s=1.0)
    reserved = reserve(cache, session, key, content, 0.0)
    assert isinstance(reserved, Reserved)
    cache.commit(session, reserved.entry, 0.0)
    for now_s in (1.0, 2.0):
        lease = cache.acquire(session, key, now_s)
        assert isinstance(lease, Leased)
        cache.release(session, lease.lease)
    recorder.close()
    assert list(accesses(file).times_s) == [0.0, 2.0]
    assert replayed(file).difference is None
    older = file.read_text().replace('"version":2', '"version":1')
    file.write_text(older)
    assert len(accesses(file).order) == 2


def test_a_replay_tells_where_it_differs(tmp_path: Path) -> None:
    file = tmp_path / "t"
    pool = recorded_run(file)
    assert replayed(file).evictions == pool.evictions
    lines = file.read_text().splitlines()
    [first, *_] = [number for number, line in enumerate(lines) if line.startswith('["plan"')]
    operation, nbytes, victims = json.loads(lines[first])
    lines[first] = json.dumps([operation, nbytes, [victim + 1 for victim in victims]])
    file.write_text("\n".join(lines) + "\n")
    found = replayed(file)
    assert found.difference is not None
    assert f"the plan is {victims}" in found.difference
    assert found.operations == first, "it goes on after the difference"


def test_an_eviction_that_no_plan_gave_up_is_a_difference(tmp_path: Path) -> None:
    file = tmp_path / "t"
    recorded_run(file)
    lines = [line for line in file.read_text().splitlines() if not line.startswith('["plan"')]
    file.write_text("\n".join(lines) + "\n")
    assert "no plan" in str(replayed(file).difference)


def test_a_trace_that_ends_anywhere_is_replayed_so_far(tmp_path: Path) -> None:
    file = tmp_path / "t"
    recorded_run(file)
    whole = file.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole) - len(b'["end"]\n'), 97):
        file.write_bytes(whole[:length])
        found = replayed(file)
        assert (found.difference, found.is_whole) == (None, False)
        assert found.operations == whole[:length].count(b"\n") - 1


def test_records_that_find_no_room_leave_a_hole(tmp_path: Path) -> None:
    """The file is a FIFO that nobody reads for a while."""
    file = tmp_path / "t"
    os.mkfifo(file)
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    recorder = Recorder(file, 0.0)
    allocator = recorder.pool((0, 1 << 30, 4096), Lru(), "lru", SALTED).allocator
    count = MAX_WAITING + 10_000  # more than a FIFO takes beside
    for _ in range(count):
        allocator.allocate(1)
    lost = recorder.lost
    assert 0 < lost < count
    text = b""

    def read_to_end() -> None:
        nonlocal text
        os.set_blocking(reader, True)
        while some := os.read(reader, 1 << 20):
            text += some

    reading = threading.Thread(target=read_to_end)
    reading.start()
    eventually(lambda: not recorder._waiting)
    allocator.allocate(1)
    recorder.close()
    reading.join(HANG_S)
    os.close(reader)
    _, *lines = [json.loads(line) for line in text.splitlines()]
    holes = [at for at, line in enumerate(lines) if line[0] == "hole"]
    assert sum(lines[at][1] for at in holes) == lost
    assert sum(line[0] == "take" for line in lines) == count + 1 - lost
    assert lines[-2:] == [["take", count, 1], ["end"]]
    file.unlink()
    file.write_bytes(text)
    assert replayed(file) == Comparison(operations=holes[0], missing=lines[holes[0]][1])


# -- other pools ----------------------------------------------------------------------------------


def of(*asked: tuple[int, int, float]) -> Accesses:
    """Accesses, a second apart, of a key with so many pages and such a cost."""
    found = Accesses()
    numbers: dict[int, int] = {}
    for now_s, (key, pages, cost_s) in enumerate(asked):
        number = numbers.setdefault(key, len(numbers))
        if number == len(found.items):
            found.items.append(TracedKey(key, 1, pages * 4096, pages, cost_s))
        found.order.append(number)
        found.times_s.append(float(now_s))
    return found


KINDS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=4, max_size=4)


@given(KINDS, st.lists(st.integers(0, 3), min_size=1, max_size=11), st.integers(1, 8))
@draws(200)
def test_the_bounds_enclose_what_is_best(
    kinds: list[tuple[int, int]], order: list[int], pages: int
) -> None:
    """The best of all sets of intervals that fit; and what policies save is no more."""
    found = of(*((key, kinds[key][0], float(kinds[key][1])) for key in order))
    intervals, last = [], dict[int, int]()
    for end, key in enumerate(order):
        if key in last:
            intervals.append((last[key], end, *kinds[key]))
        last[key] = end
    best = 0
    sets = chain.from_iterable(combinations(intervals, n) for n in range(len(intervals) + 1))
    for chosen in sets:
        at = (sum(i[2] for i in chosen if i[0] <= t < i[1]) for t in range(len(order)))
        if all(used <= pages for used in at):
            best = max(best, sum(interval[3] for interval in chosen))
    feasible_s, upper_s = bounds(found, pages * 4096)
    assert feasible_s <= best <= upper_s + 1e-9
    for name, make in POLICIES.items():
        assert simulate(found, pages * 4096, name, make).saved_s <= best


def test_a_pool_of_all_bytes_saves_all_that_can_be_saved() -> None:
    found = of(*((number % 7, 1 + number % 7, 0.5) for number in range(50)))
    whole = simulate(found, 2 * found.footprint_bytes, "lru", POLICIES["lru"])
    assert (whole.share, whole.hits, sum(whole.evictions.values())) == (1.0, 43, 0)
    assert whole.moved_in_bytes == found.footprint_bytes
    none = simulate(found, 4096, "lru", POLICIES["lru"])
    assert none.refused > 0
    assert none.saved_s == 0.0


@pytest.mark.parametrize("name", POLICIES)
def test_a_large_and_quick_disk_makes_evictions_cost_nothing(name: str) -> None:
    found = of(*((number % 50, 1, 10.0) for number in range(500)))
    alone = simulate(found, 20 * 4096, name, POLICIES[name])
    quick = Disk(1 << 30, write_bytes_per_s=1 << 30, read_bytes_per_s=1 << 40)
    tier = simulate(found, 20 * 4096, name, POLICIES[name], disk=quick)
    assert alone.share < 0.5
    assert alone.disk_hits == alone.disk_written_bytes == 0
    assert sum(tier.evictions.values()) > 400
    assert tier.hits == 450
    assert tier.share == pytest.approx(1.0, abs=1e-3), "a read takes a millisecond"
    assert tier.disk_saved_s == pytest.approx((10.0 - 1e-3) * tier.disk_hits, rel=1e-6)
    assert tier.disk_written_bytes <= 50 * 2 * 4096, "written again"


def test_a_disk_keeps_to_its_budget_its_size_and_its_rule() -> None:
    found = of(*((number % 50, 1, 10.0) for number in range(500)))

    def tried(disk: Disk | None) -> tuple[int, int, float]:
        done = simulate(found, 20 * 4096, "lru", POLICIES["lru"], disk=disk)
        return done.disk_written_bytes, done.disk_hits, done.saved_s

    assert tried(None) == (0, 0, 0.0)
    assert tried(Disk(1 << 30, write_bytes_per_s=1))[0] == 2 * 4096, "the first overdraws"
    assert tried(Disk(1 << 30, read_bytes_per_s=1)) == (0, 0, 0.0), "reads take an hour"
    assert tried(Disk(4096)) == (0, 0, 0.0), "no entry fits"
    written, hits, _ = tried(Disk(1 << 30, write_bytes_per_s=128))
    assert 5 * 8192 <= written <= 128 * (499 + 5) + 8192
    assert 0 < hits < 450


def test_the_accesses_of_a_trace_are_its_puts_and_its_uses(tmp_path: Path) -> None:
    file = tmp_path / "t"
    recorded_run(file)
    found = accesses(file)
    assert len(found.items) == len(found.order) == 40
    assert {item.nbytes for item in found.items} == {4096, 8192, 12288}
    assert list(found.times_s) == [float(number) + 1.0 for number in range(40)]
    assert found.recorded is not None
    assert found.recorded.pool_bytes == 16 * 4096


@pytest.mark.parametrize(
    "text",
    [
        "0,a,10\n1,b,20\n2,a,10\n",
        "time, id, size\n0, a, 10\n1, b, 20\n2, a, 10\n",
        "obj_size\tclock_time\tobj_id\n10\t0\ta\n20\t1\tb\n10\t2\ta\n",
    ],
)
def test_a_csv_has_columns_in_order_or_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    found = accesses(file)
    assert list(found.order) == [0, 1, 0]
    assert list(found.times_s) == [0.0, 1.0, 2.0]
    assert [(item.nbytes, item.cost_s) for item in found.items] == [(10, 1.0), (20, 1.0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00", "neither"),
        (b"a,b\n", "no column for"),
        (b"0,a,10\n1,b\n", "line 2"),
        (b"{}\n", "header"),
        (b"{", "header"),
        (b'{"trace":"ecd","version":99,"pool_bytes":1,"granule_bytes":1,"policy":"lru",'
         b'"watermarks":[1,1]}\n', "version 99"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "t"
    file.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        accesses(file)


def test_a_trace_of_what_cannot_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t"
    recorded_run(file)
    lines = file.read_text().splitlines()
    for wrong in ('["free",3]', '["use",99,1.0]', '["x"]', "[]", '["take"]', '["take",0,"x"]', "{"):
        file.write_text("\n".join([lines[0], wrong, *lines[1:]]) + "\n")
        with pytest.raises(TraceError):
            replayed(file)
