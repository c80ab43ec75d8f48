"""The catalog of a staged pool, and the header of its files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecd.core.demotion import BLOCK_BYTES
from ecd.core.disk_catalog import Catalog
from ecd.core.model.types import Content, Key, Selection
from ecd.memory.disk.disk_files import _is_selected
from ecd.memory.disk.disk_format import CorruptFile, Header, file_name
from ecd_proto.placeholders import is_claimed
from support.examples import draws

KEYS = [Key("n", str(number)) for number in range(16)]


@draws(200)
@given(st.lists(st.tuples(st.sampled_from("aur"), st.integers(0, 15), st.integers(1, 8))))
def test_it_keeps_within_its_size_and_its_views_agree(steps: list[tuple[str, int, int]]) -> None:
    catalog = Catalog(32)
    for now, (step, number, size) in enumerate(steps):
        there = catalog.get(KEYS[number])
        if step == "a" and there is None:
            before = {each.key: each.rank for each in catalog}
            victims = catalog.make_room(size, 32)
            stay = [rank for key, rank in before.items() if catalog.get(key) is not None]
            assert all(victim.rank <= least for victim in victims for least in stay)
            catalog.add(KEYS[number], size, size, 1.0, 0.5, float(now))
        elif step == "u" and there is not None:
            catalog.use(there, float(now))
        elif step == "r" and there is not None:
            catalog.remove(there)
            catalog.remove(there)  # no effect
            catalog.use(there, float(now))
        assert catalog.used_bytes <= 32
        catalog.check()


def test_what_saves_most_for_its_bytes_stays_longest_and_what_is_not_used_ages() -> None:
    catalog = Catalog(4)
    cheap, dear = (catalog.add(KEYS[n], 1, 2, 1.0, saved, 0.0) for n, saved in ((0, 1.0), (1, 3.0)))
    assert catalog.make_room(4, 1) == [cheap]
    catalog.add(KEYS[2], 1, 2, 1.0, 2.0, 0.0)
    assert [each.key for each in catalog.make_room(2, 9)] == [dear.key], "the clock is ahead of it"


def test_what_is_too_old_is_taken_away_by_the_age_of_its_entry() -> None:
    catalog = Catalog(1000)
    old, young, ageless = (
        catalog.add(KEYS[0], 1, 1, 1.0, 0.5, 100.0, age_s=8.0, ttl_s=10.0),
        catalog.add(KEYS[1], 1, 1, 1.0, 0.5, 100.0, ttl_s=10.0),
        catalog.add(KEYS[2], 1, 1, 1.0, 0.5, 100.0, age_s=50.0),
    )
    assert catalog.take_expired(101.0, 9) == []
    assert catalog.take_expired(102.0, 9) == [old]
    catalog.end_after(young, 100.0)
    catalog.end_after(ageless, 60.0)
    assert catalog.take_expired(115.0, 9) == [ageless]
    catalog.remove(young)
    assert catalog.take_expired(1e9, 9) == []
    catalog.check()


def test_room_is_made_in_bounded_steps_however_many_have_been_used() -> None:
    catalog = Catalog(1000)
    for number in range(1000):
        catalog.use(catalog.add(Key("n", str(number)), 1, 1, 1.0, 0.5, 0.0), 1.0)
    calls = 1
    while not (taken := catalog.make_room(1, 64)):
        calls += 1
    assert calls > 1000 // 64, "each call looks at 64"
    assert len(taken) == 1
    assert catalog.has_room(1)


@draws(100)
@given(st.lists(st.tuples(st.sampled_from("arn"), st.integers(0, 15))))
def test_a_walk_finds_what_stays_while_others_come_and_go(steps: list[tuple[str, int]]) -> None:
    catalog = Catalog(100)
    for number in range(8):
        catalog.add(KEYS[number], 1, 1, 1.0, 0.5, 0.0)
    staying, walk, found = set(catalog), iter(catalog), []
    for step, number in steps:
        there = catalog.get(KEYS[number])
        if step == "a" and there is None:
            catalog.add(KEYS[number], 1, 1, 1.0, 0.5, 0.0)
        elif step == "r" and there is not None:
            catalog.remove(there)
            staying.discard(there)
        elif step == "n" and (each := next(walk, None)) is not None:
            found.append(each)
            catalog.remove(each)
        catalog.check()
    found += walk
    assert staying <= set(found)
    assert [each.number for each in found] == sorted({each.number for each in found})


def test_an_erasure_selects_what_is_read_while_it_runs() -> None:
    on_disk = Catalog(1).add(KEYS[0], 1, 1, 1.0, 0.5, 0.0)
    on_disk.used_s = 2.0
    assert _is_selected(on_disk, Selection(), 1.0)
    assert not _is_selected(on_disk, Selection(idle_s=1.0), 2.5)


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
