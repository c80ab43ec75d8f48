"""What one medium, one request and one encoder can cost the others in the encode hop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from ecd_client import Client
from ecd_client.vllm.middleware.hop.encode_hop import MAX_LOST, NotEncoded
from ecd_client.vllm.middleware.hop.protocol import HAS_OUTLINE, UNLIKE
from ecd_client.vllm.middleware.hop.sizes import MAX_SECONDS
from integration.test_encode_hop import (
    GRID,
    METADATA,
    Behaviour,
    Clock,
    SmallServer,
    _no_rest_ends,
    answers,
    client,
    clock,
    encodes,
    hop_to,
    look,
    picture,
    waits,
)
from integration.test_encode_hop_media import medium, says_nothing
from support.waiting import HANG_S, eventually_async

__all__ = "_no_rest_ends", "client", "clock"
STORED = {"ecd_node": "10.0.0.1:9465", "ecd_extent": [0, 4096, 100]}


async def stores_without_metadata(_: SmallServer, body: dict) -> web.Response:
    [part] = body["messages"][0]["content"]
    item = {"metadata": {}, **STORED}
    return web.json_response({"ec_transfer_params": {part["uuid"]: item}})


async def names_no_node(_: SmallServer, body: dict) -> web.Response:
    [part] = body["messages"][0]["content"]
    kind = part["type"].removesuffix("_url")
    return web.json_response({"ec_transfer_params": {part["uuid"]: {"metadata": METADATA[kind]}}})


@pytest.mark.parametrize(
    ("stores", "by_outline"), [(stores_without_metadata, False), (names_no_node, True)]
)
def test_what_is_stored_and_cannot_be_told_blames_no_encoder(
    client: Client, stores: Behaviour, by_outline: bool
) -> None:
    """Timestamps may be too many for an answer, and a frame may not be what the header says."""

    async def run() -> None:
        async with hop_to(client, *[stores] * 3) as (hop, engines, _):
            with pytest.raises(NotEncoded):
                await hop.promise(medium("video", "a", by_outline=by_outline, can_outline=True))
            assert sum(len(engine.asked) for engine in engines) == 1
            for engine in engines:
                engine.behaviour = encodes
            for name in "bcd":
                await hop.promise(picture(name))
            assert sorted(len(engine.asked) for engine in engines) == [1, 1, 2]

    asyncio.run(run())


@pytest.mark.parametrize("can_outline", [True, False])
def test_it_comes_by_its_outline_if_it_has_one(client: Client, can_outline: bool) -> None:
    async def stores(engine: SmallServer, body: dict) -> web.Response:
        answer = await stores_without_metadata(engine, body)
        answer.headers[HAS_OUTLINE] = "1"
        return answer

    async def run() -> None:
        async with hop_to(client, stores) as (hop, _, _):
            asked = look(medium("video", "a", can_outline=can_outline))
            await hop.complete(asked, "caller")
            said = [promise.placeholder for _, promise in asked.promised]
            assert said == [None] * can_outline

    asyncio.run(run())


def test_who_joins_a_call_waits_no_longer_than_alone(client: Client, clock: Clock) -> None:
    async def run() -> None:
        async with hop_to(client, waits) as (hop, [engine], _):
            long = look(picture("p"), medium("video", "v", 9 * HANG_S))
            first = asyncio.ensure_future(hop.complete(long, "one"))
            await eventually_async(lambda: engine.active == 2)
            short = look(picture("p"))
            second = asyncio.ensure_future(hop.complete(short, "other"))
            await eventually_async(lambda: any(f.waiting == 2 for f in hop._flights.values()))
            clock.ahead_s += 2 * HANG_S
            await second
            assert not short.promised
            engine.goes_on.set()
            await first
            assert len(long.promised) == 2

    asyncio.run(run())


def test_who_joins_a_call_that_ends_earlier_asks_again(client: Client, clock: Clock) -> None:
    async def run() -> None:
        async with hop_to(client, says_nothing, in_need=True) as (hop, [engine], _):
            short = asyncio.ensure_future(hop.promise(picture("p")))
            await eventually_async(lambda: engine.active == 1)
            until_s = clock.now_s() + 9 * HANG_S
            long = asyncio.ensure_future(hop.promise(picture("p"), until_s=until_s))
            await eventually_async(lambda: any(f.waiting == 2 for f in hop._flights.values()))
            engine.behaviour = encodes
            clock.ahead_s += HANG_S + 1.0
            with pytest.raises(NotEncoded):
                await short
            assert (await long).placeholder.fields == GRID
            assert len(engine.asked) == 2

    asyncio.run(run())


def test_a_refusal_is_that_of_all_who_have_joined(client: Client) -> None:
    async def refuses(engine: SmallServer, _: dict) -> web.Response:
        await engine.goes_on.wait()
        return web.Response(status=400)

    async def run() -> None:
        async with hop_to(client, refuses) as (hop, [engine], _):
            asked = [look(picture("p")) for _ in range(9)]
            first = asyncio.ensure_future(hop.complete(asked[0], "one"))
            await eventually_async(lambda: engine.active == 1)
            others = [asyncio.ensure_future(hop.complete(each, "other")) for each in asked[1:]]
            await eventually_async(lambda: any(f.waiting == 9 for f in hop._flights.values()))
            engine.goes_on.set()
            await asyncio.gather(first, *others)
            assert not any(each.promised for each in asked)
            assert len(engine.asked) == 1

    asyncio.run(run())


def test_an_encoder_has_to_live_for_all_of_a_long_wait(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, waited_s = asyncio.wait, list[float | None]()

    def noted(*tasks: Any, **how: Any) -> Any:
        waited_s.append(how.get("timeout"))
        return wait(*tasks, **how)

    monkeypatch.setattr(asyncio, "wait", noted)

    async def run() -> None:
        async with hop_to(client, says_nothing, encodes) as (hop, [dead, other], _):
            asked = asyncio.ensure_future(hop.promise(medium("video", "a", 9 * HANG_S)))
            await eventually_async(lambda: dead.active == 1)
            clock.ahead_s += HANG_S / 3
            await dead.was_asked_if_it_lives.wait()
            dead.was_asked_if_it_lives.clear()
            dead.says_it_lives = answers(503)
            await eventually_async(lambda: HANG_S in waited_s, "it waits until it asks again")
            clock.ahead_s += HANG_S
            await dead.was_asked_if_it_lives.wait()
            assert (await asked).placeholder.fields == METADATA["video"]
            assert len(other.asked) == 1

    asyncio.run(run())


def test_all_media_of_a_request_have_a_bound_together(client: Client, clock: Clock) -> None:
    async def run() -> None:
        async with hop_to(client, encodes) as (hop, _, _):
            many = [medium("video", f"{number}", MAX_SECONDS) for number in range(64)]
            assert hop._until_s(*many) == clock.now_s() + HANG_S + MAX_SECONDS

    asyncio.run(run())


def test_a_medium_that_vllm_cannot_load_is_refused(client: Client) -> None:
    """vLLM answers with 501 where it has not implemented what a URL asks for."""

    async def run() -> None:
        async with hop_to(client, answers(501), answers(501)) as (hop, engines, _):
            with pytest.raises(NotEncoded):
                await hop.promise(picture("a"))
            assert sum(len(engine.asked) for engine in engines) == 1
            for engine in engines:
                engine.behaviour = encodes
            for name in "bc":
                await hop.promise(picture(name))
            assert sum(len(engine.asked) for engine in engines) == 3

    asyncio.run(run())


def test_a_medium_over_which_encoders_end_goes_to_few(client: Client) -> None:
    async def ends(engine: SmallServer, _: dict) -> web.Response:
        assert engine.transport is not None
        engine.transport.abort()
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        async with hop_to(client, *[ends] * (MAX_LOST + 2)) as (hop, engines, _):
            with pytest.raises(NotEncoded):
                await hop.promise(medium("video", "a"))
            assert sum(len(engine.asked) for engine in engines) == MAX_LOST
            await eventually_async(lambda: not any(engine.active for engine in engines))

    asyncio.run(run())


def test_a_name_of_two_kinds_is_two_media(client: Client) -> None:
    """A client may give one name to a picture and to a video."""

    async def run() -> None:
        async with hop_to(client, waits) as (hop, [engine], _):
            asked = [look(picture("a")), look(medium("video", "a"))]
            tasks = [asyncio.ensure_future(hop.complete(each, "caller")) for each in asked]
            await eventually_async(lambda: engine.active == 2)
            engine.goes_on.set()
            await asyncio.gather(*tasks)
            kinds = [promise.placeholder.modality for each in asked for _, promise in each.promised]
            assert kinds == ["image", "video"]

    asyncio.run(run())


def test_bytes_that_were_sent_are_not_kept(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, encodes) as (hop, _, _):
            asked = look(picture("a"))
            await hop.complete(asked, "caller")
            assert [missing.url for missing, _ in asked.promised] == [""]

    asyncio.run(run())


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_call_says_the_same_however_it_is_written(client: Client, is_safe: bool) -> None:
    async def run() -> None:
        async with hop_to(client, encodes) as (hop, [engine], _):
            known: dict[str, Any] = {"salt": 'a "url": "" of a salt', "decoding": "digest"}
            missing = medium("video", "a")._replace(is_safe=is_safe, **known)
            await hop.promise(missing)
            [asked] = engine.asked
            assert asked == json.loads(hop._body(missing._replace(is_safe=False)))
            assert asked["messages"] == [{"role": "user", "content": [missing.part]}]

    asyncio.run(run())


def test_an_encoder_that_decodes_otherwise_is_not_asked_again_at_once(
    client: Client, clock: Clock
) -> None:
    async def run() -> None:
        async with hop_to(client, answers(UNLIKE), encodes) as (hop, [unlike, other], _):
            for name in "abc":
                await hop.promise(medium("video", name, decoding="digest"))
            assert (len(unlike.asked), len(other.asked)) == (1, 3)
            unlike.behaviour = encodes
            clock.ahead_s += 601.0
            await hop.promise(medium("video", "d", decoding="digest"))
            assert len(unlike.asked) == 2

    asyncio.run(run())
