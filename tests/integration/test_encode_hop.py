"""The encode hop against small HTTP servers in place of engines: calls, failures and bounds."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from ecd_client import Client
from ecd_client.vllm.middleware.hop import encode_hop, encoders
from ecd_client.vllm.middleware.hop.encode_hop import EncodeHop, NotEncoded
from ecd_client.vllm.middleware.hop.encoders import EncoderPool
from ecd_client.vllm.middleware.hop.protocol import IS_HOP, is_call
from ecd_client.vllm.middleware.media import Medium, MissingMedium
from ecd_proto.backoff import Backoff
from ecd_proto.contract import Hint
from ecd_proto.placeholders import Placeholder
from support.daemon import Daemon
from support.waiting import HANG_S, eventually_async


@pytest.fixture(autouse=True)
def _no_rest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "RESTS", Backoff(600.0, 600.0))
    monkeypatch.setattr(encode_hop, "CALM_S", 600.0)


class Clock:
    """The hop's stands still until a test puts it ahead, and the event loop's with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        of_loop, self.ahead_s = asyncio.BaseEventLoop.time, 0.0
        ahead = lambda loop: of_loop(loop) + self.ahead_s  # noqa: E731
        monkeypatch.setattr(asyncio.BaseEventLoop, "time", ahead)
        monkeypatch.setattr(encode_hop, "clock", self)

    def now_s(self) -> float:
        return 1e6 + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def client() -> Iterator[Client]:
    """A client whose daemon is away, as the hop asks it for its node's name alone."""
    with Client("unix:///nowhere", connect_timeout=0.0) as client:
        yield client


GRID = {"image_grid_thw": [1, 16, 24]}
METADATA = {
    "image": GRID,
    "video": {"video_grid_thw": [8, 16, 24]},
    "audio": {"audio_num_tokens": [25]},
}
Behaviour = Callable[["SmallServer", dict], Awaitable[web.Response]]


def known(modality: str, fields: Any) -> Placeholder | None:
    placeholder = Placeholder.of(modality, fields)
    is_known = placeholder and placeholder.fields.keys() == METADATA[modality].keys()
    return placeholder if is_known else None


