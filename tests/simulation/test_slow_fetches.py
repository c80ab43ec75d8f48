"""A fetch that takes long is in the slow log, with the peer and what it waited for."""

from __future__ import annotations

import pytest

from ecd_proto.contract import Hint
from simulation.acts import FETCH_TIMEOUT_S, Engine, play, slow_events, store
from simulation.run import SCALE
from simulation.scenario import SIZES, key_of
from simulation.world import Run

LARGE, OTHER = len(SIZES) - 1, len(SIZES) - 2
BYTES_PER_S = 2e4
READ_S = SCALE["ecd.cluster.transport.read_queue.READ_BYTES"] / BYTES_PER_S
"""Of any large entry, whose parts are read at one time."""


def test_a_fetch_says_where_its_time_went() -> None:
    async def act(run: Run) -> None:
        run.network.weather.bytes_per_s = BYTES_PER_S
        engine, peer = Engine(run, 1), run.places[0].node
        await store(run, 0, LARGE)
        answer = await engine.ask(LARGE, hints=[Hint(peer)])
        [event] = await slow_events(engine)
        said = event.mm_hash, event.peer, event.nbytes, event.outcome
        assert said == (key_of(LARGE).mm_hash, peer, SIZES[LARGE], "fetched")
        assert event.seconds == pytest.approx(answer.took_s, abs=0.01)
        assert event.stages["reading"] == pytest.approx(READ_S, abs=0.01)
        assert {"connecting", "lease", "read queue"} < set(event.stages)
        assert 0.9 * event.seconds < sum(event.stages.values()) <= event.seconds

    play(2, act, directory="none")


def test_a_peer_that_stands_still_is_named() -> None:
    async def act(run: Run) -> None:
        engine, peer = Engine(run, 1), run.places[0].node
        for key in (OTHER, LARGE):
            await store(run, 0, key)
        assert (await engine.ask(OTHER, hints=[Hint(peer)])).outcome == "leased"
        run.daemons[0].pause()
        outcome, took_s = await engine.ask(LARGE, wait_s=60.0, hints=[Hint(peer)])
        assert (outcome, took_s) == ("missing", pytest.approx(FETCH_TIMEOUT_S, abs=0.01))
        [event] = await slow_events(engine)
        assert (event.peer, event.outcome) == (peer, "late")
        assert event.stages["lease"] == pytest.approx(FETCH_TIMEOUT_S, abs=0.01)

    play(2, act, directory="none")
