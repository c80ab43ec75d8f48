"""The encode hop with videos and sounds, which take longer than pictures, and kinds together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from ecd_client import Client
from ecd_client.vllm.middleware.hop import encode_hop
from ecd_client.vllm.middleware.hop.encode_hop import NotEncoded
from ecd_client.vllm.middleware.hop.protocol import HAS_OUTLINE, UNLIKE
from ecd_client.vllm.middleware.media import Medium, MissingMedium
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
    count,
    encodes,
    hop_to,
    look,
    never,
    picture,
    waits,
    waits_with_a,
)
from support.waiting import HANG_S, eventually_async

__all__ = "_no_rest_ends", "client", "clock"


def medium(kind: str, name: str, seconds: float = 0.1, **known: Any) -> MissingMedium:
    url, key = f"data:{kind}/x;base64,{name}", f"{kind}_url"
    brought = Medium({"type": key, key: {"url": url}}, key, uuid=name)
    return MissingMedium(brought, url, name, "namespace", 100, None, seconds, **known)


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_a_call_has_the_mediums_part_its_name_and_what_decides_its_decoding(
    client: Client, kind: str
) -> None:
    async def run() -> None:
        async with hop_to(client, encodes) as (hop, [engine], _):
            promise = await hop.promise(medium(kind, "a", decoding="digest"))
            assert promise.placeholder.modality == kind
            assert promise.placeholder.fields == METADATA[kind]
            [asked], key = engine.asked, f"{kind}_url"
            part = {"type": key, key: {"url": f"data:{kind}/x;base64,a"}, "uuid": "a"}
            assert asked["messages"] == [{"role": "user", "content": [part]}]
            assert asked["ec_transfer_params"] == {"ecd_hop": True, "ecd_decoding": "digest"}

    asyncio.run(run())


def test_the_answer_names_what_the_part_is_called_by_vllm(client: Client) -> None:
    """With --media-io-kwargs vLLM's name is not the one that the part says."""

    async def names(_: SmallServer, body: dict) -> web.Response:
        said = {body["messages"][0]["content"][0]["uuid"]: "the name"}
        item = {"metadata": METADATA["audio"]}
        return web.json_response({"ec_transfer_params": {said["the uuid"]: item}})

    async def run() -> None:
        async with hop_to(client, names) as (hop, _, _):
            missing = medium("audio", "the uuid")._replace(name="the name")
            assert (await hop.promise(missing)).placeholder.fields == METADATA["audio"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "said",
    [
        *({}, GRID, METADATA["audio"], [8, 16, 24], {"video_grid_thw": [8, 16]}),
        *({"video_grid_thw": [0, 16, 24]}, {"video_grid_thw": [8.0, 16.0, 24.0]}),
        {"video_grid_thw": [1 << 20, 16, 24]},
    ],
)
def test_what_is_no_videos_metadata_is_not_believed(client: Client, said: Any) -> None:
    wrong = answers(200, {"ec_transfer_params": {"a": {"metadata": said}}})

    async def run() -> None:
        async with hop_to(client, wrong, encodes) as (hop, [bad, good], _):
            promise = await hop.promise(medium("video", "a"))
            assert promise.placeholder.fields == METADATA["video"]
            assert (len(bad.asked), len(good.asked)) == (1, 1)

    asyncio.run(run())