class SmallServer:
    """A server that answers chat completions as it is told to, and remembers them."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.asked: list[dict] = []
        self.paths: set[str] = set()
        self.headers: list[dict] = []
        self.active = self.most_active = 0
        self.goes_on = asyncio.Event()
        self.says_it_lives = answers(200)
        self.was_asked_if_it_lives, self.looks = asyncio.Event(), 0
        self.transport: asyncio.Transport | None = None

    async def serve(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.transport = request.transport
        self.asked.append(body)
        self.paths.add(request.path)
        self.headers.append(dict(request.headers))
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            return await self.behaviour(self, body)
        finally:
            self.active -= 1

    async def live(self, request: web.Request) -> web.Response:
        assert request.path == "/health"
        self.was_asked_if_it_lives.set()
        self.looks += 1
        try:
            return await self.says_it_lives(self, {})
        finally:
            self.looks -= 1


async def encodes(_: SmallServer, body: dict) -> web.Response:
    [part] = body["messages"][0]["content"]
    name, kind = part["uuid"], part["type"].removesuffix("_url")
    item = {"metadata": METADATA[kind], "ecd_node": "10.0.0.1:9465", "ecd_extent": [0, 4096, 100]}
    return web.json_response({"ec_transfer_params": {name: item}})


async def waits(engine: SmallServer, body: dict) -> web.Response:
    await engine.goes_on.wait()
    return await encodes(engine, body)


async def waits_with_a(engine: SmallServer, body: dict) -> web.Response:
    [part] = body["messages"][0]["content"]
    return await (waits if part["uuid"] == "a" else encodes)(engine, body)


def never(clock: Clock, at: int = 1) -> Behaviour:
    """Does not answer: the time of the calls is over as soon as there are `at`."""

    async def wait(engine: SmallServer, _: dict) -> web.Response:
        if engine.active == at:
            clock.ahead_s += HANG_S + 1.0  # aiohttp rounds up
        await asyncio.Event().wait()
        raise AssertionError

    return wait


def answers(status: int, said: Any = None) -> Behaviour:
    async def answer(_: SmallServer, body: dict) -> web.Response:
        return web.json_response(said, status=status)

    return answer


async def redirects(_: SmallServer, body: dict) -> web.Response:
    raise web.HTTPTemporaryRedirect("/elsewhere")


async def compresses(_: SmallServer, body: dict) -> web.Response:
    """A right answer, but for its encoding: it may become anything."""
    said = json.dumps({"ec_transfer_params": {"a": {"metadata": GRID}}}).encode()
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    return web.Response(body=gzip.compress(said), headers=headers)


def with_grid(grid: list) -> Behaviour:
    return answers(200, {"ec_transfer_params": {"a": {"metadata": {"image_grid_thw": grid}}}})


@asynccontextmanager
async def hop_to(
    client: Client, *behaviours: Behaviour, dead: int = 0, **options: Any
) -> AsyncIterator[tuple[EncodeHop, list[SmallServer], list[str]]]:
    """A hop to `dead` encoders that nobody serves, and to one engine for each behaviour."""
    engines = [SmallServer(behaviour) for behaviour in behaviours]
    runners, urls, unserved = [], [], []
    for _ in range(dead):
        unserved.append(socket.socket())
        unserved[-1].bind(("127.0.0.1", 0))
        urls.append(f"http://127.0.0.1:{unserved[-1].getsockname()[1]}")
    for engine in engines:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/{path:.*}", engine.serve)
        app.router.add_get("/{path:.*}", engine.live)
        runners.append(web.AppRunner(app, handler_cancellation=True))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")
    chooser = EncoderPool(urls)
    hop = EncodeHop(
        chooser,
        client,
        "tiny",
        known,
        **{"key": None, "in_need": False, "within_s": HANG_S, **options},
    )
    encode_hop.metrics().calls.clear()  # a port may have been another test's
    try:
        yield hop, engines, urls
        await eventually_async(lambda: not hop._flights, "what was cancelled has ended")
        await eventually_async(lambda: not any(each.active_tokens for each in chooser._encoders))
        for url in urls:
            assert count("encoder_active_tokens", encoder=url) == 0
    finally:
        await hop.close()
        for runner in runners:
            await runner.cleanup()
        for each in unserved:
            each.close()


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"vllm:ecd_{name}", labels) or 0.0


def picture(name: str, tokens: int = 10) -> MissingMedium:
    url = f"data:image/png;base64,{name}"
    part = {"type": "image_url", "image_url": {"url": url}}
    return MissingMedium(Medium(part, "image_url", uuid=name), url, name, "namespace", tokens)


def test_a_call_has_one_picture_under_its_name_and_nothing_of_the_caller(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, encodes, key="k") as (hop, [engine], _):
            promise = await hop.promise(picture("a"))
            assert (promise.placeholder.fields, promise.hints) == (
                GRID,
                [Hint("10.0.0.1:9465", 0, 4096, 100)],
            )
            [asked], [headers] = engine.asked, engine.headers
            part = {**picture("a").medium.part, "uuid": "a"}
            messages = [{"role": "user", "content": [part]}]
            params = {"ecd_hop": True}
            assert asked == {
                "model": "tiny",
                "messages": messages,
                "max_tokens": 1,
                "ec_transfer_params": params,
            }
            assert headers["Authorization"] == "Bearer k"
            assert headers[IS_HOP] == "1"
            assert engine.paths == {"/v1/chat/completions"}

    asyncio.run(run())


def test_an_encoder_is_told_which_node_wants_the_picture(
    make_daemon: Callable[..., Daemon],
) -> None:
    node = "127.0.92.1:9465"
    daemon = make_daemon(ECD_PEER_ADDRESS=node, ECD_ENGINE_PORTS="18940-18955").start()

    async def run(client: Client) -> None:
        async with hop_to(client, encodes) as (hop, [engine], _):
            await hop.promise(picture("a"))
            said = {"ecd_hop": True, "ecd_consumers": [node]}
            assert engine.asked[0]["ec_transfer_params"] == said

    with Client(daemon.address) as client:
        asyncio.run(run(client))


def test_a_slow_encoder_gets_fewer_pictures(client: Client) -> None:
    async def slow(engine: SmallServer, body: dict) -> web.Response:
        [quick], asked = quicks, len(quicks[0].asked)
        await eventually_async(
            lambda: len(quick.asked) >= asked + 10 or len(quick.asked) + len(engine.asked) == 60
        )
        return await encodes(engine, body)

    quicks: list[SmallServer] = []

    async def run() -> None:
        async with hop_to(client, slow, encodes) as (hop, [slowed, quick], _):
            quicks.append(quick)
            pictures = iter([picture(f"{number}") for number in range(60)])

            async def ask() -> None:
                for missing in pictures:
                    await hop.promise(missing)

            await asyncio.gather(*(ask() for _ in range(4)))
            assert len(slowed.asked) + len(quick.asked) == 60
            assert len(quick.asked) >= 2 * len(slowed.asked) > 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "failing",
    [
        *(answers(500), answers(503), answers(401), answers(200, [])),
        answers(200, {"ec_transfer_params": {"a": {"metadata": {}}}}),
        answers(200, {"ec_transfer_params": {"b": {"metadata": GRID}}}),
        answers(200, {"ec_transfer_params": {"a": {"metadata": {"image_grid_thw": "1"}}}}),
        *map(with_grid, ([1e99], [0, 16, 24], [1, -16, 24], [1, 8000, 8000], [1] * 65, [], [True])),
        with_grid([1.0, 16.0, 24.0]),
        answers(200, {"ec_transfer_params": {"a": {"metadata": [1]}}}),
        answers(200, {"ec_transfer_params": {"a": {"metadata": GRID}}, "more": "x" * (1 << 17)}),
        *(redirects, compresses),
    ],
)
def test_another_encoder_is_tried_and_the_failed_one_left_out(
    client: Client, failing: Behaviour
) -> None:
    async def run() -> None:
        async with hop_to(client, failing, encodes) as (hop, [bad, good], [url, _]):
            assert (await hop.promise(picture("a"))).placeholder.fields == GRID
            await hop.promise(picture("c"))
            await hop.promise(picture("d"))
            assert (len(bad.asked), len(good.asked)) == (1, 3)
            asked_for = {each["Accept-Encoding"] for each in bad.headers + good.headers}
            assert asked_for == {"identity"}
            assert count("encoder_calls_total", encoder=url, outcome="failed") == 1

    asyncio.run(run())


def test_nobody_who_listens_and_nobody_who_answers(client: Client, clock: Clock) -> None:
    async def run() -> None:
        async with hop_to(client, never(clock), dead=2) as (hop, [stuck], urls):
            given_up = count("hop_pictures_total", outcome="given_up")
            with pytest.raises(NotEncoded):
                await hop.promise(picture("a"))
            with pytest.raises(NotEncoded):  # all are left out
                await hop.promise(picture("b"))
            assert len(stuck.asked) == 1
            assert count("hop_pictures_total", outcome="given_up") == given_up + 1
            for url in urls:
                assert count("encoder_calls_total", encoder=url, outcome="failed") == 1

    asyncio.run(run())


def test_an_encoder_that_has_just_served_is_late_and_not_left_out(
    client: Client, clock: Clock
) -> None:
    async def run() -> None:
        async with hop_to(client, encodes) as (hop, [engine], _):
            await hop.promise(picture("a"))
            engine.behaviour = never(clock)
            for name in "bc":
                with pytest.raises(NotEncoded):
                    await hop.promise(picture(name))
            assert len(engine.asked) == 3

    asyncio.run(run())


@pytest.mark.parametrize(
    ("pauses", "in_need", "is_late"),
    [
        ([0.8] * 6, False, False),
        ([0.8] * 7, False, True),  # that is more than TIMES_IF_BUSY
        ([0.9, 1.1], False, True),
        ([0.9] * 2, True, True),
    ],
)
def test_an_encoder_is_waited_for_while_it_serves_others_but_not_in_need(
    client: Client,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    pauses: list[float],
    in_need: bool,
    is_late: bool,
) -> None:
    async def run() -> None:
        async with hop_to(client, waits_with_a, in_need=in_need) as (hop, [engine], _):
            asked = look(picture("a"))
            task = asyncio.ensure_future(hop.complete(asked, "caller"))
            await eventually_async(lambda: engine.active)
            for number, pause in enumerate(pauses):
                clock.ahead_s += pause * HANG_S
                await hop.promise(picture(f"b{number}"))
            if is_late:
                await task
            engine.goes_on.set()
            await task
            assert len(asked.promised) == (not is_late)

    asyncio.run(run())
    gc.collect()  # asyncio complains as it ends a task
    assert "never retrieved" not in caplog.text


def test_media_begin_while_encoders_are_busy(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that waited for their turn, and those that another encoder has failed to encode."""
    monkeypatch.setattr(encode_hop, "MAX_OF_REQUEST", 1)

    async def fails_with_a(engine: SmallServer, body: dict) -> web.Response:
        [part] = body["messages"][0]["content"]
        await engine.goes_on.wait()
        return await (answers(500) if part["uuid"] == "a" else encodes)(engine, body)

    async def run() -> None:
        async with hop_to(client, fails_with_a, encodes) as (hop, [slow, quick], _):
            asked = look(picture("a"), picture("b"))
            task = asyncio.ensure_future(hop.complete(asked, "caller"))
            await eventually_async(lambda: slow.active)
            for pause in (0.9, 0.9):
                clock.ahead_s += pause * HANG_S
                hop._encoders.note_served(hop._encoders._encoders[0], clock.now_s())
            slow.goes_on.set()
            await task
            assert len(asked.promised) == 2
            assert quick.asked

    asyncio.run(run())


