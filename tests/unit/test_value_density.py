"""The policy by value: its order against a naive model and against `Lru`, and what it remembers."""

from collections.abc import Sequence
from math import inf, log2, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ecd.core.cache import Cache
from ecd.core.model.entry import Entry
from ecd.core.model.outcomes import Committed, Leased, LimitReached, Reserved
from ecd.core.model.types import Content, EntryId, Key, SessionId
from ecd.core.policy.frequencies import MAX_FREQUENCY, Frequencies
from ecd.core.policy.policy import Lru, Policy, Weighing
from ecd.core.policy.queues import STEPS_PER_OCTAVE
from ecd.core.policy.shadows import MAX_KEYS, WEIGHINGS, Shadows
from ecd.core.policy.value_density import (
    ONE_USE_S,
    PROTECTED_SHARE,
    ValueDensity,
    fingerprints,
)
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from support.examples import drawn, draws
from support.reserving import reserve

PAGE = 4096
POOL_BYTES = 64 * PAGE
LRU, SIZE_ALONE = Weighing(0, 0), Weighing(0, 1)
sizes = st.sampled_from([1, 2, 3, 9])
costs_s = st.sampled_from([0.0, 0.01, 0.012, 0.5])


def entry(allocator: Allocator, number: int, pages: int = 1, cost_s: float = 0.01) -> Entry:
    block = allocator.allocate(pages * PAGE)
    assert block is not None
    content = Content("int8", (pages * PAGE,), pages * PAGE)
    made = Entry(EntryId(number), "n", f"h{number}", content, block, SessionId(1))
    made.cost_s = cost_s
    return made


