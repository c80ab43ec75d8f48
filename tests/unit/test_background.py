"""Waiting with a bound: nothing that is cancelled goes on."""

from __future__ import annotations

import asyncio

import pytest

from ecd.live.background import within


def test_a_cancellation_is_not_lost_where_it_meets_the_end() -> None:
    """As asyncio.wait_for loses it before Python 3.12."""

    async def run() -> None:
        awaited = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(within(10.0, awaited))
        await asyncio.sleep(0)
        awaited.set_result("done")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


def test_what_takes_too_long_is_cancelled_and_its_error_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("wrong")

    async def run() -> None:
        late = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, late)
        assert late.cancelled()
        with pytest.raises(ValueError, match="wrong"):
            await within(10.0, fail())

    asyncio.run(run())