def test_an_encoder_whose_promise_was_empty_is_left_out(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, encodes, encodes) as (hop, [first, other], _):
            promised = look(picture("a"))
            await hop.complete(promised, "caller")
            hop.blame(promised)
            for name in "bcd":
                await hop.promise(picture(name))
            assert sorted((len(first.asked), len(other.asked))) == [1, 3]

    asyncio.run(run())


def test_a_name_that_a_client_has_chosen_leaves_no_encoder_out(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, encodes, encodes) as (hop, [first, other], _):
            for name in "ab":
                promised = look(picture(name), names=None)
                await hop.complete(promised, "caller")
                assert promised.promised
                hop.blame(promised)
            for name in "cd":
                await hop.promise(picture(name))
            assert [len(first.asked), len(other.asked)] == [2, 2]

    asyncio.run(run())


def test_a_call_is_known_by_its_header_and_by_its_body(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, encodes) as (hop, [engine], _):
            await hop.promise(picture("a"))
            headers = [(IS_HOP.encode(), b"1")]
            assert is_call({"headers": headers}, {})
            assert is_call({"headers": []}, engine.asked[0])
            assert not is_call({"headers": []}, {"ec_transfer_params": {"k": {}}})
            assert not is_call({"headers": []}, {"ec_transfer_params": "ecd_hop"})

    asyncio.run(run())


