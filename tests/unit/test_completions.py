from __future__ import annotations

import threading
from typing import Any

import pytest

from ecd_client.device import completions
from support.waiting import HANG_S


class Over:
    """An event of copies that are over, of which one call may raise something, once."""

    def __init__(self, **raises: BaseException) -> None:
        self._raises = raises

    def wait(self) -> None:
        self._call("wait")

    def stay_on_device(self) -> None:
        self._call("stay_on_device")

    def _call(self, name: str) -> None:
        if error := self._raises.pop(name, None):
            raise error


def step(events: list[Over], ended: list[int]) -> None:
    """Hold something for each event, and note which hold has ended."""
    with completions.gathering():
        for number, event in enumerate(events):
            completions.after([event], lambda number=number: ended.append(number))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those of a process in which nothing was held yet."""
    ends = completions._Ends()
    monkeypatch.setattr(completions, "_ends", ends)
    return ends


def test_an_interrupted_step_loses_no_hold(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "start", lambda: None)  # no thread can be had
    given, ended = list[int](), list[int]()

    def interrupted(gathered: Any) -> None:
        given.append(len(gathered))
        if len(given) == 1:
            raise KeyboardInterrupt
        completions._Ends.give(ends, gathered)

    monkeypatch.setattr(ends, "give", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step([Over(), Over(), Over()], ended)
    assert given == [3, 3]
    assert ended == [0, 1, 2]
    completions.after([Over()], lambda: ended.append(3))
    assert ended == [0, 1, 2, 3], "it is kept back, though no step is under way"


def test_holds_given_twice_end_once(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "start", lambda: None)
    monkeypatch.setattr(completions, "MAX_GATHERED", 2)
    ended: list[int] = []
    step([Over()] * 5, ended)
    assert ended == [0, 1, 2, 3, 4]


def test_without_a_thread_an_interrupted_wait_leaves_no_other_hold(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "start", lambda: None)
    ended: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        step([Over(wait=KeyboardInterrupt()), Over(), Over()], ended)
    assert ended == [0, 1, 2]


def test_holds_end_though_their_device_cannot_be_kept_current(ends: Any) -> None:
    for _ in range(2):
        done = threading.Event()
        completions.after([Over(stay_on_device=MemoryError())], done.set)
        assert done.wait(HANG_S)
