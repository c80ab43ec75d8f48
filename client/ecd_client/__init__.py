"""Client of ecd, the encoder cache daemon."""

from ecd_client.client import Client
from ecd_client.errors import (
    DaemonUnavailable,
    EcdError,
    EntryTooLarge,
    InvalidArgument,
    LeaseExpired,
    PoolFull,
)
from ecd_client.item import Item

__all__ = [
    "Client",
    "DaemonUnavailable",
    "EcdError",
    "EntryTooLarge",
    "InvalidArgument",
    "Item",
    "LeaseExpired",
    "PoolFull",
]
