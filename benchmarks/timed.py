"""The connector of `connector.py`: `Switching` with a clock at every hook.

Importing it puts clocks on vLLM's engine core, too, and on what copies an item. An engine without a
connector has it imported by its setting of a scheduler. Each process writes what it found when the
engine ends.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from types import SimpleNamespace
from typing import Any

import safetensors.torch
from switching import HOOKS, Switching
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from ecd_client.tensors import TensorSource
from ecd_client.vllm.worker import loader

PLACE = "BENCH_STEPS"
"""The variable that names the directory to write in."""
Took = dict[int, dict[str, int]]
"""Nanoseconds, by step and hook."""


def write(name: str, content: object) -> None:
    (Path(os.environ[PLACE]) / f"{name}.json").write_text(json.dumps(content))


class Steps:
    """The steps of this process's engine core: each one's work, and its time."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.number = 0
        self.took: Took = {}  # by the scheduler's hooks
        self.own: Took = {}
        self.stored = self.encoded = self.tokens = self.requests = 0

    def schedule(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            self.encoded = sum(map(len, output.scheduled_encoder_inputs.values()))
            self.tokens = output.total_num_scheduled_tokens
            self.requests = len(output.num_scheduled_tokens)
            return output

        return noted

    def step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            self.stored = 0
            started = perf_counter_ns()
            result = call(*args, **kwargs)
            took = perf_counter_ns() - started
            self.all.append(
                {
                    "number": self.number,
                    "way": Switching.way,
                    "stored": self.stored,
                    "encoded": self.encoded,
                    "tokens": self.tokens,
                    "requests": self.requests,
                    "step_ns": took,
                }
            )
            return result

        return timed

    def end(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def told(*args: Any, **kwargs: Any) -> Any:
            write("steps", self.all)
            write("scheduler", self.took)
            write("scheduler own", self.own)
            return call(*args, **kwargs)

        return told


class Copies:
    """The time that this process's engine spends in copying items, and not beside its steps."""

    def __init__(self) -> None:
        self.ns = 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter_ns()
            result = call(*args, **kwargs)
            if threading.current_thread() is threading.main_thread():
                self.ns += perf_counter_ns() - started
            return result

        return timed


steps, copies = Steps(), Copies()


class Timed(Switching):
    """`Switching`, whose connectors' hooks are timed; what it takes to get to them is not."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self._is_worker = role is ECConnectorRole.WORKER
        self._step = 0  # the worker's
        self._took: Took = defaultdict(lambda: defaultdict(int))
        self._own: Took = defaultdict(lambda: defaultdict(int))
        """What hooks took of a processor, without their waits for the GIL."""
        if not self._is_worker:
            steps.took, steps.own = self._took, self._own
        for way, connector in self._ways.items():
            hooks = {hook: self._timed(hook, getattr(connector, hook)) for hook in HOOKS}
            self._ways[way] = SimpleNamespace(**hooks, shutdown=connector.shutdown)

    def _timed(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            copied, own_started = copies.ns, thread_time_ns()
            started = perf_counter_ns()
            result = call(*args, **kwargs)
            ended, own_ended = perf_counter_ns(), thread_time_ns()
            step = self._step if self._is_worker else steps.number
            self._took[step][hook] += ended - started
            self._own[step][hook] += own_ended - own_started
            if copies.ns != copied:
                self._took[step]["the copy"] += copies.ns - copied
            return result

        return timed

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        steps.stored = len(getattr(metadata, "loads", getattr(metadata, "mm_datas", ())))
        metadata.timed_step = steps.number
        return metadata

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._step = connector_metadata.timed_step
        super().bind_connector_metadata(connector_metadata)

    def shutdown(self) -> None:
        if self._is_worker:
            write("worker", self._took)
            write("worker own", self._own)
        super().shutdown()


EngineCore.step = steps.step(EngineCore.step)
EngineCore.shutdown = steps.end(EngineCore.shutdown)
Scheduler.schedule = steps.schedule(Scheduler.schedule)
loader.private_copy = copies.timed(loader.private_copy)
TensorSource.copy_to = copies.timed(TensorSource.copy_to)
safetensors.torch.load_file = copies.timed(safetensors.torch.load_file)
safetensors.torch.save_file = copies.timed(safetensors.torch.save_file)
