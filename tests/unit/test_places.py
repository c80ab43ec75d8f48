"""Places of the encode hop: a share for each caller, and turns for the requests that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from ecd_client.vllm.middleware.hop.places import Asker, Places


def waiting(places: Places, *askers: Asker) -> list[asyncio.Task[None]]:
    return [asyncio.ensure_future(places.wait(asker)) for asker in askers]


async def went_on() -> None:
    """Let all that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Awaitable[None]) -> None:
    async def outer() -> None:
        await test

    asyncio.run(outer())


def test_a_caller_has_its_share_and_others_the_rest() -> None:
    places, other = Places(4, 3), Asker("other")
    ones = [Asker("one") for _ in range(4)]
    assert [places.take(asker) for asker in ones] == [True, True, True, False]
    assert places.take(other)
    assert not places.take(other)
    places.give(ones[0])
    assert places.take(other)


def test_who_waits_comes_in_turn_unless_it_has_its_share() -> None:
    async def test() -> None:
        places = Places(3, 2)
        one, other, third = map(Asker, ("one", "other", "third"))
        assert all(places.take(asker) for asker in (one, one, other))
        greedy, first, second = waiting(places, Asker("one"), third, Asker("other"))
        await went_on()
        places.give(other)
        await went_on()
        assert (greedy.done(), first.done(), second.done()) == (False, True, False)
        assert not places.take(Asker("fourth"))
        places.give(one)
        await went_on()
        assert (greedy.done(), second.done()) == (True, False)
        places.give(third)
        await second

    run(test())


def test_a_small_request_waits_for_no_large_ones_of_its_caller() -> None:
    """As behind a gateway, where all users are one caller: 1,600 pictures wait, and one more."""

    async def test() -> None:
        places = Places(64, 48)
        large = [Asker("gateway") for _ in range(100)]
        asked = {each: waiting(places, *[each] * 16) for each in large}
        await went_on()
        [one] = waiting(places, Asker("gateway"))
        await went_on()
        holding = [each for each, tasks in asked.items() for task in tasks if task.done()]
        assert len(holding) == 48
        for _ in range(2):
            places.give(holding.pop())
            await went_on()
        assert one.done()
        for task in (task for tasks in asked.values() for task in tasks if not task.done()):
            task.cancel()

    run(test())


def test_a_large_request_gets_on_beside_any_number_of_small_ones() -> None:
    async def test() -> None:
        places, large = Places(1, 1), Asker("one")
        holder = Asker("one")
        assert places.take(holder)
        pictures = waiting(places, *[large] * 3)
        small: dict[Asker, asyncio.Task[None]] = {}
        for _ in range(6):
            for asker in (Asker("one"), Asker("one")):
                [small[asker]] = waiting(places, asker)
            await went_on()
            places.give(holder)
            await went_on()
            came = [asker for asker, task in small.items() if task.done()]
            holder = came[0] if came else large
            small.pop(holder, None)
        assert all(task.done() for task in pictures)
        for task in small.values():
            task.cancel()

    run(test())


@pytest.mark.parametrize("order", ["given, cancelled", "cancelled, given", "gone, given"])
@pytest.mark.parametrize("is_one_request", [False, True])
def test_who_leaves_the_queue_takes_no_place(order: str, is_one_request: bool) -> None:
    async def test() -> None:
        places, one, two = Places(1, 1), Asker("one"), Asker("two")
        other = two if is_one_request else Asker("other")
        assert places.take(one)
        leaves, stays = waiting(places, two, other)
        await went_on()
        if order == "given, cancelled":
            places.give(one)  # its turn has come, and it does not know yet
            leaves.cancel()
        else:
            leaves.cancel()
            if order == "gone, given":
                await went_on()
            places.give(one)
        await stays
        places.give(other)
        assert places.take(one)
        assert (one.media, two.media, other.media) == (1, 0, 0)

    run(test())
