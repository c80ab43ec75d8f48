"""Plans of eviction: the victims they choose, and the ranking that they start from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType

import pytest

from ecd.core.cache import Cache
from ecd.core.model.entry import Entry
from ecd.core.model.types import Content, EntryId, Extent, Key, SessionId
from ecd.core.policy.policy import Lru, Policy, Weighing
from ecd.core.policy.value_density import ValueDensity
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.eviction import STEPS, STEPS_IN_VAIN, plan
from ecd.core.pool.pool import PLANS, Pool
from support.reserving import reserve

PAGE = 4096


def by_value(*weighing: float) -> ValueDensity:
    """A policy whose order is that of the letters: nothing is protected for having come last."""
    return ValueDensity(0, weighings=[Weighing(*weighing)])


POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru, "value": lambda: by_value(0, 0)}


@pytest.fixture(params=POLICIES)
def make(request: pytest.FixtureRequest) -> Callable[[], Policy]:
    """Makes policies by which all bytes are worth the same."""
    return POLICIES[request.param]


class Filled:
    """A pool laid out as a string: one letter an entry, `.` free; the letters' order is warmth."""

    def __init__(
        self,
        make: Callable[[], Policy],
        layout: str,
        held: str = "",
        costs_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Entries took 10 ms to encode, but for those in `costs_s`."""
        self.allocator = Allocator(0, len(layout) * PAGE, PAGE)
        self.policy = make()
        self.entries: dict[str, Entry] = {}
        for name in sorted(set(layout) - {"."}, key=layout.index):
            self._place(name, layout.index(name), layout.count(name))
        for name in sorted(self.entries):
            self.entries[name].cost_s = costs_s.get(name, 0.01)
            self.policy.admit(self.entries[name])
            self.entries[name].used_s = float(ord(name))
        for name in held:
            self.policy.hold(self.entries[name])

    def _place(self, name: str, start: int, pages: int) -> None:
        block = self.allocator.allocate_at(Extent(0, start * PAGE, pages * PAGE))
        assert block is not None
        content = Content("int8", (pages,), pages * PAGE)
        entry = Entry(EntryId(ord(name)), "n", name, content, block, SessionId(1))
        block.owner = self.entries[name] = entry

    def plan(self, pages: int) -> str | None:
        victims = plan(pages * PAGE, self.allocator, self.policy)
        return None if victims is None else "".join(sorted(victim.mm_hash for victim in victims))


def test_the_coldest_entry_that_is_large_enough_goes(make: Callable[[], Policy]) -> None:
    assert Filled(make, "aabbcc").plan(2) == "a"


def test_neighbours_go_together_rather_than_the_coldest_one_by_one(
    make: Callable[[], Policy],
) -> None:
    """In order of warmth a to c would go first, and free nothing in one piece."""
    filled = Filled(make, "awbxcyde", held="wxy")
    assert filled.plan(2) == "de"
    assert Filled(make, "dabc").plan(2) == "ab", "the window grows to the colder side"


def test_free_neighbours_count(make: Callable[[], Policy]) -> None:
    assert Filled(make, "a.bbbcc").plan(2) == "a", "one page given up makes two"
    assert Filled(make, "bbb.a.cc").plan(3) == "a"


def test_the_window_that_gives_up_the_fewest_bytes_goes(make: Callable[[], Policy]) -> None:
    """The coldest alone would do, but is larger."""
    assert Filled(make, "aaaabbcc").plan(2) == "b"


def test_the_window_that_gives_up_the_least_value_goes() -> None:
    """Bytes alone would have the coldest go, and any order of warmth a to c."""

    def make() -> Policy:
        return by_value(1, 1)

    assert Filled(make, "aabbcc", costs_s={"a": 1.0}).plan(2) == "b"
    assert Filled(make, "abbbcc", costs_s={"c": 1.0}).plan(2) == "b", (
        "three pages for less than two"
    )


def test_more_windows_are_compared_for_a_large_entry() -> None:
    """Twenty small ones that are worth less come first, each between two that are held."""
    small = [chr(0x100 + number) for number in range(41)]
    costs_s = {"Z": 1.0, "z": 0.05}

    def filled() -> Filled:
        layout = "aZZZ" + "".join(small) + "zzzz"
        return Filled(lambda: by_value(1, 1), layout, "".join(small[::2]), costs_s)

    assert filled().plan(4) == "z"
    assert filled().plan(1) == "a"


def test_held_entries_block_a_window(make: Callable[[], Policy]) -> None:
    assert Filled(make, "abcd", held="b").plan(2) == "cd"
    assert Filled(make, "abcd", held="bc").plan(2) is None
    assert Filled(make, "abcd", held="abcd").plan(1) is None


@pytest.mark.parametrize(
    ("layout", "held", "next_ones"),
    [
        ("abcdefghijklmnopqrst", "", "abcdefg"),
        ("abcdefghijklmnopqrst", "bc", "adefghi"),
        ("bbbbacdefghijklmnop.", "", "abc"),
        ("abcdefghijklm.......", "", ""),
    ],
)
def test_the_next_victims_are_the_coldest_of_a_pool_that_fills(
    layout: str, held: str, next_ones: str
) -> None:
    """Of twenty pages the first thirteen are filled without a victim in sight."""
    filled = Filled(Lru, layout, held)
    pool = Pool(filled.allocator, policy=filled.policy)
    assert "".join(entry.mm_hash for entry in pool.next_victims()) == next_ones


def test_a_plan_changes_nothing(make: Callable[[], Policy]) -> None:
    filled = Filled(make, "ab.cd")
    assert filled.plan(5) == "abcd"
    assert [entry.mm_hash for entry in filled.policy.coldest()] == list("abcd")
    assert filled.allocator.used_bytes == 4 * PAGE
    filled.allocator.check()


def test_a_plan_tries_a_bounded_number_of_windows(make: Callable[[], Policy]) -> None:
    """Every second entry is held, but for a pair at the warm end."""

    def among(count: int) -> str | None:
        names = [chr(0x100 + number) for number in range(2 * count)]
        return Filled(make, "".join(names), held="".join(names[1 : 2 * count - 2 : 2])).plan(2)

    assert among(make().anchors + 10) is not None, "nothing cheaper was found: it goes on"
    assert among(STEPS_IN_VAIN) is None


def test_entries_between_held_ones_do_not_hide_where_there_is_room() -> None:
    """The coldest six hundred are enclosed; behind them is one large entry, worth a lot."""
    names = [chr(0x100 + number) for number in range(1200)]
    large = chr(0x100 + 1200)
    filled = Filled(
        lambda: ValueDensity(0), "".join(names) + 4 * large, "".join(names[1::2]), {large: 9.0}
    )
    assert filled.plan(3) == large


def test_a_plan_looks_at_a_bounded_number_of_entries_where_windows_are_long() -> None:
    looked = 0

    class Counting(ValueDensity):
        def loss(self, entry: Entry) -> float:
            nonlocal looked
            looked += 1
            return super().loss(entry)

    names = "".join(chr(0x100 + number) for number in range(6000))
    costs_s = {name: 0.01 + 1e-4 * (ord(name) * 7919 % 6000) for name in names}
    filled = Filled(lambda: Counting(0), names, costs_s=costs_s)
    assert filled.plan(2000) is not None
    assert looked < 2 * (2000 + STEPS)


def test_what_was_just_put_goes_last_in_a_small_pool_too() -> None:
    filled = Filled(lambda: ValueDensity(12 * PAGE), "abcdefghijkl")
    for pages in (1, 3):
        planned = filled.plan(pages)
        assert planned is not None
        assert "l" not in planned


def test_the_policy_ranks_by_the_end_of_use(make: Callable[[], Policy]) -> None:
    filled = Filled(make, "abcd")
    policy, entries = filled.policy, filled.entries
    policy.use(entries["a"], 1.0)
    policy.hold(entries["b"])
    policy.use(entries["b"], 1.0)
    assert [entry.mm_hash for entry in policy.coldest()] == ["c", "d", "a"]
    assert policy.warmth(entries["b"]) is None
    policy.let_go(entries["b"])
    policy.remove(entries["c"])
    policy.remove(entries["c"])
    assert [entry.mm_hash for entry in policy.coldest()] == ["d", "a", "b"]


def pool_with(make: Callable[[], Policy], pages: int) -> tuple[Pool, list[Entry]]:
    """A full pool of entries of one page, the first coldest."""
    pool = Pool(Allocator(0, pages * PAGE, PAGE), policy=make())
    entries = []
    for number in range(pages):
        block = pool.allocator.allocate(PAGE)
        assert block is not None
        content = Content("int8", (1,), PAGE)
        entry = Entry(EntryId(number), "n", str(number), content, block, SessionId(1))
        block.owner = entry
        pool.policy.admit(entry)
        entries.append(entry)
    return pool, entries


def test_a_pool_plans_anew_for_victims_that_were_pinned_at_the_last_moment(
    make: Callable[[], Policy],
) -> None:
    pool, entries = pool_with(make, 4)
    evicted = []

    def evict(entry: Entry, reason: str) -> None:
        """The first is pinned, and keeps its extent."""
        evicted.append((entry.mm_hash, reason))
        pool.policy.remove(entry)
        if entry is not entries[0]:
            pool.allocator.free(entry.block)

    assert pool.evict_for(PAGE, evict, scan=lambda: True) is not None
    assert evicted == [("0", "capacity"), ("1", "capacity")]


def test_a_pool_gives_up_after_some_plans_or_where_a_scan_goes_on(
    make: Callable[[], Policy],
) -> None:
    for settled, plans in ((True, PLANS), (False, 1)):
        pool, _ = pool_with(make, 8)
        evicted: list[Entry] = []

        def evict(entry: Entry, _: str, pool: Pool = pool, to: list[Entry] = evicted) -> None:
            to.append(entry)
            pool.policy.remove(entry)

        assert pool.evict_for(PAGE, evict, scan=lambda settled=settled: settled) is None
        assert len(evicted) == plans


def test_a_plan_with_too_many_victims_evicts_nothing(make: Callable[[], Policy]) -> None:
    pool, _ = pool_with(make, 4)

    def evict(entry: Entry, reason: str) -> None:
        raise AssertionError("nothing may go")

    assert pool.evict_for(2 * PAGE, evict, scan=lambda: True, most=1) is None


class OldestFirst:
    """A policy of another kind: what was stored first goes first, whatever was read."""

    anchors = 16

    def __init__(self) -> None:
        self._ranked: dict[EntryId, Entry] = {}

    def admit(self, entry: Entry) -> None:
        self._ranked[entry.id] = entry

    let_go = admit

    def use(self, entry: Entry, now_s: float) -> None: ...

    def give_up(self, victims: Sequence[Entry]) -> None: ...

    def hold(self, entry: Entry) -> None:
        del self._ranked[entry.id]

    def remove(self, entry: Entry) -> None:
        self._ranked.pop(entry.id, None)

    def coldest(self) -> Iterator[Entry]:
        return iter([self._ranked[entry] for entry in sorted(self._ranked)])

    def warmth(self, entry: Entry) -> float | None:
        return float(entry.id) if entry.id in self._ranked else None

    def loss(self, entry: Entry) -> float:
        return entry.block.nbytes if entry.id in self._ranked else inf


@pytest.mark.parametrize(("policy", "stays"), [(Lru(), "a"), (OldestFirst(), "b")])
def test_the_policy_of_a_pool_decides_who_goes(policy: Policy, stays: str) -> None:
    cache = Cache([Pool(Allocator(0, 2 * PAGE, PAGE), policy=policy)])
    session = cache.open_session()

    def put(name: str) -> None:
        reserved = reserve(cache, session, Key("n", name), Content("int8", (PAGE,), PAGE), 0.0)
        cache.commit(session, reserved.entry, 0.0)

    put("a")
    put("b")
    cache.release(session, cache.acquire(session, Key("n", "a"), 1.0).lease)
    put("c")
    assert [name for name in "ab" if cache.views.contains(Key("n", name))] == [stays]
    cache.check()
