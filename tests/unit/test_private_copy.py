"""Copies that torch makes itself, with what stands in for a GPU's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from ecd_client import tensors


class Gpu:
    """Has memory for tensors of some streams alone."""

    def __init__(self, has_memory: set[str]) -> None:
        self.current, self._has_memory = "the model's", has_memory

    @contextlib.contextmanager
    def stream(self, stream: Side) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def to(self, tensor: torch.Tensor, *_: object, non_blocking: bool = False, copy: bool) -> Copy:
        if self.current not in self._has_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert copy
        return Copy(self.current, non_blocking, tensor.tolist())


class Side:
    name = "ecd's"
    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


class Copy:
    def __init__(self, of: str, is_queued: bool, content: list[int]) -> None:
        self.of, self.is_queued, self.content = of, is_queued, content
        self.used_by: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.used_by.append(stream)


def copy_to(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> tuple[Copy, Side]:
    side = Side()
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: gpu.current)
    monkeypatch.setattr(tensors, "_side_stream", lambda _: side)
    monkeypatch.setattr(torch.Tensor, "to", lambda *of, **how: gpu.to(*of, **how))
    view = memoryview(bytearray(b"abc"))
    return tensors.private_copy(view, "uint8", (3,), "cuda"), side  # type: ignore[return-value]


def test_a_copy_is_made_beside_the_models_work(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, side = copy_to(Gpu({"ecd's", "the model's"}), monkeypatch)
    assert (copy.of, copy.content, copy.used_by) == ("ecd's", list(b"abc"), ["the model's"])
    assert side.waits == 1


def test_a_copy_takes_memory_that_torch_keeps_for_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy, _ = copy_to(Gpu({"the model's"}), monkeypatch)
    assert (copy.of, copy.content, copy.is_queued) == ("the model's", list(b"abc"), False)


def test_without_any_memory_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        copy_to(Gpu(set()), monkeypatch)
