"""Real vLLM engines on two nodes, which answer requests with pictures while faults act.

Each answer is compared with that of an engine without ecd, which has answered before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from campaign.kinds import healed, kind, some_ms
from campaign.side import Side
from e2e.engines import EAGER, Engine, installed, make_model

if TYPE_CHECKING:
    from campaign.world import World

VERSION = "0.32.0"
SIDES = 2
REQUESTS, PICTURES, WINDOW, EACH_S = 48, 40, 8, 2.0
"""Requests, of so many pictures, of which `WINDOW` are in use; every `EACH_S` one is another."""
AT_ONCE = 3
LIMIT_S = 30.0
"""The deadline of these requests: loads are given up after 2 s, but the cores are busy."""
ENDS_S = 5.0
"""How long an engine that has closed its pipe takes to end."""
ENVIRON = {"VLLM_HOST_IP": "127.0.0.1"}
SESSIONS = 2
"""Of one engine: its scheduler's and its worker's."""


def tokens_of(reply: dict[str, Any]) -> list[list[int]]:
    return [output["tokens"] for output in reply["outputs"]]


class Served:
    """An engine on a node, and who asks it."""

    def __init__(self, side: Side, model: Path, asked: list[dict], right: list[list[int]]) -> None:
        self.side, self.world = side, side.world
        self._model, self._asked, self._right = model, asked, right
        self._chance = Random(f"{side.world.seed} engine {side.name}")
        self._starts = 0
        self.counts: Counter[str] = Counter()
        self.took_s: list[float] = []
        """How long each answer took."""
        self.resting = threading.Lock()
        """Held while a request is under way."""
        self._killed: set[int] = set()
        """Processes that a fault has killed."""
        self.is_over = False
        self.engine = self._start()

    def _start(self) -> Engine:
        self._starts += 1
        log = self.world.directory / f"engine-{self.side.name}-{self._starts}.log"
        extra = {"ecd_address": self.side.daemon.address}
        setup = {"model": str(self._model), "role": "ec_both", "extra": extra}
        return Engine(VERSION, log, setup, self.side.node.prefix, **EAGER, **ENVIRON)

    def signal(self, what: int) -> None:
        pid = self.engine.pid  # read once: another engine may take its place meanwhile
        if what == signal.SIGKILL:
            self._killed.add(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)

    def close(self) -> None:
        try:
            self.engine.close()
        except AssertionError as error:
            if self.engine.pid not in self._killed:
                self._lost(error)

    def run(self) -> None:
        """Ask until it is over; an engine that has ended is started again."""
        try:
            self._run()
        except Exception:
            self.world.violation("the campaign", traceback.format_exc())

    def _run(self) -> None:
        while not self.is_over:
            try:
                self.engine.wait_ready()
                with self.resting:
                    if not self.is_over:
                        self._ask()
            except Exception as error:
                self._ended(error)
            time.sleep(self._chance.uniform(0.0, 0.1))

    def _ask(self) -> None:
        newest = int((time.monotonic() - self.world.started_s) / EACH_S)
        drawn = self._chance.sample(range(newest, newest + WINDOW), AT_ONCE)
        numbers = [number % REQUESTS for number in drawn]
        self.engine.send({"do": "forget"})
        self.engine.receive(LIMIT_S)
        requests = [self._asked[number] for number in numbers]
        self.engine.send({"do": "generate", "requests": requests})
        reply = self.engine.receive(LIMIT_S)
        self.took_s.append(reply["seconds"])
        counts = self.counts
        pictures = [tuple(image) for request in requests for image in request["images"]]
        counts["pictures encoded"] += reply["encoded"]
        counts["pictures"] += len(pictures)
        counts["pictures taken"] += max(0, len(set(pictures)) - reply["encoded"])
        for number, output in zip(numbers, reply["outputs"], strict=True):
            if output["finish_reason"] != "length":
                counts["engine requests failed"] += 1
                self._unanswered(f"{number} ended with {output['finish_reason']}")
            elif output["tokens"] == self._right[number]:
                counts["engine answers"] += 1
            else:
                said = f"{output['tokens']}, not {self._right[number]}"
                self.world.violation("wrong", f"engine of {self.side.name}, {number}: {said}")

    def _ended(self, error: Exception) -> None:
        if self.is_over:
            return
        process = self.engine._process
        if process.pid not in self._killed:
            try:
                process.wait(ENDS_S)
                self._lost(error)
            except subprocess.TimeoutExpired:
                self._unanswered(repr(error))
                self.signal(signal.SIGKILL)
        process.wait()
        self.engine._replies.close()
        self.engine = self._start()

    def _unanswered(self, said: str) -> None:
        self.world.violation("unanswered", f"engine of {self.side.name}: {said}")

    def _lost(self, error: Exception) -> None:
        self.counts["engines lost"] += 1
        self.world.violation("engine lost", f"{self.side.name}: {error}")


class Engines:
    """The engines of a campaign."""

    def __init__(self, world: World) -> None:
        """Starts them; returns once they answer and all right answers are known."""
        installed(VERSION)
        model = make_model(VERSION, "qwen2_5_vl", world.directory / "model")
        chance = Random(f"{world.seed} pictures")
        asked = [
            {
                "text": f"what is in picture {number}?",
                "images": [[336, 224, picture] for picture in chance.sample(range(PICTURES), many)],
            }
            for number, many in enumerate(chance.choices((1, 2), k=REQUESTS))
        ]
        log = world.directory / "engine-plain.log"
        plain = Engine(VERSION, log, {"model": str(model)}, **EAGER)
        right = tokens_of(plain.generate(asked))
        assert len(set(map(tuple, right))) > REQUESTS // 2, "answers do not depend on the pictures"
        plain.close()
        self.served = [Served(side, model, asked, right) for side in world.sides[:SIDES]]
        for served in self.served:
            served.side.engine = served
            served.engine.wait_ready()
            threading.Thread(target=served.run, daemon=True).start()

    def took_s(self) -> list[float]:
        return [took_s for served in self.served for took_s in served.took_s]

    def counts(self) -> Counter[str]:
        return sum((served.counts for served in self.served), Counter())

    def check(self) -> None:
        """There were answers, and ecd has saved engines the encoding of some pictures."""
        counts = self.counts()
        for count in ("engine answers", "pictures taken"):
            if not counts[count]:
                self.served[0].world.violation("nothing compared", f"no {count}")

    def rest(self) -> None:
        """Returns once no request is under way; none begins before `go_on`."""
        for served in self.served:
            assert served.resting.acquire(timeout=2 * LIMIT_S), "an engine's request does not end"

    def go_on(self) -> None:
        for served in self.served:
            served.resting.release()

    def close(self) -> None:
        for served in self.served:
            served.is_over = True
        with ThreadPoolExecutor() as aside:
            list(aside.map(Served.close, self.served))


@kind("engine: SIGSTOP for 5 to 300 ms", "engine", 30)
def stop_engine(side: Side, chance: Random) -> float:
    assert side.engine is not None
    side.engine.signal(signal.SIGSTOP)
    some_ms(chance, 5, 300)
    side.engine.signal(signal.SIGCONT)
    return healed()


@kind("engine: SIGKILL", "engine", 2)
def kill_engine(side: Side, chance: Random) -> float:
    """Amid its requests; another one is started."""
    assert side.engine is not None
    side.engine.signal(signal.SIGKILL)
    return healed()
