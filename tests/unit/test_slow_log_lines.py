"""The slow log by itself: when events are said to have begun, and how few lines tell of them."""

from __future__ import annotations

import pytest

from ecd.base.log_limit import LOG_PERIOD_S
from ecd.live.slow_log import SlowLog
from support.clock import SetClock


def test_an_event_is_dated_by_its_beginning() -> None:
    clock = SetClock()
    clock.at_s = 1000.0
    slow_log = SlowLog(clock, 0.5)
    slow_log.call("Reserve", 0.4, None)
    slow_log.call("Acquire", 0.5, None)
    clock.at_s += 1.0
    slow_log.call("Evict", 3.0, None)
    found = [(event.kind, event.seconds, event.unix_s) for event in slow_log.newest(clear=False)]
    assert found == [("Evict", 3.0, 2e9 + 998.0), ("Acquire", 0.5, 2e9 + 999.5)]


def test_one_line_a_minute_tells_of_any_number(caplog: pytest.LogCaptureFixture) -> None:
    clock = SetClock()
    slow_log = SlowLog(clock, 0.0)
    with caplog.at_level("INFO", "ecd.live.slow_log"):
        for _ in range(200):
            slow_log.call("Put", 1.0, None)
        clock.at_s += LOG_PERIOD_S - 0.1
        slow_log.call("Put", 1.0, None)
        assert len(caplog.messages) == 1
        clock.at_s += 0.1
        slow_log.call("Put", 1.0, None)
    [_, line] = caplog.messages
    assert "200 more since the last such line" in line
