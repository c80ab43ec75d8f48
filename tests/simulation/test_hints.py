"""Hints come from whoever sends requests: what made-up ones cost, on the simulated clock."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from ipaddress import IPv4Network

import pytest

from ecd.cluster.cluster import TRY_S
from ecd.cluster.fetcher import MAX_SOURCES
from ecd.cluster.peers.peers import (
    CONNECT_TIMEOUT_S,
    MAX_PEERS,
    MAX_STRANGERS,
    MAX_STRANGERS_TRIED,
    MAX_WAITING_FOR_STRANGERS,
)
from ecd.core.model.types import Key
from ecd.live.flights import MAX_FLIGHTS
from ecd_proto.contract import Hint
from ecd_proto.v1 import cache_pb2 as pb
from simulation.acts import AT_ONCE_S, Engine, play, store
from simulation.scenario import SIZES
from simulation.world import Run

LARGE, OTHER = len(SIZES) - 1, len(SIZES) - 2
MOMENT_S = 0.01
DEAD = Hint("10.0.9.9:1")


def at(run: Run, node: int) -> Hint:
    return Hint(run.places[node].node)


def made_up() -> Iterator[Hint]:
    """Nodes where nobody listens, without end."""
    return (Hint(f"10.0.{100 + n // 250}.{n % 250}:9470") for n in itertools.count())


def silence(run: Run, *hints: Hint) -> None:
    """Have these nodes take connections, and say no word."""
    run.network.cut |= {(place.node, hint.node) for place in run.places for hint in hints}


def peers_of(run: Run, node: int) -> dict[str, pb.PeerStatus]:
    return {peer.node: peer for peer in run.daemons[node].cluster.status().peers}


def test_hints_lead_only_where_they_may() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        engine = Engine(run, 1)
        named = (
            *(at(run, 0).node, at(run, 1).node, "169.254.169.254:80", "example.org:443"),
            *("127.0.0.1", "::1:9465", "127.0.0.1:99999", "a" * 5000, "127.0.0.1:9465\n", ""),
        )
        for node in named:
            outcome, took_s = await engine.ask(LARGE, hints=[Hint(node)])
            assert outcome == "missing"
            assert took_s < MOMENT_S
        assert not peers_of(run, 1), "nobody was even asked"

    elsewhere = {"hint_networks": (IPv4Network("10.9.0.0/16"),)}
    play(2, act, elsewhere, directory="none")


def test_a_node_that_the_settings_name_may_always_be_asked() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        assert (await Engine(run, 1).ask(LARGE)).outcome == "missing", "there is no directory"
        assert (await Engine(run, 1).ask(LARGE, hints=[at(run, 0)])).outcome == "leased"

    named = {"peers": ("10.0.0.1:9470",), "directory": "none", "hint_networks": ()}
    play(2, act, named)


def test_a_silent_node_of_the_settings_stays_unreachable_while_it_is_tried_again() -> None:
    async def act(run: Run) -> None:
        assert (await Engine(run, 0).ask(LARGE, hints=[DEAD])).outcome == "missing"
        silence(run, DEAD)
        states = set()
        for _ in range(round(3 * TRY_S / CONNECT_TIMEOUT_S)):
            states.add(peers_of(run, 0)[DEAD.node].state)
            await asyncio.sleep(CONNECT_TIMEOUT_S / 2)
        assert states == {"unreachable"}

    play(1, act, {"peers": (DEAD.node,), "directory": "none"})


@pytest.mark.parametrize("is_silent", [False, True])
def test_two_wrong_hints_are_followed_before_the_directory_is_asked(is_silent: bool) -> None:
    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        await store(run, 2, OTHER)
        wrong = list(itertools.islice(made_up(), 4))
        if is_silent:
            silence(run, *wrong)
        for key, hints in ((LARGE, wrong), (OTHER, [*wrong[2:], at(run, 2)])):
            outcome, took_s = await Engine(run, 1).ask(key, hints=hints)
            assert outcome == "leased"
            assert took_s == pytest.approx(2 * CONNECT_TIMEOUT_S * is_silent, abs=MOMENT_S)

    play(3, act, directory="static")


def test_made_up_nodes_that_are_silent_hold_up_no_real_one() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        nodes = list(itertools.islice(made_up(), 4 * MAX_FLIGHTS))
        silence(run, *nodes)
        keys = [Key("n", f"nobody has {number}") for number in range(MAX_FLIGHTS)]
        asks = [
            Engine(run, 1).ask_for(key, wait_s=60.0, hints=nodes[4 * n : 4 * n + 4])
            for n, key in enumerate(keys)
        ]
        waiting = [asyncio.ensure_future(ask) for ask in asks]
        await asyncio.sleep(0.05)
        outcome, took_s = await Engine(run, 1).ask(LARGE)
        assert outcome == "leased"
        assert took_s < AT_ONCE_S
        assert not all(each.done() for each in waiting)
        states = [peer.state for peer in peers_of(run, 1).values()]
        assert states.count("connecting") == MAX_STRANGERS_TRIED
        answers = await asyncio.gather(*waiting)
        assert max(each.took_s for [each] in answers) == pytest.approx(
            4 * CONNECT_TIMEOUT_S, abs=0.1
        )
        cluster = run.daemons[1].cluster
        assert len(cluster.status().peers) == MAX_STRANGERS + 1
        assert len(cluster.never_reached()) == MAX_STRANGERS
        ignored, refused = cluster.hints()
        assert ignored == 0 < refused

    play(2, act, directory="static")


def test_made_up_nodes_displace_no_real_one() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        engine = Engine(run, 1)
        assert (await engine.ask(LARGE, hints=[at(run, 0)])).outcome == "leased"
        await engine.ask(OTHER, hints=[DEAD])
        nodes = made_up()
        for start in range(24):
            asks = [
                engine.ask_for(Key("n", f"{start} {n}"), hints=[next(nodes)]) for n in range(50)
            ]
            assert {each.outcome for [each] in await asyncio.gather(*asks)} == {"missing"}
        peers = peers_of(run, 1)
        real = peers[run.places[0].node]
        assert (real.reads, real.state) == (1, "connected"), "the link is the one that it was"
        assert DEAD.node in peers, "what the settings name is not forgotten"
        assert len(peers) <= MAX_STRANGERS + 2

    play(2, act, {"peers": (DEAD.node,), "directory": "none"})


def test_a_hint_displaces_no_node_of_the_settings() -> None:
    nodes = tuple(hint.node for hint in itertools.islice(made_up(), MAX_PEERS))

    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        assert (await Engine(run, 1).ask(LARGE, hints=[at(run, 0)])).outcome == "missing"
        assert set(peers_of(run, 1)) == set(nodes)
        assert run.daemons[1].cluster.hints() == (0, 1)

    play(2, act, {"peers": nodes, "directory": "none"})


def test_only_so_many_wait_for_a_node_that_is_silent() -> None:
    async def act(run: Run) -> None:
        silence(run, DEAD)
        keys = [Key("n", f"nobody has {number}") for number in range(MAX_WAITING_FOR_STRANGERS + 9)]
        answers = await asyncio.gather(
            *(Engine(run, 1).ask_for(key, wait_s=60.0, hints=[DEAD]) for key in keys)
        )
        at_once = [each for [each] in answers if each.took_s < MOMENT_S]
        assert len(at_once) == 9
        assert {each.outcome for [each] in answers} == {"missing"}

    play(2, act, directory="none")


def test_made_up_nodes_hide_no_right_hint() -> None:
    """Two engines want a key at one time, and only the second one knows where it is.

    Of the first one's hints so many are made up that the right one is not followed.
    """

    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        wrong = list(itertools.islice(made_up(), 7))
        silence(run, *wrong)
        first = Engine(run, 1).ask(LARGE, wait_s=60.0, hints=[*wrong, at(run, 0)])
        waiting = asyncio.ensure_future(first)
        await asyncio.sleep(0.1)
        second = await Engine(run, 1).ask(LARGE, wait_s=60.0, hints=[at(run, 0)])
        assert (await waiting).outcome == second.outcome == "leased"
        assert second.took_s == pytest.approx(MAX_SOURCES * CONNECT_TIMEOUT_S - 0.1, abs=MOMENT_S)

    play(2, act, directory="none")


def test_made_up_places_displace_nothing() -> None:
    """Together they have twice the bytes of the pool, and nobody has their keys."""

    async def act(run: Run) -> None:
        engine = Engine(run, 1)
        mine = [Key("n", f"mine {number}") for number in range(60)]
        await engine.put(*mine)
        place = Hint(run.places[0].node, 0, 0, 64 << 10)
        keys = [Key("n", f"nobody has {number}") for number in range(8)]
        answers = await engine.ask_for(*keys, hints=[place])
        assert {each.outcome for each in answers} == {"missing"}
        assert all(map(run.daemons[1].has, mine))

    play(2, act, directory="none")
