"""How many examples the tests of the core draw, and what may end such a test.

`make test` draws the same examples in each run, so a failure there comes of the change. With
ECD_EXAMPLES above 1 each run draws others, and so many times as many.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

SHARE = float(os.environ.get("ECD_EXAMPLES", "1"))

drawn = pytest.mark.timeout(600 + 60 * SHARE)
"""Marks a state machine: Hypothesis shrinks what fails for 300 s, so only a hang takes longer."""


def draws(count: int, steps: int = 50) -> settings:
    """Settings for `count` examples, or the share of them that ECD_EXAMPLES asks for."""
    return settings(
        max_examples=max(1, int(count * SHARE)),
        stateful_step_count=steps,
        deadline=None,
        derandomize=SHARE <= 1,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
