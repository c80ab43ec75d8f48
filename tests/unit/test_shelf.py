"""The shelf of a staged pool, and the header of its files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecd.core.ahead import BLOCK_BYTES
from ecd.core.model.types import Content, Key, Selection
from ecd.core.shelf import Shelf
from ecd.memory.disk.disk_files import _is_selected
from ecd.memory.disk.disk_format import CorruptFile, Header, file_name
from ecd_proto.placeholders import is_claimed
from support.examples import draws

KEYS = [Key("n", str(number)) for number in range(16)]


@draws(200)
@given(st.lists(st.tuples(st.sampled_from("aur"), st.integers(0, 15), st.integers(1, 8))))
def test_it_keeps_within_its_size_and_its_views_agree(steps: list[tuple[str, int, int]]) -> None:
    shelf = Shelf(32)
    for now, (step, number, size) in enumerate(steps):
        there = shelf.get(KEYS[number])
        if step == "a" and there is None:
            before = {each.key: each.rank for each in shelf}
            victims = shelf.make_room(size, 32)
            stay = [rank for key, rank in before.items() if shelf.get(key) is not None]
            assert all(victim.rank <= least for victim in victims for least in stay)
            shelf.add(KEYS[number], size, size, 1.0, 0.5, float(now))
        elif step == "u" and there is not None:
            shelf.use(there, float(now))
        elif step == "r" and there is not None:
            shelf.remove(there)
            shelf.remove(there)  # no effect
            shelf.use(there, float(now))
        assert shelf.used_bytes <= 32
        shelf.check()


def test_what_saves_most_for_its_bytes_stays_longest_and_what_is_not_used_ages() -> None:
    shelf = Shelf(4)
    cheap, dear = (shelf.add(KEYS[n], 1, 2, 1.0, saved, 0.0) for n, saved in ((0, 1.0), (1, 3.0)))
    assert shelf.make_room(4, 1) == [cheap]
    shelf.add(KEYS[2], 1, 2, 1.0, 2.0, 0.0)
    assert [each.key for each in shelf.make_room(2, 9)] == [dear.key], "the clock is ahead of it"


def test_what_is_too_old_is_taken_away_by_the_age_of_its_entry() -> None:
    shelf = Shelf(1000)
    old, young, ageless = (
        shelf.add(KEYS[0], 1, 1, 1.0, 0.5, 100.0, age_s=8.0, ttl_s=10.0),
        shelf.add(KEYS[1], 1, 1, 1.0, 0.5, 100.0, ttl_s=10.0),
        shelf.add(KEYS[2], 1, 1, 1.0, 0.5, 100.0, age_s=50.0),
    )
    assert shelf.take_expired(101.0, 9) == []
    assert shelf.take_expired(102.0, 9) == [old]
    shelf.end_after(young, 100.0)
    shelf.end_after(ageless, 60.0)
    assert shelf.take_expired(115.0, 9) == [ageless]
    shelf.remove(young)
    assert shelf.take_expired(1e9, 9) == []
    shelf.check()


def test_room_is_made_in_bounded_steps_however_many_have_been_used() -> None:
    shelf = Shelf(1000)
    for number in range(1000):
        shelf.use(shelf.add(Key("n", str(number)), 1, 1, 1.0, 0.5, 0.0), 1.0)
    calls = 1
    while not (taken := shelf.make_room(1, 64)):
        calls += 1
    assert calls > 1000 // 64, "each call looks at 64"
    assert len(taken) == 1
    assert shelf.has_room(1)


@draws(100)
@given(st.lists(st.tuples(st.sampled_from("arn"), st.integers(0, 15))))
def test_a_walk_finds_what_stays_while_others_come_and_go(steps: list[tuple[str, int]]) -> None:
    shelf = Shelf(100)
    for number in range(8):
        shelf.add(KEYS[number], 1, 1, 1.0, 0.5, 0.0)
    staying, walk, found = set(shelf), iter(shelf), []
    for step, number in steps:
        there = shelf.get(KEYS[number])
        if step == "a" and there is None:
            shelf.add(KEYS[number], 1, 1, 1.0, 0.5, 0.0)
        elif step == "r" and there is not None:
            shelf.remove(there)
            staying.discard(there)
        elif step == "n" and (each := next(walk, None)) is not None:
            found.append(each)
            shelf.remove(each)
        shelf.check()
    found += walk
    assert staying <= set(found)
    assert [each.number for each in found] == sorted({each.number for each in found})


def test_an_erasure_selects_what_is_read_while_it_runs() -> None:
    shelved = Shelf(1).add(KEYS[0], 1, 1, 1.0, 0.5, 0.0)
    shelved.used_s = 2.0
    assert _is_selected(shelved, Selection(), 1.0)
    assert not _is_selected(shelved, Selection(idle_s=1.0), 2.5)


METADATA = st.binary(max_size=4096).filter(lambda metadata: not is_claimed(metadata))


@given(st.text(min_size=1, max_size=256), METADATA, st.integers(0, 2**64 - 1))
@draws(100)
def test_a_header_is_read_as_it_was_written_or_not_at_all(
    name: str, metadata: bytes, checksum: int
) -> None:
    header = Header(Key(name, name), Content("uint8", (7,), 7, metadata, 0.25), checksum)
    packed = header.pack()
    assert len(packed) % BLOCK_BYTES == 0
    assert Header.unpack(packed) == header
    for place in (0, 9, 13, 20, 30, 40, 60, len(packed) - 1):
        wrong = bytearray(packed)
        wrong[place] ^= 1
        with pytest.raises(CorruptFile):
            Header.unpack(bytes(wrong))
    for wrong in (b"", packed[:-1], packed + b"\0", bytes(BLOCK_BYTES)):
        with pytest.raises(CorruptFile):
            Header.unpack(wrong)


def test_keys_that_read_alike_have_files_of_their_own() -> None:
    assert file_name(Key("a", "bc")) != file_name(Key("ab", "c"))
