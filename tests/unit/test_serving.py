"""Turns of the nodes that want one large entry."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ecd.core.model.types import EntryId
from ecd.rpc.peer import serving
from ecd.rpc.peer.serving import Serving, Turn
from support.clock import SetClock
from support.waiting import eventually_async


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


class Nodes:
    """Nodes that ask for one entry, and what they are told."""

    def __init__(self, readers: int) -> None:
        self.clock = SetClock()
        self.serving = Serving(readers, self._refuse, self.clock)
        self.refused: list[tuple[str, int]] = []
        self.told: dict[str, str] = {}
        self.turns: dict[str, Turn] = {}

    def ask(
        self,
        *names: str,
        wait_s: float = 60.0,
        or_elsewhere: bool = True,
        node: str = "",
        entry: int = 1,
    ) -> None:
        for name in names:
            turn = self.turns[name] = Turn(
                EntryId(entry),
                node or name,
                self._tell(name, "read"),
                lambda to, n=name: self._note(n, to),
                or_elsewhere,
            )
            if self.serving.ask(turn, wait_s):
                self._note(name, "read")

    def end(self, name: str, is_stored: bool = True) -> None:
        self.serving.end(self.turns[name], is_stored)

    def _refuse(self, cause: str, limit: int) -> None:
        self.refused.append((cause, limit))

    def _tell(self, name: str, what: str) -> Callable[[], None]:
        return lambda: self._note(name, what)

    def _note(self, name: str, what: str) -> None:
        assert name not in self.told
        self.told[name] = what

    def end_all(self) -> None:
        for name in self.turns:
            self.end(name, is_stored=False)
        assert not self.serving.lines
        assert self.serving.waiting == 0


@on_loop
async def test_so_many_read_and_the_others_wait() -> None:
    nodes = Nodes(2)
    nodes.ask("a", "b", "c", "d")
    assert nodes.told == {"a": "read", "b": "read"}
    nodes.end("a", is_stored=False)
    assert nodes.told == {"a": "read", "b": "read", "c": "read"}, "in the order of their questions"
    nodes.end_all()


@on_loop
async def test_half_of_those_that_wait_go_where_the_entry_was_read() -> None:
    nodes = Nodes(1)
    nodes.ask("a", *(str(number) for number in range(10)))
    nodes.end("a")
    assert nodes.told == {"a": "read", "0": "read", **dict.fromkeys("56789", "a")}
    nodes.end("0")
    assert nodes.told["1"] == "read"
    assert [name for name, to in nodes.told.items() if to == "0"] == ["3", "4"]
    nodes.end_all()


@on_loop
async def test_a_node_that_still_reads_counts_by_how_far_it_is() -> None:
    """By as much of a read's time as its own turn has lasted."""
    nodes = Nodes(2)
    nodes.ask("a")
    nodes.clock.at_s = 0.5
    nodes.ask("b", *(str(number) for number in range(10)))
    nodes.clock.at_s = 1.0
    nodes.end("a")
    assert [name for name, to in nodes.told.items() if to == "a"] == ["6", "7", "8", "9"]
    nodes.end_all()


@on_loop
async def test_a_node_that_asks_for_nothing_else_is_not_sent_away() -> None:
    nodes = Nodes(1)
    nodes.ask("a", "b", "c", "d")
    nodes.ask("old", "older", or_elsewhere=False)
    nodes.end("a")
    assert nodes.told == {"a": "read", "b": "read", "c": "a", "d": "a"}
    nodes.end("b")
    assert nodes.told["old"] == "read"
    assert "older" not in nodes.told
    nodes.end_all()


@on_loop
async def test_many_are_sent_away_in_turns_with_others() -> None:
    nodes = Nodes(1)
    nodes.ask("a", *map(str, range(200)))
    nodes.end("a")
    sent = [len([to for to in nodes.told.values() if to == "a"])]
    while sent[-1] < 100:
        await asyncio.sleep(0)
        sent.append(len([to for to in nodes.told.values() if to == "a"]))
        assert sent[-1] > sent[-2], "all are sent, one after the other"
    assert sent == [32, 64, 96, 100]
    nodes.end_all()


@on_loop
async def test_a_node_that_leaves_while_others_are_sent_away_is_told_once() -> None:
    nodes = Nodes(1)
    nodes.ask("a", *map(str, range(200)))
    nodes.end("a")
    assert "120" not in nodes.told, "it is to be sent away in the next turns"
    nodes.end("120", is_stored=False)
    for number in range(60):
        nodes.end(str(number), is_stored=False)
    for _ in range(10):
        await asyncio.sleep(0)
    assert nodes.told["120"] == ""
    assert nodes.told["100"] == "a", "the others are sent away all the same"
    nodes.end_all()