def test_all_kinds_of_a_request_are_promised_or_none(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, encodes) as (hop, [engine], _):
            mixed = look(picture("a"), medium("video", "b"), medium("audio", "c"))
            await hop.complete(mixed, "caller")
            assert [promise.placeholder.fields for _, promise in mixed.promised] == [
                *METADATA.values()
            ]

            async def refuses_sounds(engine: SmallServer, body: dict) -> web.Response:
                [part] = body["messages"][0]["content"]
                is_sound = part["type"] == "audio_url"
                return web.Response(status=400) if is_sound else await encodes(engine, body)

            engine.behaviour = refuses_sounds
            mixed = look(picture("d"), medium("video", "e"), medium("audio", "f"))
            await hop.complete(mixed, "caller")
            assert not mixed.promised
            await eventually_async(lambda: not engine.active)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("said", "is_promised"), [({"metadata": {}}, True), (GRID, True), (None, False), ([], False)]
)
def test_a_medium_that_comes_by_its_outline_needs_no_metadata(
    client: Client, said: Any, is_promised: bool
) -> None:
    async def stores(_: SmallServer, body: dict) -> web.Response:
        answer = {"ec_transfer_params": {"a": said}}
        return web.json_response(answer, headers={HAS_OUTLINE: "1"})

    async def run() -> None:
        async with hop_to(client, stores) as (hop, _, _):
            asked = look(picture("a")._replace(by_outline=True, can_outline=True))
            await hop.complete(asked, "caller")
            assert [promise.placeholder for _, promise in asked.promised] == [None] * is_promised

    asyncio.run(run())


