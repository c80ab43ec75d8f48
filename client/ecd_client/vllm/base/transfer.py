"""The scheduler's message to the workers, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from ecd_client.item import Handle


class Load(NamedTuple):
    """One leased item that every worker is to copy into its encoder cache.

    Cost and metadata are those of its entry. The scheduler keeps the lease, renewed, until every
    worker has reported it.
    """

    id: int
    identifier: str
    handle: Handle
    cost_s: float
    metadata: bytes


@dataclass
class EcdMetadata(ECConnectorMetadata):
    """The scheduler's message to the workers.

    This step's outputs are stored in `namespace`, or nowhere if it is None. `move` counts how often
    the namespace was set anew.
    """

    namespace: str | None
    move: int
    loads: list[Load] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)
    """Items that ecd lacks: workers store those that are in their encoder cache."""
    keeps: list[str] = field(default_factory=list)
    """Items that an engine which only encodes found in ecd: workers copy them to their cache."""
    step: int = 0
    """The number of the step."""
    reports: tuple[str, str] = "", ""
    """Where the workers report (`Reports.place`)."""
    placeholders: dict[str, bytes] = field(default_factory=dict)
    """The metadata of the entries of this step's outputs, by item."""
    encoded_rows: int = 0
    """The embeddings of all items that this step encodes."""
