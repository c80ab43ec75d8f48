"""The measured bandwidth of a source, and which reads from it are left out."""

from __future__ import annotations

import pytest

from ecd.cluster.peers.rates import EXPLORED, HALVED_IN_S, LEAST_S, SAMPLE_S, ReadRate

MIB = 1 << 20


def read(
    rate: ReadRate, nbytes: int, took_s: float, now_s: float = 0.0, whole: bool = True
) -> None:
    rate.began(nbytes, now_s)
    rate.ended(nbytes, now_s + took_s, whole)


def measured(took_s: float = 0.1, nbytes: int = 10 * MIB) -> ReadRate:
    """A rate after one read, 100 MiB/s by default."""
    rate = ReadRate()
    read(rate, nbytes, took_s)
    return rate


def test_nothing_is_left_out_before_a_read_was_measured() -> None:
    rate = ReadRate()
    assert rate.seconds(100 * MIB, 0.0) is None
    assert not rate.is_slower(100 * MIB, 1e-3, 0.0)
    read(rate, 64 << 10, 10.0)
    assert rate.seconds(100 * MIB, 0.0) is None, "a small read says nothing"


def test_the_cheaper_way_is_taken() -> None:
    rate = measured()
    assert rate.seconds(20 * MIB, 0.1) == pytest.approx(0.2)
    assert rate.is_slower(20 * MIB, 0.15, 0.1)
    assert not rate.is_slower(20 * MIB, 0.25, 0.1)
    assert not rate.is_slower(MIB - 1, 1e-6, 0.1), "small entries are always read"
    assert not measured(0.01).is_slower(4 * MIB, 1e-6, 0.01), f"and those that take {LEAST_S} s"


def test_reads_that_share_the_source_measure_its_bandwidth_together() -> None:
    rate = ReadRate()
    for _ in range(10):
        rate.began(10 * MIB, 0.0)
    for number in range(10):
        rate.ended(10 * MIB, 0.91 + number / 100, True)
    assert rate.seconds(10 * MIB, 1.0) == pytest.approx(0.1)
    rate.began(10 * MIB, 1.0)
    assert rate.is_slower(10 * MIB, 0.15, 1.0), "the read under way comes first"


def test_a_source_that_is_never_idle_is_measured_all_the_same() -> None:
    rate = ReadRate()
    rate.began(10 * MIB, 0.0)
    for number in range(1, 40):
        rate.began(10 * MIB, number * 0.1 - 0.05)
        rate.ended(10 * MIB, number * 0.1, True)
    assert rate.seconds(10 * MIB, 4.0) == pytest.approx(0.1, rel=0.1)
    assert SAMPLE_S < 4.0


def test_the_way_to_the_source_is_no_part_of_its_bandwidth() -> None:
    rate = ReadRate()
    rate.answered(0.05)
    read(rate, 10 * MIB, 0.15)
    assert rate.bytes_per_s(0.15) == pytest.approx(100 * MIB)
    assert rate.seconds(10 * MIB, 0.15) == pytest.approx(0.15)


def test_a_read_given_up_shows_only_that_the_source_is_slower() -> None:
    rate = measured()
    before_s = rate.seconds(10 * MIB, 1.0)
    read(rate, 10 * MIB, 0.001, 1.0, whole=False)
    assert rate.seconds(10 * MIB, 1.0) == before_s
    read(rate, 10 * MIB, 8.0, 1.0, whole=False)
    assert rate.seconds(10 * MIB, 9.0) > 1.0


def test_the_estimate_grows_with_age_and_one_in_some_is_read_to_measure_again() -> None:
    rate = measured(10.0)
    left_out = [rate.is_slower(10 * MIB, 1.0, 10.0) for _ in range(2 * EXPLORED)]
    assert left_out.count(False) == 2
    assert rate.too_slow == 2 * EXPLORED
    for _ in range(4):
        read(rate, 10 * MIB, 0.1, 10.0)
    assert rate.seconds(10 * MIB, 10.0) < 1.0, "from 10 s"
    old = measured(10.0)
    assert old.seconds(10 * MIB, 10.0 + 4 * HALVED_IN_S) == pytest.approx(10.0 / 16)
