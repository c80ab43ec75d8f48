"""Places of the encode hop: a share for each caller, and turns for those that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from ecd_client.vllm.places import Places


def waiting(places: Places, *callers: str) -> list[asyncio.Task[None]]:
    return [asyncio.ensure_future(places.wait(caller)) for caller in callers]


async def went_on() -> None:
    """Let all that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Awaitable[None]) -> None:
    async def outer() -> None:
        await test

    asyncio.run(outer())


def test_a_caller_has_its_share_and_others_the_rest() -> None:
    places = Places(4, 3)
    assert [places.take("one") for _ in range(4)] == [True, True, True, False]
    assert places.take("other")
    assert not places.take("other")
    places.give("one")
    assert places.take("other")


def test_who_waits_comes_in_turn_unless_it_has_its_share() -> None:
    async def test() -> None:
        places = Places(3, 2)
        assert all(places.take(caller) for caller in ("one", "one", "other"))
        greedy, first, second = waiting(places, "one", "third", "other")
        await went_on()
        places.give("other")
        await went_on()
        assert (greedy.done(), first.done(), second.done()) == (False, True, False)
        assert not places.take("fourth")
        places.give("one")
        await went_on()
        assert (greedy.done(), second.done()) == (True, False)
        places.give("third")
        await second

    run(test())


@pytest.mark.parametrize("order", ["given, cancelled", "cancelled, given", "gone, given"])
def test_who_leaves_the_queue_takes_no_place(order: str) -> None:
    async def test() -> None:
        places = Places(1, 1)
        assert places.take("one")
        leaves, stays = waiting(places, "leaves", "stays")
        await went_on()
        if order == "given, cancelled":
            places.give("one")  # its turn has come, and it does not know yet
            leaves.cancel()
        else:
            leaves.cancel()
            if order == "gone, given":
                await went_on()
            places.give("one")
        await stays
        places.give("stays")
        assert places.take("one")

    run(test())