def test_an_engine_without_an_encoder_asks_those_that_are_left_out(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, *[answers(500)] * 2, in_need=True) as (hop, engines, _):
            for calls in (1, 2):
                with pytest.raises(NotEncoded):
                    await hop.promise(picture("a"))
                assert [len(engine.asked) for engine in engines] == [calls] * 2, "each once"
            engines[1].behaviour = encodes
            assert (await hop.promise(picture("b"))).placeholder.fields == GRID

    asyncio.run(run())


def test_a_picture_that_is_refused_blames_no_encoder(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, answers(400), encodes) as (hop, [first, other], _):
            with pytest.raises(NotEncoded):
                await hop.promise(picture("a"))
            assert not other.asked
            first.behaviour = encodes
            for name in "bc":
                await hop.promise(picture(name))
            assert (len(first.asked), len(other.asked)) == (2, 1)

    asyncio.run(run())


def raw(status: str) -> Behaviour:
    """An answer that is written by hand, of which aiohttp's message has a part."""

    async def answer(engine: SmallServer, _: dict) -> web.Response:
        assert engine.transport is not None
        engine.transport.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        await asyncio.Event().wait()
        raise AssertionError

    return answer


async def refuses(_: SmallServer, body: dict) -> web.Response:
    return web.Response(text="two\nlines \x1b[31m\u202e" + "x" * 500, status=400)