def test_an_outline_that_no_encoder_stores_is_not_waited_for(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine preprocesses the medium, and finds what the encoder has stored."""

    async def run() -> None:
        async with hop_to(client, encodes, encodes) as (hop, engines, _):
            for _ in range(2):
                asked = look(picture("a")._replace(by_outline=True, can_outline=True))
                await hop.complete(asked, "caller")
                assert not asked.promised
            assert sum(len(engine.asked) for engine in engines) == 2, "no other one is asked"
            await hop.promise(picture("b"))

    asyncio.run(run())
    assert caplog.text.count("stores no outlines") == 1


def slowly(clock: Clock, last: Behaviour, calls: int = 1) -> Behaviour:
    """Answers after the time of a picture, and not before it was asked whether it lives.

    So many calls come at a time: each has to reach it before the clock is put ahead.
    """

    async def answer(engine: SmallServer, body: dict) -> web.Response:
        await eventually_async(lambda: len(engine.asked) % calls == 0)
        clock.ahead_s += HANG_S / 3
        await engine.was_asked_if_it_lives.wait()
        clock.ahead_s += 2 * HANG_S
        return await last(engine, body)

    return answer


def test_a_video_is_waited_for_longer_than_a_picture_while_its_encoder_is_alive(
    client: Client, clock: Clock
) -> None:
    async def run() -> None:
        async with hop_to(client, slowly(clock, encodes)) as (hop, [engine], _):
            promise = await hop.promise(medium("video", "a", 10 * HANG_S))
            assert promise.placeholder.fields == METADATA["video"]
            assert len(engine.asked) == 1

    asyncio.run(run())


def test_a_requests_media_have_their_time_together(client: Client, clock: Clock) -> None:
    """As they may wait for each other; one that stands there twice is encoded once."""

    async def run() -> None:
        async with hop_to(client, slowly(clock, encodes, 2)) as (hop, [engine], _):
            twice = [medium("video", "a", 4 * HANG_S)] * 2
            until_s = hop._until_s(*twice, medium("video", "b", HANG_S), picture("c"))
            assert until_s == clock.now_s() + 6 * HANG_S
            asked = look(*twice, medium("audio", "b", HANG_S))
            await hop.complete(asked, "caller")
            assert len(asked.promised) == 3
            assert len(engine.asked) == 2
            engine.was_asked_if_it_lives.clear()
            asked = look(picture("d"), medium("video", "e", 10 * HANG_S))
            await hop.complete(asked, "caller")
            assert len(asked.promised) == 2, "a picture beside a video waits as long"

    asyncio.run(run())


async def says_nothing(engine: SmallServer, _: dict) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("health", ["an error", "nothing"])
def test_an_encoder_that_does_not_live_has_no_longer_than_for_a_picture(
    client: Client, clock: Clock, health: str
) -> None:
    async def hangs(engine: SmallServer, _: dict) -> web.Response:
        clock.ahead_s += HANG_S / 3
        return await says_nothing(engine, {})

    async def hangs_for_good(engine: SmallServer, _: dict) -> web.Response:
        clock.ahead_s += HANG_S
        return await says_nothing(engine, {})

    async def run() -> None:
        async with hop_to(client, hangs, encodes) as (hop, [dead, other], [url, _]):
            dead.says_it_lives = {"an error": answers(503), "nothing": hangs_for_good}[health]
            promise = await hop.promise(medium("video", "a", 100 * HANG_S))
            assert promise.placeholder.fields == METADATA["video"]
            await hop.promise(picture("b"))
            assert (len(dead.asked), len(other.asked)) == (1, 2), "it is left out"
            assert count("encoder_calls_total", encoder=url, outcome="failed") == 1

    asyncio.run(run())


def test_an_encoder_that_was_late_with_a_video_has_no_longer_than_for_a_picture(
    client: Client, clock: Clock
) -> None:
    async def late(engine: SmallServer, body: dict) -> web.Response:
        clock.ahead_s += HANG_S / 3
        await engine.was_asked_if_it_lives.wait()
        clock.ahead_s += 4 * HANG_S
        return await says_nothing(engine, body)

    async def run() -> None:
        async with hop_to(client, encodes) as (hop, [engine], _):
            await hop.promise(picture("a"))  # or it would be left out
            engine.behaviour = late
            with pytest.raises(NotEncoded):
                await hop.promise(medium("video", "b", 2 * HANG_S))
            await eventually_async(lambda: not engine.active)
            engine.was_asked_if_it_lives.clear()
            engine.behaviour = never(clock)
            with pytest.raises(NotEncoded):
                await hop.promise(medium("video", "c", 2 * HANG_S))
            assert not engine.was_asked_if_it_lives.is_set()
            engine.behaviour = encodes
            await hop.promise(medium("video", "d", 2 * HANG_S))
            engine.behaviour = slowly(clock, encodes)
            await hop.promise(medium("video", "e", 4 * HANG_S))
            assert engine.was_asked_if_it_lives.is_set(), "it has served a video since then"
            assert len(engine.asked) == 5

    asyncio.run(run())


def test_an_encoder_that_was_late_with_a_video_has_no_longer_though_it_serves_others(
    client: Client, clock: Clock
) -> None:
    async def run() -> None:
        async with hop_to(client, waits_with_a, encodes) as (hop, [late, _], _):
            encoder = hop._encoders._encoders[0]
            hop._encoders.note_late(encoder, clock.now_s())
            asked = asyncio.ensure_future(hop.promise(medium("video", "a", 4 * HANG_S)))
            await eventually_async(lambda: late.active)
            for number in range(6):
                clock.ahead_s += 0.9 * HANG_S
                hop._encoders.note_served(encoder, clock.now_s())
                await hop.promise(picture(f"b{number}"))
            await asked

    asyncio.run(run())


def test_an_encoder_that_decodes_otherwise_is_not_left_out(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, answers(UNLIKE), encodes) as (hop, [unlike, other], _):
            await hop.promise(medium("video", "a"))
            assert (len(unlike.asked), len(other.asked)) == (1, 1)
            unlike.behaviour = encodes
            for name in "bc":
                await hop.promise(picture(name))
            assert (len(unlike.asked), len(other.asked)) == (2, 2)

    asyncio.run(run())


def test_the_bytes_on_their_way_are_bounded(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_hop, "MAX_SENT_BYTES", 100)

    async def run() -> None:
        full = count("hop_pictures_total", outcome="full")
        async with hop_to(client, waits) as (hop, [engine], _):
            large = [medium("video", f"{number}" * 90) for number in range(2)]
            first = asyncio.ensure_future(hop.promise(large[0]))
            await eventually_async(lambda: engine.active == 1)
            with pytest.raises(NotEncoded):
                await hop.promise(large[1])
            assert count("hop_pictures_total", outcome="full") == full + 1
            engine.goes_on.set()
            await first
            await hop.promise(large[1])  # alone it may have any size

    asyncio.run(run())
