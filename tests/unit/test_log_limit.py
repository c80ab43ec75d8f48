"""Of what may happen often the log has one line a minute for each kind."""

from __future__ import annotations

from ecd.base.log_limit import LOG_PERIOD_S, MAX_KINDS, LogLimit
from support.clock import SetClock


def test_a_line_counts_those_left_out_since_the_last_of_its_kind() -> None:
    clock = SetClock()
    lines = LogLimit(clock)
    assert [lines.take("a") for _ in range(3)] == ["", None, None]
    assert lines.take("b") == ""
    clock.at_s += LOG_PERIOD_S - 0.1
    assert lines.take("a") is None
    clock.at_s += 0.1
    assert [lines.take("a"), lines.take("b")] == [" (3 more since the last such line)", ""]
    clock.at_s += LOG_PERIOD_S
    assert lines.take("a") == ""


def test_kinds_without_end_take_no_more_lines_and_no_more_memory() -> None:
    clock = SetClock()
    lines = LogLimit(clock)
    logged = [lines.take(number) for number in range(10 * MAX_KINDS)]
    assert logged.count("") == MAX_KINDS + 1, "all others share a line"
    clock.at_s += LOG_PERIOD_S
    assert lines.take("late") == ""
    assert len(lines._logged_s) == MAX_KINDS + 1