@pytest.mark.parametrize("says", [refuses, raw("200 OK\r\nA\x1b[31m" + "\u202e" * 300 + ": b")])
def test_what_an_encoder_says_is_logged_in_a_short_line_that_no_terminal_acts_on(
    client: Client, caplog: pytest.LogCaptureFixture, says: Behaviour
) -> None:
    async def run() -> None:
        async with hop_to(client, says) as (hop, _, [url]):
            with pytest.raises(NotEncoded):
                await hop.promise(picture("a"))
            [record] = caplog.records
            said = record.getMessage().replace(url, "")
            assert said.isascii()
            assert said.isprintable()
            assert len(said) < 300

    asyncio.run(run())


def test_an_encoder_that_ends_in_the_middle_of_a_call(client: Client) -> None:
    async def cut(engine: SmallServer, body: dict) -> web.Response:
        assert engine.transport is not None
        engine.transport.abort()
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        async with hop_to(client, cut, encodes) as (hop, [dying, other], _):
            assert (await hop.promise(picture("a"))).placeholder.fields == GRID
            assert (len(dying.asked), len(other.asked)) == (1, 1)

    asyncio.run(run())


def test_one_call_for_all_who_want_a_picture_at_one_time(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, waits) as (hop, [engine], _):
            joined = count("hop_pictures_total", outcome="joined")
            asking = [asyncio.ensure_future(hop.promise(picture("a"))) for _ in range(5)]
            await eventually_async(lambda: engine.active == 1)
            asking[0].cancel()  # the others' call goes on
            await asyncio.wait(asking[:1])
            engine.goes_on.set()
            assert [(await each).placeholder.fields for each in asking[1:]] == [GRID] * 4
            assert len(engine.asked) == 1
            assert count("hop_pictures_total", outcome="joined") == joined + 4

    asyncio.run(run())


def test_a_call_ends_with_the_last_who_waits_for_it(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, waits) as (hop, [engine], [url]):
            asking = [asyncio.ensure_future(hop.promise(picture("a"))) for _ in range(2)]
            await eventually_async(lambda: engine.active == 1)
            assert count("encoder_active_tokens", encoder=url) == 10
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            newcomer = asyncio.ensure_future(hop.promise(picture("a")))
            await eventually_async(lambda: len(engine.asked) == 2 and engine.active == 1)
            assert count("encoder_calls_total", encoder=url, outcome="cancelled") == 1
            engine.goes_on.set()
            assert (await newcomer).placeholder.fields == GRID

    asyncio.run(run())


def test_pictures_on_their_way_are_bounded(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_hop, "MAX_CALLS", 2)

    async def run() -> None:
        full, late = (count("hop_pictures_total", outcome=each) for each in ("full", "late"))
        async with hop_to(client, never(clock, at=2)) as (hop, [engine], _):
            asked = [hop.promise(picture(f"{number}")) for number in range(7)]
            ended = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, NotEncoded) for each in ended)
            assert engine.most_active == len(engine.asked) == 2
            assert count("hop_pictures_total", outcome="full") == full + 5
            assert count("hop_pictures_total", outcome="late") == late + 2

    asyncio.run(run())


def look(*missing: MissingMedium, **known: Any) -> Any:
    """A request's pictures, as far as the hop looks at them."""
    names = frozenset(each.stored_name for each in missing)
    here = {"missing": missing, "found": [], "promised": [], "names": names}
    return SimpleNamespace(**{**here, **known})


def test_promises_of_one_request_are_bounded_together(client: Client) -> None:
    async def huge(_: SmallServer, body: dict) -> web.Response:
        name = body["messages"][0]["content"][0]["uuid"]
        metadata = {"image_grid_thw": [1, 1024, 1024]}
        return web.json_response({"ec_transfer_params": {name: {"metadata": metadata}}})

    async def run() -> None:
        async with hop_to(client, huge) as (hop, _, _):
            names = "abcd"
            most, more = (look(*map(picture, names[:count])) for count in (3, 4))
            for each in (most, more):
                each.found = [SimpleNamespace(placeholder=known("image", GRID))]
                await hop.complete(each, "caller")
            assert [len(each.promised) for each in (most, more)] == [3, 0]

    asyncio.run(run())


