from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cuda.processes import Cuda
from support.cuda.standin import Control


@pytest.fixture
def cuda(tmp_path: Path) -> Iterator[Cuda]:
    """CUDA's driver: the stand-in, or with ECD_TEST_CUDA=device that of a GPU."""
    cuda = Cuda(tmp_path)
    yield cuda
    cuda.close()


@pytest.fixture
def control(cuda: Cuda) -> Control:
    """The stand-in's control page, without which a test is skipped."""
    return cuda.control
