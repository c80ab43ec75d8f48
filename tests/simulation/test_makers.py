"""A node is waited for as long as a client of it works on a key, on the simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ecd.base.wire import MAX_WAIT_S, InvalidRequest
from ecd.cluster.directory.redis_rows import NODE_TTL_S
from ecd.core.model.types import Key, SessionId
from ecd.live.live import LOOKING_SHARE, SCAN_S
from ecd.live.makings import MAX_MAKINGS
from ecd_proto.contract import MAKING_S, Hint
from ecd_proto.v1 import cache_pb2 as pb
from simulation.acts import AT_ONCE_S, Answer, Engine, has, play, slow_events, store
from simulation.client import Session
from simulation.scenario import SIZES, key_of
from simulation.world import Run

NUMBER = 0
KEY = key_of(NUMBER)
LONG_S = 50.0


class Maker(Engine):
    """An engine that makes the key if no node has it."""

    async def ask(self, number: int = NUMBER, **about: Any) -> Answer:
        return await super().ask(number, **{"makes_s": LONG_S, "wait_s": LONG_S, **about})

    async def begin(self) -> None:
        """Be the one that makes the key, and work on it."""
        assert self.session.lock(KEY)
        outcome, took_s = await self.ask()
        assert outcome == "missing"
        assert took_s < AT_ONCE_S

    async def store(self) -> None:
        await store(self.run, self.node, NUMBER)

    def stop(self, *keys: Key) -> None:
        daemon = self.session.daemon
        daemon.context.run(daemon.flights.stop_making, self.session.stream.session, keys)

    @property
    def sees_it_made_elsewhere(self) -> bool:
        return KEY in self.session.daemon.files.made_elsewhere


def makers(run: Run) -> list[Maker]:
    """One on each node."""
    return [Maker(run, node) for node in range(len(run.daemons))]


def test_others_wait_for_as_long_as_the_maker_works_on_it() -> None:
    """The note of its maker expires twice meanwhile, for a node that comes late."""

    async def act(run: Run) -> None:
        maker, early, late = makers(run)
        await maker.begin()
        waiting = [asyncio.ensure_future(early.ask())]
        await asyncio.sleep(2.5 * NODE_TTL_S)
        waiting.append(asyncio.ensure_future(late.ask()))
        await asyncio.sleep(1.0)
        assert early.sees_it_made_elsewhere
        assert late.sees_it_made_elsewhere
        assert not any(each.done() for each in waiting)
        await maker.store()
        assert [outcome for outcome, _ in await asyncio.gather(*waiting)] == ["leased"] * 2
        assert has(run, NUMBER) == [0, 1, 2]
        assert not early.sees_it_made_elsewhere
        await asyncio.sleep(MAKING_S)
        assert not list(run.daemons[0].live.makings.lasting(0.0)), "it is stored"

    play(3, act)


def test_who_makes_nothing_is_told_at_once() -> None:
    async def act(run: Run) -> None:
        maker, other = makers(run)
        await maker.begin()
        for engine in (maker, other, Maker(run, 0)):
            outcome, took_s = await engine.ask(makes_s=None)
            assert outcome == "missing"
            assert took_s < AT_ONCE_S

    play(2, act)


@pytest.mark.parametrize("later_s", [0.0, 1e-5, 1e-4, 1e-3, 1e-2])
def test_of_two_that_ask_at_one_time_one_makes_each_key(later_s: float) -> None:
    async def act(run: Run) -> None:
        both = makers(run)
        asked = [[], []]
        for node, engine in enumerate(both):
            for number in range(len(SIZES)):
                asked[node].append(asyncio.ensure_future(engine.ask(number)))
            await asyncio.sleep(later_s)
        await asyncio.sleep(1.0)
        for number, answers in enumerate(zip(*asked, strict=True)):
            [maker] = [node for node in range(2) if answers[node].done()]
            assert answers[maker].result().outcome == "missing"
            await store(run, maker, number)
            assert (await answers[1 - maker]).outcome == "leased"

    play(2, act, pool_bytes=1 << 20)


def test_asked_again_the_maker_is_to_make_it_still() -> None:
    async def act(run: Run) -> None:
        maker, _ = makers(run)
        for _ in range(3):
            await maker.begin()

    play(2, act)


def test_who_makes_a_key_in_any_case_waits_for_nobody() -> None:
    """Nor does one beside it whose node waits for another, for another engine."""
    keys = [Key("n", f"in both orders {number}") for number in range(30)]

    async def act(run: Run) -> None:
        maker, other = makers(run)
        beside = Maker(run, 1)
        assert (await maker.ask(makes_s=0.0)).took_s < AT_ONCE_S
        waiting = asyncio.ensure_future(beside.ask())
        for engine in (maker, other, beside):
            assert (await engine.ask(makes_s=0.0)).took_s < AT_ONCE_S
        await asyncio.sleep(MAKING_S / 2)
        assert not waiting.done(), "others wait for it, though"
        await maker.store()
        assert (await waiting).outcome == "leased"
        orders = (maker, keys), (other, keys[::-1]), (beside, keys)
        asks = [engine.ask_for(*some, makes_s=0.0, wait_s=LONG_S) for engine, some in orders]
        for answers in await asyncio.gather(*asks):
            assert [each.outcome for each in answers] == ["missing"] * len(keys)
            assert max(each.took_s for each in answers) < AT_ONCE_S

    play(2, act)


def test_nobody_ends_the_making_of_another() -> None:
    async def act(run: Run) -> None:
        maker, other = makers(run)
        await maker.begin()
        waiting = asyncio.ensure_future(other.ask())
        for engine in (Maker(run, 0), Maker(run, 1)):
            engine.stop(KEY)
        await asyncio.sleep(2 * MAKING_S)
        assert not waiting.done()
        maker.stop(KEY)
        assert (await waiting).outcome == "missing"

    play(2, act)


@pytest.mark.parametrize("directory", ["none", "static"])
def test_nobody_waits_for_makers_without_a_directory_of_all(directory: str) -> None:
    async def act(run: Run) -> None:
        maker, other = makers(run)
        await maker.begin()
        hints = [Hint(run.places[0].node)]
        for about in ({"makes_s": LONG_S}, {"makes_s": 0.0}, {"makes_s": None}, {"hints": hints}):
            outcome, took_s = await other.ask(**about)
            assert outcome == "missing"
            assert took_s < AT_ONCE_S

    play(2, act, directory=directory)


async def kill(maker: Maker) -> None:
    maker.session.end()


async def kill_daemon(maker: Maker) -> None:
    maker.session.daemon.die(silently=False)


async def stop_daemon(maker: Maker) -> None:
    """In order: its record goes from the directory, and its notes of what it makes stay."""
    await maker.session.daemon.stop()


async def take_back(maker: Maker) -> None:
    maker.stop(key_of(NUMBER + 1), KEY)


async def find_no_room(maker: Maker) -> None:
    """Have another session store than the one that asked, as in an engine."""
    worker = Session(maker.run, maker.session.daemon)
    content = pb.Content(dtype="uint8", shape=[1 << 30], nbytes=1 << 30)
    key = pb.Key(namespace=KEY.namespace, mm_hash=KEY.mm_hash)
    request = pb.ReserveRequest(
        session=worker.stream.token, items=[pb.ReserveItem(key=key, content=content)]
    )
    reply = await worker.call(worker.daemon.service.Reserve(request, None), 1.0)
    assert reply.outcomes[0].HasField("entry_too_large")


async def unlock(maker: Maker) -> None:
    maker.session.unlock(KEY)


@pytest.mark.parametrize(
    ("stop", "within_s"),
    [
        (kill, AT_ONCE_S),
        (kill_daemon, AT_ONCE_S),
        (take_back, AT_ONCE_S),
        (find_no_room, AT_ONCE_S),
        (unlock, SCAN_S + AT_ONCE_S),
    ],
)
def test_who_works_on_it_no_more_is_waited_for_no_more(
    stop: Callable[[Maker], object], within_s: float
) -> None:
    async def act(run: Run) -> None:
        maker, other, third = makers(run)
        await maker.begin()
        waiting = asyncio.ensure_future(other.ask())
        await asyncio.sleep(5.0)
        assert not waiting.done()
        await stop(maker)
        outcome, took_s = await waiting
        assert outcome == "missing"
        assert took_s < 5.0 + within_s
        assert not other.sees_it_made_elsewhere
        again = asyncio.ensure_future(third.ask())
        await asyncio.sleep(MAKING_S / 2)
        assert third.sees_it_made_elsewhere, "the second makes it now"
        await other.store()
        assert (await again)[0] == "leased"

    play(3, act)


@pytest.mark.parametrize("stop", [kill_daemon, stop_daemon])
def test_what_a_daemon_that_has_gone_made_is_taken_over_by_one(
    stop: Callable[[Maker], object],
) -> None:
    """Nobody waited for it, so nobody knows that it has gone."""

    async def act(run: Run) -> None:
        maker, second, third = makers(run)
        await maker.begin()
        await stop(maker)
        await asyncio.sleep(NODE_TTL_S - 2 * MAKING_S)
        await second.begin()
        waiting = asyncio.ensure_future(third.ask())
        await asyncio.sleep(MAKING_S / 2)
        assert third.sees_it_made_elsewhere
        await second.store()
        assert (await waiting)[0] == "leased"

    play(3, act)


def test_a_key_that_nobody_works_on_is_waited_for_a_moment() -> None:
    async def act(run: Run) -> None:
        maker, other = makers(run)
        assert (await maker.ask())[0] == "missing"
        outcome, took_s = await other.ask()
        assert outcome == "missing"
        assert MAKING_S - AT_ONCE_S < took_s < MAKING_S + SCAN_S + AT_ONCE_S

    play(2, act)


def test_a_maker_that_begins_anew_all_the_time_is_waited_for_no_longer_than_asked() -> None:
    async def act(run: Run) -> None:
        first, *others = makers(run)
        await first.begin()
        waiting = [asyncio.ensure_future(each.ask(makes_s=MAKING_S)) for each in others]
        while not all(each.done() for each in waiting):
            await first.ask(makes_s=0.0)
            await asyncio.sleep(0.2)
        for outcome, took_s in await asyncio.gather(*waiting):
            assert (outcome, took_s) == ("missing", pytest.approx(MAKING_S, abs=0.01))

    play(4, act)


def test_what_comes_after_the_end_of_a_call_is_for_the_next() -> None:
    async def act(run: Run) -> None:
        maker, other = makers(run)
        await maker.begin()
        assert (await other.ask(wait_s=0.2)).outcome == "missing"
        await asyncio.sleep(5.0)
        await maker.store()
        await asyncio.sleep(AT_ONCE_S)
        assert has(run, NUMBER) == [0, 1]
        assert not other.sees_it_made_elsewhere

    play(2, act)


def test_a_maker_that_never_ends_is_waited_for_as_long_as_was_asked_for() -> None:
    """A call ends before, and its client sees why it found nothing."""

    async def act(run: Run) -> None:
        maker, other, third = makers(run)
        await maker.begin()
        outcome, took_s = await other.ask(makes_s=10.0, wait_s=2.0)
        assert outcome == "missing"
        assert took_s == pytest.approx(2.0, abs=0.01)
        assert other.sees_it_made_elsewhere
        again, took_s = await other.ask(makes_s=0.0, wait_s=2.0)
        assert again == "missing"
        assert took_s < AT_ONCE_S, "it makes the key in any case"
        await asyncio.sleep(7.5)
        assert other.sees_it_made_elsewhere
        await asyncio.sleep(0.6)
        assert not other.sees_it_made_elsewhere
        assert not len(other.session.daemon.flights)
        waiting = asyncio.ensure_future(third.ask())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await other.store()
        assert (await waiting)[0] == "leased", "the second had taken it over"

    play(3, act)


def test_what_comes_late_from_a_maker_has_the_time_of_any_fetch() -> None:
    async def act(run: Run) -> None:
        maker, other = makers(run)
        await maker.begin()
        fetch_s = run.scenario.fetch_timeout_s
        waiting = asyncio.ensure_future(other.ask(makes_s=2 * fetch_s, wait_s=2 * fetch_s))
        await asyncio.sleep(1.5 * fetch_s)
        await maker.store()
        assert (await waiting)[0] == "leased"
        assert SIZES[NUMBER] == run.daemons[1].cache.views.info(KEY).content.nbytes

    play(2, act)


@pytest.mark.parametrize("leave", [take_back, kill])
def test_a_node_waits_no_longer_than_an_engine_of_it_makes_the_key(
    leave: Callable[[Maker], object],
) -> None:
    """However long it has waited: it makes the key no more, and nobody waits for it."""

    async def act(run: Run) -> None:
        maker, other, third = makers(run)
        await maker.begin()
        waiting = asyncio.ensure_future(other.ask())
        await asyncio.sleep(5.0)
        await leave(other)
        await asyncio.sleep(AT_ONCE_S)
        assert waiting.done()
        assert not len(other.session.daemon.flights)
        assert not other.sees_it_made_elsewhere
        await asyncio.sleep(2 * MAKING_S)
        await kill(maker)
        outcome, took_s = await third.ask()
        assert outcome == "missing"
        assert took_s < AT_ONCE_S, "the second does not make it"

    play(3, act)


def test_a_node_waits_for_as_long_as_the_most_patient_of_its_engines_that_is_left() -> None:
    async def act(run: Run) -> None:
        maker, hasty, patient = *makers(run), Maker(run, 1)
        await maker.begin()
        first = asyncio.ensure_future(hasty.ask(makes_s=3.0))
        await asyncio.sleep(1.0)
        then = asyncio.ensure_future(patient.ask(makes_s=30.0))
        await asyncio.sleep(10.0)
        assert hasty.sees_it_made_elsewhere
        await take_back(hasty)
        await asyncio.sleep(MAKING_S)
        assert hasty.sees_it_made_elsewhere
        assert not any(each.done() for each in (first, then))
        await unlock(maker)
        assert [(await each)[0] for each in (first, then)] == ["missing"] * 2
        await take_back(hasty)
        assert KEY in run.daemons[1].live.makings, "the other makes it"
        await take_back(patient)
        assert KEY not in run.daemons[1].live.makings

    play(2, act)


def test_no_node_waits_longer_than_a_minute_whoever_makes_the_key_by_then() -> None:
    async def act(run: Run) -> None:
        maker, *others = makers(run)
        await maker.begin()
        waiting = [asyncio.ensure_future(each.ask(makes_s=1e9, wait_s=1e9)) for each in others]
        await asyncio.sleep(0.7 * MAX_WAIT_S)
        for each in others:
            each.session.lock(KEY)
        await kill(maker)
        outcomes = await asyncio.gather(*waiting)
        assert [outcome for outcome, _ in outcomes] == ["missing"] * 2
        assert max(took_s for _, took_s in outcomes) < MAX_WAIT_S + AT_ONCE_S

    play(3, act)


@pytest.mark.parametrize("wrong", [[(1, 0.0)], [(0, 0.0), (0, 1.0)], [(0, -1.0)], [(0, 1e999)]])
def test_makes_that_make_no_sense_are_refused(wrong: list[tuple[int, float]]) -> None:
    async def act(run: Run) -> None:
        [engine] = makers(run)
        await engine.begin()
        makes = [pb.Make(index=index, wait_s=wait_s) for index, wait_s in wrong]
        request = engine.request(KEY, wait_s=LONG_S, makes=makes)
        with pytest.raises(InvalidRequest):
            await engine.session.call(engine.session.daemon.service.Acquire(request, None), 0.0)

    play(1, act)


def test_a_wait_for_an_encode_is_no_slow_fetch() -> None:
    async def act(run: Run) -> None:
        maker, other, third = makers(run)
        fetched_s: list[float] = []
        for each in (other, third):
            each.session.daemon.deliveries._observe = lambda seconds, _: fetched_s.append(seconds)
        await maker.begin()
        waiting = [asyncio.ensure_future(each.ask()) for each in (other, third)]
        await asyncio.sleep(20.0)
        await take_back(third)
        await maker.store()
        outcomes = [(await each)[0] for each in waiting]
        assert fetched_s[0] < AT_ONCE_S
        assert outcomes == ["leased", "missing"]
        assert len(fetched_s) == 1
        for each in (other, third):
            assert not await slow_events(each)

    play(3, act)


async def run_out(other: Maker, waiting: asyncio.Task[Answer]) -> None:
    assert (await waiting).took_s == pytest.approx(10.0, abs=0.01)


async def break_link(other: Maker, waiting: asyncio.Task[Answer]) -> None:
    await kill_daemon(other)


@pytest.mark.parametrize("end", [run_out, break_link])
def test_a_wait_that_has_ended_is_forgotten_where_the_key_is_made(
    end: Callable[[Engine, asyncio.Task[Answer]], Awaitable[None]],
) -> None:
    async def act(run: Run) -> None:
        maker, other = makers(run)
        await maker.begin()
        waiting = asyncio.ensure_future(other.ask(makes_s=10.0))
        await asyncio.sleep(5.0)
        making = run.daemons[0].live.makings._makings[KEY]
        assert len(making.waits) == 1
        await end(other, waiting)
        await asyncio.sleep(AT_ONCE_S)
        assert not making.waits

    play(2, act)


def test_looking_at_many_makings_takes_little_and_delays_no_scan() -> None:
    """Each look walks through the locks of all engines: these have as many as 16 may."""
    look_s, makings, for_s = 30e-6, 16 * MAX_MAKINGS, 60.0

    async def act(run: Run) -> None:
        live, files, looks, scans = run.daemons[0].live, run.daemons[0].files, 0, 0
        scan = live.scan

        def is_key_locked(key: Key) -> bool:
            nonlocal looks
            looks += 1
            run.loop.now_s += look_s
            return True

        def scan_once() -> bool:
            nonlocal scans
            scans += 1
            return scan()

        files.is_key_locked, live.scan = is_key_locked, scan_once
        for number in range(makings):
            live.makings.begin(SessionId(1000 + number // MAX_MAKINGS), Key("n", f"made {number}"))
        await asyncio.sleep(for_s)
        assert makings < looks < (LOOKING_SHARE * for_s + SCAN_S) / look_s
        assert scans > (1.0 - 2 * LOOKING_SHARE) * for_s / SCAN_S

    play(1, act)
