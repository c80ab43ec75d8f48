"""The layout of the mapped index: its bytes, and rows that are read while they are written."""

import random

import pytest

from ecd.core.model.board import MAX_PIECES
from ecd_proto.shm.index import IndexShape, bucket_of, pack_index_header, unpack_index_header
from ecd_proto.shm.namespaces import NAMESPACES_BYTES, Namespaces
from ecd_proto.shm.rows import (
    ROW_BYTES,
    Row,
    key_record,
    next_row,
    pack_row,
    row_has_key,
    row_is_whole,
    row_mark,
    unpack_row,
)
from ecd_proto.shm.session_page import FIRST_ANSWER_WORD, FIRST_GRANT_WORD, MAX_GRANTS

ROW = Row(7, 0, 4096, 96, "bfloat16", (4, 12), b"grid", 0.25, False)
RECORD = key_record(3, "abc")
assert RECORD is not None


def test_the_layout_is_what_other_versions_expect() -> None:
    """A change of these bytes raises INDEX_VERSION: older clients then call for everything."""
    assert pack_index_header(IndexShape(1024, 16, 7, 2)).hex() == (
        "65636469" "6e646578" "05000000" "00010000"
        "0004000000000000" "1000000000000000" "0700000000000000" "0200000000000000"
    )  # fmt: skip
    assert pack_row(RECORD, ROW, 3)[:112].hex() == (
        "0300000000000000" "CHECKSUM" "0700000000000000" "0010000000000000" "6000000000000000"
        "000000000000d03f" "0000" "02" "02" "0400" "0000"
        "03000300" "616263" "0400000000000000" "0c00000000000000"
        "67726964" "0000000000000000000000000000000000000000000000000000000000"
    ).replace("CHECKSUM", pack_row(RECORD, ROW, 3)[8:16].hex())[:224]  # fmt: skip


def test_a_mailbox_has_a_word_for_each_piece_that_the_core_grants() -> None:
    assert MAX_PIECES == MAX_GRANTS == FIRST_ANSWER_WORD - FIRST_GRANT_WORD


def test_a_header_of_another_version_is_not_read() -> None:
    header = pack_index_header(IndexShape(1024, 16, 7, 2))
    assert unpack_index_header(header) == IndexShape(1024, 16, 7, 2)
    for byte in (0, 8, 12):
        changed = bytearray(header)
        changed[byte] ^= 1
        assert unpack_index_header(bytes(changed)) is None


def test_a_row_says_what_was_put_in() -> None:
    for row in (
        ROW,
        ROW._replace(shape=(), nbytes=2, metadata=b""),
        ROW._replace(shape=(1,) * 16, dtype="float8_e5m2", entry=1 << 63),
    ):
        packed = pack_row(RECORD, row, 9)
        assert len(packed) == ROW_BYTES
        assert row_has_key(packed, RECORD)
        assert row_is_whole(packed)
        assert next_row(packed) == 9
        assert unpack_row(packed) == row


def test_what_does_not_fit_is_to_be_asked_for() -> None:
    asked = unpack_row(pack_row(RECORD, ROW._replace(metadata=bytes(4096)), 0))
    assert asked.truncated
    assert asked.entry == ROW.entry
    assert key_record(1, "h" * 1000) is None
    assert key_record(1, "h" * 128) is not None, "longer than any hash"


def test_keys_that_begin_alike_differ() -> None:
    one, other = key_record(1, "ab"), key_record(1, "abc")
    assert one is not None
    assert other is not None
    assert not row_has_key(pack_row(one, ROW, 0), other)
    assert 0 <= bucket_of(one, IndexShape(1024, 16, 7, 2)) < 1024


def test_a_row_that_is_half_written_is_never_whole() -> None:
    """Any mixture of two rows, word by word, as a reader may copy it."""
    chance = random.Random(1)
    other = key_record(3, "abd")
    assert other is not None
    old = pack_row(RECORD, ROW, 3)
    new = pack_row(other, ROW._replace(entry=8, offset=8192, metadata=b"more"), 4)
    differing = [at for at in range(8, ROW_BYTES, 8) if old[at : at + 8] != new[at : at + 8]]
    assert len(differing) >= 4
    hidden = bytearray(old)
    hidden[16:24] = bytes(8)
    assert not row_is_whole(bytes(hidden))
    without_a_checksum = 0
    for _ in range(2000):
        mixed = bytearray(old)
        written = chance.sample(differing, chance.randint(1, len(differing) - 1))
        for at in written:
            mixed[at : at + 8] = new[at : at + 8]
        assert not row_is_whole(bytes(mixed))
        without_a_checksum += row_mark(mixed) == row_mark(new) and unpack_row(
            bytes(mixed)
        ) != unpack_row(new)
    assert without_a_checksum, "the checksum was never what told"


def test_a_namespace_keeps_its_number() -> None:
    table = memoryview(bytearray(NAMESPACES_BYTES))
    daemon, client = Namespaces(table), Namespaces(table)
    assert client.number_of("a") == 0
    assert [daemon.add(name) for name in ("a", "model \u2713" * 70, "a", "b")] == [1, 2, 1, 3]
    assert [client.number_of(name) for name in ("b", "a", "c")] == [3, 1, 0]
    assert client.name_of(2) == "model \u2713" * 70
    for number in (0, 4, 65535):
        with pytest.raises(IndexError):
            client.name_of(number)


def test_a_table_that_is_full_says_so() -> None:
    table = memoryview(bytearray(NAMESPACES_BYTES))
    daemon, client = Namespaces(table), Namespaces(table)
    numbers = [daemon.add(f"{number:01000}") for number in range(100)]
    known = sum(number is not None for number in numbers)
    assert numbers == [*range(1, known + 1), *[None] * (100 - known)]
    assert 60 < known < 66
    assert client.number_of(f"{known - 1:01000}") == known
    assert client.number_of(f"{known:01000}") is None, "the daemon may have it, unlisted"


def test_a_namespace_that_is_half_written_is_not_known() -> None:
    table = memoryview(bytearray(NAMESPACES_BYTES))
    Namespaces(table).add("a")
    for at in (8, 14):
        spoilt = memoryview(bytearray(table))
        spoilt[at] ^= 0x10
        assert Namespaces(spoilt).number_of("a") is None
        with pytest.raises(IndexError):
            Namespaces(spoilt).name_of(1)