class Ranked:
    """Entries under one policy, each committed, used and held as a cache would do it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.allocator = Allocator(0, 1 << 30, PAGE)
        self.entries: dict[int, Entry] = {}
        self.held: set[int] = set()

    def admit(self, number: int, pages: int, cost_s: float, now_s: float) -> None:
        admitted = self.entries[number] = entry(self.allocator, number, pages, cost_s)
        admitted.used_s = now_s
        self.policy.admit(admitted)

    def use(self, number: int, now_s: float) -> None:
        self.policy.use(self.entries[number], now_s)
        self.entries[number].used_s = now_s

    def hold(self, number: int) -> None:
        (self.policy.let_go if number in self.held else self.policy.hold)(self.entries[number])
        self.held ^= {number}

    def evict(self, numbers: Sequence[int], for_room: bool) -> None:
        if for_room:
            self.policy.give_up([self.entries[number] for number in numbers])
        for number in numbers:
            self.policy.remove(self.entries.pop(number))
            self.held.discard(number)

    def order(self) -> list[int]:
        return [int(each.id) for each in self.policy.coldest()]


class Machine(RuleBasedStateMachine):
    """Two policies side by side, or one alone beside a model; `equal` entries are all alike."""

    equal = False
    weighings: tuple[Weighing, ...] = WEIGHINGS

    def __init__(self) -> None:
        super().__init__()
        self.value = ValueDensity(POOL_BYTES, weighings=self.weighings)
        self.sides = [Ranked(self.value)]
        self.now_s, self.number = 0.0, 0
        self.floor = 0.0  # the highest rank given up, and by number, at the last touch
        self.floors: dict[int, float] = {}
        self.evicted: list[int] = []

    @property
    def known(self) -> dict[int, Entry]:
        return self.sides[0].entries

    @property
    def ranked(self) -> list[int]:
        return [number for number in self.known if number not in self.sides[0].held]

    @rule(wait_s=st.sampled_from([0.0, ONE_USE_S / 5, 2 * ONE_USE_S]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s

    @rule(of=st.lists(st.tuples(sizes, costs_s), min_size=1, max_size=6), again=st.booleans())
    def admit(self, of: list[tuple[int, float]], again: bool) -> None:
        for pages, cost_s in [(1, 0.01)] * len(of) if self.equal else of:
            if again and self.evicted:
                number = self.evicted.pop()
            else:
                self.number = number = self.number + 1
            for side in self.sides:
                side.admit(number, pages, cost_s, self.now_s)
            self.floors[number] = self.floor

    @precondition(lambda self: self.known)
    @rule(data=st.data(), times=st.integers(1, 3))
    def use(self, data: st.DataObject, times: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.known)))
        for _ in range(times):
            self.now_s += ONE_USE_S
            for side in self.sides:
                side.use(number, self.now_s)
        if number not in self.sides[0].held:
            self.floors[number] = self.floor

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.known)))
        for side in self.sides:
            side.hold(number)
        self.floors[number] = self.floor

    @precondition(lambda self: self.ranked)
    @rule(data=st.data())
    def evict_some(self, data: st.DataObject) -> None:
        """Anywhere in the order, as a window of neighbours lies."""
        self.evict(
            data.draw(st.lists(st.sampled_from(self.ranked), min_size=1, max_size=3, unique=True))
        )

    @precondition(lambda self: self.ranked)
    @rule(count=st.integers(1, 3))
    def evict_coldest(self, count: int) -> None:
        self.evict(self.sides[0].order()[:count])

    def evict(self, numbers: list[int]) -> None:
        ranks = [self.value.warmth(self.known[number]) or 0.0 for number in numbers]
        self.floor = max(self.floor, min(ranks))
        self.evicted += numbers
        for side in self.sides:
            side.evict(numbers, for_room=True)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.known)))
        self.evicted.append(number)
        for side in self.sides:
            side.evict([number], for_room=False)

    @rule(weighing=st.sampled_from(WEIGHINGS))
    def weigh_otherwise(self, weighing: Weighing) -> None:
        """As the shadows would have it, which are too slow to change their minds here."""
        if weighing in self.weighings:
            self.value._shadows.chosen = self.weighings.index(weighing)
            self.value._queues.weigh(self.value._shadows.chosen)

    @invariant()
    def the_order_is_that_of_the_formula(self) -> None:
        def rank(number: int) -> tuple[bool, float, int]:
            each = self.known[number]
            step = round(STEPS_PER_OCTAVE * log2(max(each.cost_s, 1e-3) / each.block.nbytes))
            density = 2.0 ** (step / STEPS_PER_OCTAVE)
            value = self.value.weighing.weight(each.frequency, density)
            assert self.value.warmth(each) == self.floors[number] + value
            return each.place > untouched, self.floors[number] + value, each.place

        untouched = self.value._touched_bytes - int(PROTECTED_SHARE * POOL_BYTES)
        assert self.sides[0].order() == sorted(self.ranked, key=rank)
        assert all(self.value.loss(self.known[number]) >= 0.0 for number in self.ranked)
        for number in self.sides[0].held:
            assert self.value.warmth(self.known[number]) is None
        self.value.check()
        heads, young = self.value._queues._heads, self.value._queues._young
        assert all(place == queue.head.place for _, place, queue in heads), "passed in vain"
        assert all(place > untouched for place, _ in young)


class Beside(Machine):
    """Beside `Lru`, whatever is admitted, used, held and evicted: the orders are equal."""

    weighings = (LRU,)

    def __init__(self) -> None:
        super().__init__()
        self.sides.append(Ranked(Lru()))

    @invariant()
    def the_order_is_that_of_lru(self) -> None:
        assert self.sides[0].order() == self.sides[1].order()


class EqualBeside(Beside):
    """Entries of equal cost and size, of which the frequency does not weigh."""

    equal, weighings = True, (SIZE_ALONE, LRU)


for machine, count in ((Machine, 100), (Beside, 50), (EqualBeside, 50)):
    machine.TestCase.settings = draws(count)
TestOrder = drawn(Machine.TestCase)
TestLru = drawn(Beside.TestCase)
TestEqual = drawn(EqualBeside.TestCase)


@pytest.mark.parametrize("weighing", WEIGHINGS)
@draws(100)
@given(trace=st.lists(st.tuples(st.integers(1, 30), sizes, costs_s), max_size=80))
def test_no_rank_is_below_what_was_given_up_if_the_coldest_goes(
    weighing: Weighing, trace: list[tuple[int, int, float]]
) -> None:
    """With a window of protection a colder one may stay; without it, none can."""
    policy = ValueDensity(0, weighings=[weighing])
    ranked = Ranked(policy)
    for now, (number, pages, cost_s) in enumerate(trace):
        if number in ranked.entries:
            ranked.use(number, float(now))
        else:
            ranked.admit(number, pages, cost_s, float(now))
        if len(ranked.entries) > 8:
            ranked.evict(ranked.order()[:1], for_room=True)
        for each in ranked.entries.values():
            warmth = policy.warmth(each)
            assert warmth is not None
            assert warmth >= policy._floor


def replayed(trace: Sequence[tuple[int, int, float]], policy: Policy, prefix: str) -> list[str]:
    """What a cache evicts, in order: keys read, or stored where they are missing."""
    cache = Cache([Pool(Allocator(0, POOL_BYTES, PAGE), policy=policy)])
    session = cache.open_session()
    assert not isinstance(session, LimitReached)
    evicted: list[str] = []
    cache.take_changes()
    for step, (number, pages, cost_s) in enumerate(trace):
        key, now_s = Key("n", f"{prefix}{number}"), step / 7
        leased = cache.acquire(session, key, now_s)
        if isinstance(leased, Leased):
            cache.release(session, leased.lease)
            continue
        content = Content("int8", (pages * PAGE,), pages * PAGE, cost_s=cost_s)
        reserved = reserve(cache, session, key, content, now_s)
        assert isinstance(reserved, Reserved)
        assert isinstance(cache.commit(session, reserved.entry, now_s), Committed)
        changes = cache.take_changes()
        evicted += [gone.mm_hash[len(prefix) :] for gone, stored in changes.items() if not stored]
        cache.check()
    return evicted


@draws(30)
@given(trace=st.lists(st.tuples(st.integers(1, 60), sizes, costs_s), min_size=40, max_size=200))
def test_the_evictions_depend_on_the_trace_alone(trace: list[tuple[int, int, float]]) -> None:
    """Also of a trace whose keys are salted, if the fingerprints are those of the recorded run."""
    keyed = fingerprints(b"salt")

    def recorded(each: Entry) -> int:
        return keyed(entry(Allocator(0, PAGE, PAGE), int(each.mm_hash.removeprefix("salted"))))

    first = replayed(trace, ValueDensity(POOL_BYTES, keyed), "h")
    assert first == replayed(trace, ValueDensity(POOL_BYTES, recorded), "salted")


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    each = entry(Allocator(0, PAGE, PAGE), 1)
    assert fingerprints()(each) == 12905484763332752076
    assert fingerprints(b"salt")(each) != fingerprints()(each)


def test_uses_count_once_in_each_span_and_no_further_than_the_cap() -> None:
    ranked = Ranked(ValueDensity(POOL_BYTES))
    ranked.admit(1, 1, 0.01, now_s=0.0)
    each = ranked.entries[1]
    ranked.use(1, 0.9 * ONE_USE_S)
    assert each.frequency == 1, "handed over at once"
    for step in range(11, 30):
        ranked.use(1, step / 10 * ONE_USE_S)
    assert each.frequency == 3, "read all the time for two spans"
    for step in range(100):
        ranked.use(1, 100.0 + step)
    assert each.frequency == MAX_FREQUENCY


def test_the_frequency_of_an_evicted_key_is_remembered() -> None:
    ranked = Ranked(ValueDensity(POOL_BYTES))
    ranked.admit(1, 1, 0.01, 0.0)
    for now in range(1, 5):
        ranked.use(1, float(now))
    ranked.evict([1], for_room=True)
    ranked.admit(1, 1, 0.01, 9.0)
    ranked.admit(2, 1, 0.01, 9.0)
    assert (ranked.entries[1].frequency, ranked.entries[2].frequency) == (6, 1)


def test_frequencies_are_halved_as_the_pool_is_used() -> None:
    frequencies, entries = Frequencies(0), 40
    frequencies.remember(1 << 40 | 5, 12)
    halved = []
    for use in range(10 * entries * 4 + 1):
        before = frequencies.recall(1 << 40 | 5)
        frequencies.age(entries)
        if frequencies.recall(1 << 40 | 5) < before:
            halved.append(use)
    assert halved == [0, 400, 800, 1200], "the first use halves what was not there before"
    assert frequencies.recall(1 << 40 | 5) == 0
    assert frequencies.recall(7) == 0


def test_all_of_a_sketch_is_halved() -> None:
    frequencies = Frequencies(1 << 27)
    for key in range(0, 1 << 15, 64):
        frequencies.remember(key, 2)
    for _ in range(2 * 10 * 100):
        frequencies.age(100)
    assert not any(frequencies.recall(key) for key in range(0, 1 << 15, 64))


def test_a_sketch_that_fills_up_is_halved_sooner() -> None:
    """Else every new key would seem to have been there before."""
    frequencies = Frequencies(0)
    wrong = 0
    for number in range(20_000):
        key = number * 0x9E3779B97F4A7C15 % (1 << 64)
        wrong += frequencies.recall(key) > 0
        frequencies.remember(key, 1)
        frequencies.age(1_000_000)
    assert wrong < 1000


def test_what_is_remembered_is_bounded() -> None:
    """Of costs that no engine has, too, and of more keys than a shadow keeps."""
    policy = ValueDensity(1 << 40)
    ranked = Ranked(policy)
    for number, cost_s in enumerate((nan, inf, -inf, -1.0, 0.0, 1e-300, 1e300)):
        ranked.admit(number, 1, cost_s, 0.0)
    assert len(policy._queues._queues) == 2
    for number in range(10, 5 * 8 * MAX_KEYS):
        key = number * 0x9E3779B97F4A7C15 % (1 << 64)
        policy._shadows.access(key, 1, 1.0, [1.0] * len(WEIGHINGS))
        assert policy._shadows.keys <= MAX_KEYS
    assert policy._shadows.keys > MAX_KEYS // 4
    policy.check()
    assert len(policy._frequencies._counters) <= 4 << 20


def test_the_shadows_choose_what_would_have_saved_most() -> None:
    """Keys that come back soon and then never more; then a hot set between keys that never do."""

    shadows = Shadows(48, len(WEIGHINGS))

    def run(keys: Sequence[int]) -> Weighing:
        seen: dict[int, int] = {}
        for key in keys:
            seen[key] = min(MAX_FREQUENCY, seen.get(key, 0) + 1)
            shadows.access(key, 1, 1.0, [each.weight(seen[key], 1.0) for each in WEIGHINGS])
        return WEIGHINGS[shadows.chosen]

    recent = [10_000 + step - back for step in range(3000) for back in (0, 10, 20, 30)]
    often = [key for step in range(6000) for key in (20_000 + step, step % 30)]
    assert run(recent).frequency == 0
    assert run(often).frequency > 0
    assert run(recent).frequency == 0, "what was saved long ago is forgotten"


def test_a_shadow_ages_what_is_not_used_again() -> None:
    shadow = Shadows(10, 1)
    for key in [1] * 4 + list(range(2, 60)) + [1]:
        shadow.access(key, 1, 1.0, [3.0 if key == 1 else 1.0])
    assert shadow.saved_s == [3.0], "it was evicted before its last use"


def test_an_entry_whose_cost_has_changed_ranks_by_it_from_its_next_use_on() -> None:
    ranked = Ranked(ValueDensity(POOL_BYTES, weighings=[SIZE_ALONE]))
    for number in range(2):
        ranked.admit(number, 32, cost_s=0.01 * (number + 1), now_s=0.0)
    assert ranked.order() == [0, 1]
    ranked.entries[0].cost_s = 0.5
    assert ranked.order() == [0, 1]
    ranked.use(0, 2 * ONE_USE_S)
    assert ranked.order() == [1, 0]
