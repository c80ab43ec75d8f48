"""Encoders that register themselves at a real daemon, and a hop that follows them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy

import pytest
from prometheus_client import REGISTRY

from ecd_client import Client, InvalidArgument
from ecd_client.vllm.middleware.hop import registered
from ecd_client.vllm.middleware.hop.encode_hop import NotEncoded
from ecd_client.vllm.middleware.hop.registered import Registered, Registration, repeat
from ecd_proto.encoders import MAX_ENCODERS
from ecd_proto.engines import Engine
from integration.test_encode_hop import GRID, count, encodes, hop_to, picture, waits
from support.cli import as_json, cli
from support.daemon import Daemon, changed
from support.processes import child
from support.waiting import HANG_S, eventually, eventually_async

NAMESPACE = "m|weights=ab"
ENCODER = "encoder"
PROCESS = f"""
import sys
from ecd_client import Client
from ecd_proto.engines import Engine
with Client(sys.argv[1]) as client:
    client.describe(Engine(sys.argv[2], "m", {NAMESPACE!r}, True, False, {{}}, "image"))
    for url in sys.stdin:
        client.register(sys.argv[2], url.strip())
"""
"""An engine and its API server, in one process that registers the URLs which it reads."""
SERVER = f"""
import asyncio, sys
from aiohttp import web
from ecd_client import Client
from ecd_proto.engines import Engine

async def encode(request):
    name = (await request.json())["messages"][0]["content"][0]["uuid"]
    return web.json_response({{"ec_transfer_params": {{name: {{"metadata": {GRID}}}}}}})

async def main(client):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", encode)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client.describe(Engine(sys.argv[2], "m", {NAMESPACE!r}, True, False, {{}}, "image"))
    client.register(sys.argv[2], f"http://127.0.0.1:{{runner.addresses[0][1]}}")
    await asyncio.Event().wait()

with Client(sys.argv[1]) as client:
    asyncio.run(main(client))
