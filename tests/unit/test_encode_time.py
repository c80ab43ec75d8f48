"""The time of a step's encoder, split over its outputs."""

from __future__ import annotations

import pytest
import torch

from ecd_client.vllm.worker.encode_time import EncodeTime


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_batch_is_split_by_rows_and_not_charged_whole() -> None:
    clock = Clock()
    time = EncodeTime(lambda: torch.device("cpu"), clock)
    time.begin(400)
    clock.now_s += 9.0  # loads
    time.begin(400)
    clock.now_s += 0.8
    costs = [time.cost_s(100)]
    clock.now_s += 5.0  # the first output is being stored
    costs += [time.cost_s(rows) for rows in (100, 200)]
    assert costs == pytest.approx([0.2, 0.2, 0.4])
    time.begin(10)
    clock.now_s += 0.1
    assert time.cost_s(10) == pytest.approx(0.1), "the next step has a time of its own"
    assert time.cost_s(50) == pytest.approx(0.1), "no output costs more than the step"


def test_a_step_that_encodes_nothing_tells_no_cost() -> None:
    time = EncodeTime(lambda: torch.device("cpu"), Clock())
    time.begin(0)
    assert time.cost_s(10) == 0.0


def test_on_a_gpu_an_output_is_told_what_a_step_of_about_its_size_took() -> None:
    time = EncodeTime(lambda: torch.device("cpu"), Clock())
    time.note(1000, 0.02)
    time.note(100, 0.01)
    assert time.measured_s(900, 450) == pytest.approx(0.009)
    assert time.measured_s(110, 110) == pytest.approx(0.011)
    assert time.measured_s(5000, 5000) == 0.0, "no step of that size was timed yet"
