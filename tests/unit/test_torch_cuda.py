"""Memory for loads from torch's CUDA, in place of which stands what `TorchCuda` asks of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from ecd_client.device.accelerator import TorchCuda
from ecd_client.errors import DeviceBusy

Name = tuple[int, int, int]
"""How torch names a stream: by its number, its device's, and that of the kind of device."""
LOADS, OF_MODEL, OF_ENCODER = (70, 0, 1), (3, 0, 1), (5, 0, 1)
ELSEWHERE = (90, 1, 1)


class Stream:
    def __init__(self, stream_id: int, device_index: int, device_type: int) -> None:
        Torch.streams_made += 1
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type

    @property
    def name(self) -> Name:
        return self.stream_id, self.device_index, self.device_type


class Memory:
    def __init__(self, of: Name) -> None:
        self.of = of
        self.used_by: list[Name] = []

    def record_stream(self, stream: Stream) -> None:
        self.used_by.append(stream.name)


class State(NamedTuple):
    device: int
    streams: dict[int, Name]


class Torch:
    """The current device, the current stream of each, and how many streams' objects were made."""

    streams_made = 0

    def __init__(self) -> None:
        self.device, self.streams = 0, {0: OF_MODEL, 1: (0, 1, 1)}
        self.is_full = False

    def state(self) -> State:
        return State(self.device, dict(self.streams))

    def set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.device = device_index
        self.streams[device_index] = stream_id, device_index, device_type

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Memory:
        assert (shape, dtype) == ((4,), torch.uint8)
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Memory(self.streams[device.index])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    fake = Torch()
    for name, function in {
        "getCurrentStream": fake.streams.__getitem__,
        "getCurrentRawStream": lambda device: fake.streams[device][0],
        "getDevice": lambda: fake.device,
        "setStream": fake.set_stream,
    }.items():
        monkeypatch.setattr(torch._C, f"_cuda_{name}", function, raising=False)

    def is_expensive(*_: object) -> None:
        raise AssertionError("torch makes streams' objects here")

    monkeypatch.setattr(torch.cuda, "current_stream", is_expensive)
    monkeypatch.setattr(torch.cuda, "stream", is_expensive)
    monkeypatch.setattr(torch.cuda, "set_stream", is_expensive)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "device", fake.on)
    monkeypatch.setattr(torch, "empty", fake.empty)
    return fake


def load(device: int = 0, stream: Name | None = LOADS) -> Memory:
    made = None if stream is None else Stream(*stream)
    return TorchCuda().empty((4,), torch.uint8, device, made)  # type: ignore[return-value]


def test_memory_is_of_the_loads_stream_and_used_by_the_current_one(fake: Torch) -> None:
    before = fake.state()
    memory = load()
    assert (memory.of, memory.used_by) == (LOADS, [OF_MODEL])
    assert fake.state() == before


def test_without_a_stream_memory_is_of_the_current_one(fake: Torch) -> None:
    memory = load(stream=None)
    assert (memory.of, memory.used_by) == (OF_MODEL, [])


def test_a_streams_object_is_made_once(fake: Torch) -> None:
    gpu, loads = TorchCuda(), Stream(*LOADS)
    before = Torch.streams_made
    used_by: list[Name] = []
    for current in (OF_MODEL, OF_ENCODER, OF_MODEL, OF_ENCODER):
        fake.streams[0] = current
        memory = gpu.empty((4,), torch.uint8, 0, loads)
        used_by += memory.used_by  # type: ignore[attr-defined]
    assert used_by == [OF_MODEL, OF_ENCODER, OF_MODEL, OF_ENCODER]
    assert Torch.streams_made == before + 2


def test_another_device_stays_current(fake: Torch) -> None:
    before = fake.state()
    memory = load(1, ELSEWHERE)
    assert (memory.of, memory.used_by) == (ELSEWHERE, [(0, 1, 1)])
    assert fake.state() == before


def test_the_stream_is_left_where_there_is_no_memory(fake: Torch) -> None:
    fake.is_full, before = True, fake.state()
    with pytest.raises(DeviceBusy, match="out of memory"):
        load()
    assert fake.state() == before