@on_loop
async def test_a_node_that_is_read_next_is_not_sent_away() -> None:
    nodes = Nodes(1)
    nodes.ask("a", "b")
    nodes.end("a")
    assert nodes.told["b"] == "read"
    nodes.end_all()


@on_loop
async def test_waiting_ends_in_time_and_with_its_node() -> None:
    nodes = Nodes(1)
    nodes.ask("a", "b")
    nodes.ask("c", wait_s=0.01)
    nodes.end("b")
    await eventually_async(lambda: "c" in nodes.told)
    assert nodes.told == {"a": "read", "b": "", "c": ""}
    assert nodes.refused == [("peer_turns", serving.MAX_WAITING)], "the one whose time was over"
    nodes.end_all()


@on_loop
async def test_a_turn_that_takes_long_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "TURN_S", 0.01)
    nodes = Nodes(1)
    nodes.ask("a", "b")
    await eventually_async(lambda: not nodes.serving.lines)
    assert nodes.told == {"a": "read", "b": "read"}
    assert nodes.refused == [("long_peer_turns", 1)], "for nobody waits for the second"
    nodes.end_all()


@on_loop
async def test_not_without_end_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_WAITING", 1)
    nodes = Nodes(1)
    nodes.ask("a", "b", "c")
    assert nodes.told == {"a": "read", "c": ""}
    assert nodes.refused == [("peer_turns", 1)]
    nodes.end_all()


@on_loop
async def test_a_node_that_asks_often_has_one_turn_and_one_place() -> None:
    nodes = Nodes(2)
    nodes.ask("a", "a again", "a once more", node="a")
    assert nodes.told == {"a": "read", "a again": ""}, "its last question waits"
    nodes.ask("b", "c")
    assert nodes.told["b"] == "read", "though a asked before it"
    nodes.end("b", is_stored=False)
    assert nodes.told["c"] == "read"
    assert "a once more" not in nodes.told, "a reads already"
    nodes.end("a", is_stored=False)
    assert nodes.told["a once more"] == "read"
    assert nodes.refused == [("peer_turns", 1)]
    nodes.end_all()


@on_loop
async def test_one_node_does_not_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_WAITING_OF_NODE", 2)
    nodes = Nodes(1)
    for entry in range(3):
        nodes.ask(f"first {entry}", entry=entry)
        nodes.ask(f"a {entry}", entry=entry, node="a")
    nodes.ask("b", entry=2)
    assert nodes.told == {**{f"first {entry}": "read" for entry in range(3)}, "a 2": ""}
    assert nodes.refused == [("peer_turns", 2)]
    nodes.end("first 0")
    nodes.ask("a 3", entry=2, node="a")
    assert "a 3" not in nodes.told, "it waits for one entry less"
    nodes.end_all()
    assert not nodes.serving._waiting_of


@on_loop
async def test_a_node_that_has_waited_too_long_is_told_no_lease() -> None:
    """Others may end before the timers run, where the daemon has been stopped for a while."""
    nodes = Nodes(1)
    nodes.ask("a")
    nodes.ask("b", wait_s=30.0)
    nodes.ask("c", wait_s=60.0)
    nodes.clock.at_s = 30.0
    nodes.end("a", is_stored=False)
    assert nodes.told == {"a": "read", "b": "", "c": "read"}
    nodes.end_all()


@on_loop
async def test_all_turns_of_a_node_end_in_pieces_and_none_begins() -> None:
    nodes = Nodes(1)
    for entry in range(100):
        nodes.ask(f"a {entry}", entry=entry, node="a")
        nodes.ask(f"b {entry}", entry=entry)
    nodes.ask("a again", node="a")
    nodes.serving.end_all([turn for turn in nodes.turns.values() if turn.node == "a"])
    assert nodes.told["a again"] == ""
    begun = [sum(nodes.told.get(f"b {entry}") == "read" for entry in range(100))]
    while begun[-1] < 100:
        await asyncio.sleep(0)
        begun.append(sum(nodes.told.get(f"b {entry}") == "read" for entry in range(100)))
        assert begun[-1] > begun[-2], "all begin, one after the other"
    assert begun == [32, 64, 96, 100]
    nodes.end_all()