"""
"""An encoder that answers."""


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


@contextlib.contextmanager
def encoder(daemon: Daemon, url: str, name: str = ENCODER, **about: object) -> Iterator[Client]:
    """The API server of an engine that has described itself."""
    known = {"namespace": NAMESPACE, "stores": True, "loads": False, **about}
    with Client(daemon.address) as engine, Client(daemon.address) as server:
        engine.describe(Engine(name, "m", parts={}, shares="image", **known))
        server.register(name, url)
        yield server


def urls(daemon: Daemon) -> list[str]:
    return [each["url"] for each in as_json(daemon, "encoders")["encoders"]]


def series_of(url: str) -> list[str]:
    """The names of an encoder's series in this process's metrics."""
    found = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return [sample.name for sample in found if sample.labels.get("encoder") == url]


def await_urls(daemon: Daemon, *expected: str) -> None:
    eventually(lambda: urls(daemon) == list(expected), f"registered are {expected}")


def test_operators_see_the_encoders_and_what_to_do_without_one(daemon: Daemon) -> None:
    assert "registers itself if its server has --middleware" in cli(daemon, "encoders").stdout
    assert as_json(daemon, "encoders")["encoders"] == []
    with encoder(daemon, "http://0.0.0.0:8000"), encoder(daemon, "https://E2/[b]", "2", loads=True):
        await_urls(daemon, "http://127.0.0.1:8000", "https://e2:443/[b]")
        found = as_json(daemon, "encoders")
        [first, second] = found["encoders"]
        assert first.pop("age_s") >= 0.0
        assert first == {
            "url": "http://127.0.0.1:8000",
            "node": found["node"],
            "own": True,
            "namespace": NAMESPACE,
            "role": "ec_producer",
            "engine": ENCODER,
            "active": 0,
        }
        assert second["role"] == "ec_both"
        shown = cli(daemon, "encoders").stdout
        assert "https://e2:443/[b]" in shown
        assert f"{found['node']} (this one)" in shown
        assert " ago" in shown
    await_urls(daemon)


def test_an_encoder_reports_its_load_and_registers_no_second_time(daemon: Daemon) -> None:
    loads = iter((3, 3, 0))

    def shown() -> list[int]:
        return [each["active"] for each in as_json(daemon, "encoders")["encoders"]]

    with encoder(daemon, "http://e:1") as server:
        registration = Registration(server, ENCODER, "http://e:1", lambda: next(loads))
        eventually(lambda: shown() == [0])
        asyncio.run(registration.report())
        eventually(lambda: shown() == [3])
        asyncio.run(registration.report())
        asyncio.run(registration.report())
        eventually(lambda: shown() == [0])


def test_a_wrong_registration_is_refused_where_it_is_made(daemon: Daemon) -> None:
    with Client(daemon.address) as client:
        for engine, url in (("", "http://e:1"), ("e", "e:1"), ("e", 1), ("e", "http://u@e:1")):
            with pytest.raises(InvalidArgument, match="such as http"):
                client.register(engine, url)
        with pytest.raises(InvalidArgument, match="active requests of 0 or more"):
            client.register("e", "http://e:1", -1)
        with pytest.raises(InvalidArgument):
            client.encoders(namespace="\ud800")


def test_a_daemon_registers_a_bounded_number(daemon: Daemon) -> None:
    with contextlib.ExitStack() as clients, encoder(daemon, "http://e:1"):
        await_urls(daemon, "http://e:1")
        for number in range(MAX_ENCODERS):
            client = clients.enter_context(Client(daemon.address))
            client.register(ENCODER, f"http://e:{number + 2}")
        eventually(lambda: daemon.status().counters.refused["encoders"] == 1)
        assert len(urls(daemon)) == MAX_ENCODERS


def test_a_process_that_is_killed_is_left_out_and_others_register_anew(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon().start()
    command = [sys.executable, "-c", PROCESS, daemon.address, ENCODER]
    pipes = {"stdin": subprocess.PIPE, "text": True, "bufsize": 1}
    with child(command, **pipes) as process, encoder(daemon, "http://other:1", "other"):
        await_urls(daemon, "http://other:1")
        print("http://e:1", file=process.stdin)
        eventually(lambda: "http://e:1" in urls(daemon))
        daemon.kill()
        daemon.start()
        eventually(lambda: sorted(urls(daemon)) == ["http://e:1", "http://other:1"])
        print("http://e:2", file=process.stdin)
        eventually(lambda: sorted(urls(daemon)) == ["http://e:2", "http://other:1"])
        os.kill(process.pid, signal.SIGKILL)
        await_urls(daemon, "http://other:1")


def test_a_hop_uses_encoders_that_come_and_leaves_out_those_that_go(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered, "KEPT_S", 0.0)

    async def run(client: Client) -> None:
        async with hop_to(client, encodes, encodes) as (hop, [first, other], [url, other_url]):
            hop.use([], 0.0)
            known = Registered(client, "own", lambda: NAMESPACE, hop)

            async def use(*expected: str) -> None:
                await asyncio.to_thread(await_urls, daemon, *expected)
                await known.ask()

            with pytest.raises(NotEncoded):
                await hop.promise(picture("a"))
            with (
                encoder(daemon, "http://own:1", "own"),
                encoder(daemon, "http://x:1", namespace="x"),
            ):
                await use("http://own:1", "http://x:1")
                with pytest.raises(NotEncoded):
                    await hop.promise(picture("a"))
            with encoder(daemon, url, "1"):
                await use(url)
                assert (await hop.promise(picture("a"))).placeholder.fields == GRID
                with encoder(daemon, other_url, "2"):
                    await use(url, other_url)
                    for name in "bcdefg":
                        await hop.promise(picture(name))
                    assert [len(each.asked) for each in (first, other)] == [4, 3]
            await use()
            with pytest.raises(NotEncoded):
                await hop.promise(picture("h"))
            assert len(first.asked) + len(other.asked) == 7
            assert not series_of(url)

    with Client(daemon.address) as client:
        asyncio.run(run(client))


def test_an_encoder_that_leaves_during_a_call_answers_it_and_leaves_no_series() -> None:
    async def run(client: Client) -> None:
        async with hop_to(client, waits) as (hop, [engine], [url]):
            asked = asyncio.ensure_future(hop.promise(picture("a")))
            await eventually_async(lambda: engine.asked)
            assert series_of(url)
            hop.use([], 0.0)
            engine.goes_on.set()
            assert (await asked).placeholder.fields == GRID
            assert not series_of(url)

    with Client("unix:///nowhere", connect_timeout=0.0) as client:
        asyncio.run(run(client))


def test_encoders_that_are_known_stay_while_the_daemon_is_away_and_for_a_moment_after(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon().start()
    monkeypatch.setattr(registered, "KEPT_S", HANG_S * 10)

    async def run(client: Client) -> None:
        async with hop_to(client, encodes) as (hop, _, [url]):
            namespace = NAMESPACE
            known = Registered(client, "own", lambda: namespace, hop)
            with encoder(daemon, url):
                await asyncio.to_thread(await_urls, daemon, url)
                await known.ask()
            daemon.kill()
            await known.ask()
            await hop.promise(picture("a"))
            daemon.start()
            await asyncio.to_thread(client.wait_connected, HANG_S)
            await known.ask()
            await hop.promise(picture("b"))
            namespace = "moved"
            await known.ask()
            with pytest.raises(NotEncoded):
                await hop.promise(picture("c"))

    with Client(daemon.address) as client:
        asyncio.run(run(client))


def test_it_asks_again_and_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "ASK_S", 0.01)

    async def run(client: Client) -> None:
        async with hop_to(client, encodes) as (hop, [engine], [url]):
            hop.use([], 0.0)
            following = asyncio.ensure_future(
                repeat(Registered(client, "own", lambda: NAMESPACE, hop).ask)
            )
            with encoder(daemon, url):
                await eventually_async(lambda: hop._encoders._encoders)
                await hop.promise(picture("a"))
            assert len(engine.asked) == 1
            following.cancel()
            await asyncio.wait([following])

    with Client(daemon.address) as client:
        asyncio.run(run(client))


def test_pictures_are_encoded_while_encoders_start_and_are_killed(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered, "ASK_S", 0.01)

    def served() -> list[float]:
        found = [each["url"] for each in as_json(daemon, "encoders")["encoders"]]
        return [count("encoder_calls_total", encoder=url, outcome="encoded") for url in found]

    async def run(client: Client, processes: contextlib.ExitStack) -> None:
        async with hop_to(client) as (hop, _, _):
            following = asyncio.ensure_future(
                repeat(Registered(client, "own", lambda: NAMESPACE, hop).ask)
            )
            names = iter(range(200))

            async def ask(pictures: int) -> None:
                for _ in range(pictures):
                    await hop.promise(picture(f"{next(names)}"))

            started = []
            for number in range(3):
                command = [sys.executable, "-c", SERVER, daemon.address, f"{number}"]
                started.append(processes.enter_context(child(command)))
                await eventually_async(lambda: len(hop._encoders._encoders) == len(started))
                before = await asyncio.to_thread(served)
                await ask(48)
                now = await asyncio.to_thread(served)
                shares = [late - early for late, early in zip(now, before, strict=True)]
                assert shares == [48 / len(started)] * len(started)
            asking = [asyncio.ensure_future(ask(10)) for _ in range(5)]
            await eventually_async(lambda: next(copy(names), 200) > 3 * 48 + 10)
            os.kill(started[0].pid, signal.SIGKILL)
            await asyncio.gather(*asking)
            await eventually_async(lambda: len(hop._encoders._encoders) == 2)
            following.cancel()
            await asyncio.wait([following])

    with Client(daemon.address) as client, contextlib.ExitStack() as processes:
        asyncio.run(run(client, processes))


OLD = changed(
    "from ecd.rpc.cache import cache_service, sessions",
    "del cache_service.CacheService.Encoders",
    "welcome = sessions.SessionStreams._welcome",
    "def old(self, stream):",
    "    said = welcome(self, stream)",
    "    said.ClearField('takes_encoder')",
    "    return said",
    "sessions.SessionStreams._welcome = old",
)
"""A daemon that knows neither the message nor the call."""


def test_a_daemon_that_is_too_old_is_named_once_and_is_sent_nothing(
    make_daemon: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    daemon = make_daemon()
    daemon.command = OLD
    daemon.start()

    async def run(client: Client) -> None:
        async with hop_to(client, encodes) as (hop, _, _):
            known = Registered(client, "own", lambda: NAMESPACE, hop)
            for _ in range(3):
                await known.ask()

    with encoder(daemon, "http://e:1") as server, Client(daemon.address) as client:
        asyncio.run(run(client))
        server.register(ENCODER, "http://e:1", 1)
        assert server.contains(["k"]) == [False]
    assert len(caplog.records) == 2
    assert "is too old to register an encoder" in caplog.text
    assert "is older than this call: upgrade it" in caplog.text
    assert "passed over" not in daemon.text()
    assert cli(daemon, "encoders").returncode == 1