def test_one_requests_pictures_come_in_turns(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_hop, "MAX_OF_REQUEST", 2)

    async def run() -> None:
        async with hop_to(client, waits) as (hop, [engine], _):
            many = look(*(picture(f"{number}") for number in range(9)))
            asking = asyncio.ensure_future(hop.complete(many, "one"))
            await eventually_async(lambda: engine.active == 2)
            engine.goes_on.set()
            await asking
            assert [missing.name for missing, _ in many.promised] == [f"{n}" for n in range(9)]
            assert engine.most_active == 2

    asyncio.run(run())


def test_one_caller_leaves_places_to_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_hop, "MAX_CALLS", 4)
    monkeypatch.setattr(encode_hop, "MAX_OF_CALLER", 3)

    async def run() -> None:
        async with hop_to(client, waits) as (hop, [engine], _):
            greedy = [look(picture(f"{number}")) for number in range(9)]
            asking = [asyncio.ensure_future(hop.complete(each, "greedy")) for each in greedy]
            await eventually_async(lambda: engine.active == 3)
            modest = look(picture("a"))
            asking.append(asyncio.ensure_future(hop.complete(modest, "modest")))
            await eventually_async(lambda: engine.active == 4)
            engine.goes_on.set()
            await asyncio.gather(*asking)
            assert modest.promised
            assert sum(bool(each.promised) for each in greedy) == 3

    asyncio.run(run())


def test_an_engine_without_an_encoder_waits_for_a_place(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_hop, "MAX_CALLS", 2)

    async def run() -> None:
        async with hop_to(client, waits, in_need=True) as (hop, [engine], _):
            asking = [
                asyncio.ensure_future(hop.promise(picture(f"{number}"))) for number in range(7)
            ]
            await eventually_async(lambda: engine.active == 2)
            asking[6].cancel()  # it waits for a place, and leaves
            engine.goes_on.set()
            assert len(await asyncio.gather(*asking[:6])) == 6
            assert engine.most_active == 2

    asyncio.run(run())


def test_one_picture_waits_for_no_large_requests_behind_the_same_gateway(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_hop, "MAX_CALLS", 4)
    monkeypatch.setattr(encode_hop, "MAX_OF_CALLER", 3)
    monkeypatch.setattr(encode_hop, "MAX_OF_REQUEST", 3)

    async def run() -> None:
        ends = asyncio.Semaphore(0)

        async def ends_in_turn(engine: SmallServer, body: dict) -> web.Response:
            await ends.acquire()
            return await encodes(engine, body)

        async with hop_to(client, ends_in_turn, in_need=True) as (hop, [engine], _):
            large = [look(*(picture(f"{of}-{n}") for n in range(3))) for of in range(9)]
            asking = [asyncio.ensure_future(hop.complete(each, "gateway")) for each in large]
            await eventually_async(lambda: engine.active == 3)
            small = look(picture("small"))
            asking.append(asyncio.ensure_future(hop.complete(small, "gateway")))
            await eventually_async(lambda: len(hop._places._waiting) == 9)
            for asked in (4, 5):
                ends.release()
                await eventually_async(lambda asked=asked: len(engine.asked) == asked)
            names = [each["messages"][0]["content"][0]["uuid"] for each in engine.asked]
            assert "small" in names
            for _ in range(28):
                ends.release()
            await asyncio.gather(*asking)
            assert all(each.promised for each in (small, *large))

    asyncio.run(run())


def test_a_tenants_picture_is_stored_under_the_tenants_name(client: Client) -> None:
    async def run() -> None:
        async with hop_to(client, encodes) as (hop, [engine], _):
            await hop.promise(picture("a")._replace(salt="tenant"))
            await hop.promise(picture("a"))
            assert [asked.get("cache_salt") for asked in engine.asked] == ["tenant", None]
            names = [asked["messages"][0]["content"][0]["uuid"] for asked in engine.asked]
            assert names == ["a", "a"]  # the encoder salts them

    asyncio.run(run())
