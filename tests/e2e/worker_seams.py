"""Drives what a producer's step waits for, on a clock in the hand. In a vLLM environment.

    python worker_seams.py

Prints how long each step waited until its save was seen, as JSON.
"""

import json
from concurrent.futures import Future

import torch

from ecd_client.vllm.base.settings import Settings
from ecd_client.vllm.worker import worker


class Clock:
    """Time that passes when a step waits, and the daemon's answer to the save under way."""

    at_s = 0.0
    takes_s = 0.0
    answer: Future

    def now_s(self) -> float:
        return self.at_s

    def put_async(self, *_: object, **__: object) -> Future:
        self.answer, self.answers_s = Future(), self.at_s + self.takes_s
        return self.answer

    def wait(self, _: object, seconds: float) -> None:
        self.at_s += seconds
        if self.at_s >= self.answers_s and not self.answer.done():
            self.answer.set_result(True)


def waits_s(*answers_s: float) -> list[float]:
    """One step after another, whose save is answered after so many seconds."""
    clock = Clock()
    worker.clock, worker.wait = clock, clock.wait
    settings = Settings("unix:///nobody", None, None, 2.0, "encode", False, True, True, False)
    role = worker.WorkerRole(settings, is_producer=True, is_consumer=False)
    role._client.put_async, role._client.is_shown = clock.put_async, lambda _: False
    role._rank, role._namespace = 0, "tests"
    waited = []
    for clock.takes_s in answers_s:
        began_s = clock.at_s
        role._save("a picture", torch.zeros(1), 0.0, b"")
        role._wait_seen()
        waited.append(round(clock.at_s - began_s, 2))
        clock.wait(None, max(0.0, clock.takes_s - waited[-1]) + 1e-6)
    role.close()
    return waited


done = {
    "late, and then in time": waits_s(0.5, 0.06, 0.06),
    "late again and again": waits_s(0.5, 0.5, 0.5),
    "in time": waits_s(0.06, 0.06),
}
print("RESULT", json.dumps(done))
