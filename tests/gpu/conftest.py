from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import warm
from support.cuda.processes import Cuda, warm_interpreter
from support.cuda.standin import Control


@pytest.fixture(scope="package")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[warm.Interpreter | None]:
    with warm_interpreter(tmp_path_factory.mktemp("warm")) as interpreter:
        yield interpreter


@pytest.fixture
def cuda(tmp_path: Path, interpreter: warm.Interpreter | None) -> Iterator[Cuda]:
    """CUDA's driver: the stand-in, or with ECD_TEST_CUDA=device that of a GPU."""
    cuda = Cuda(tmp_path, interpreter)
    yield cuda
    cuda.close()


@pytest.fixture
def control(cuda: Cuda) -> Control:
    """The stand-in's control page, without which a test is skipped."""
    return cuda.control
