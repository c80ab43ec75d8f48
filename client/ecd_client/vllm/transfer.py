"""What the two roles tell each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorWorkerMetadata,
)

from ecd_client.vllm.stats import EcdStats


class Load(NamedTuple):
    """One leased extent that every worker is to copy into its encoder cache.

    `expires_s` is on the node's monotonic clock; the scheduler keeps the lease, renewed, until
    every worker has reported `id`. The pool can be opened as `pool_path`, or, after a restart of
    the daemon, as `pool_fd_path`.
    """

    id: int
    identifier: str
    incarnation: str
    pool_path: str
    pool_fd_path: str
    pool_bytes: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    expires_s: float


@dataclass
class EcdMetadata(ECConnectorMetadata):
    """From the scheduler to the workers, once a step.

    `namespace` is what this step's items are stored in; None: they are not shared. `move` is how
    often it was set anew.
    """

    namespace: str | None
    move: int
    loads: list[Load] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)
    """What ecd lacks: to be stored again if it is in the encoder cache."""
    keeps: list[str] = field(default_factory=list)
    """What an engine that only encodes did not: to be put into its encoder cache."""
    counts_path: str | None = None
    """Where a worker counts whose metadata does not come back."""


@dataclass
class EcdWorkerMetadata(ECConnectorWorkerMetadata):
    """From a worker to the scheduler, where vLLM carries it.

    `forgotten` is the `move` in which its encoder cache was emptied, though the scheduler had not
    said that weights changed; -1: it was not.
    """

    stats: EcdStats
    forgotten: int = -1

    def aggregate(self, other: ECConnectorWorkerMetadata) -> EcdWorkerMetadata:
        assert isinstance(other, EcdWorkerMetadata)
        self.stats.aggregate(other.stats)
        self.forgotten = max(self.forgotten, other.forgotten)
        return self
