"""Client of ecd, the encoder cache daemon."""

from ecd_client import forks as forks  # before anything imports gRPC
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
from ecd_client.locate import Holder, Located
from ecd_proto.contract import Hint

__all__ = [
    "Client",
    "DaemonUnavailable",
    "EcdError",
    "EntryTooLarge",
    "Hint",
    "Holder",
    "InvalidArgument",
    "Item",
    "LeaseExpired",
    "Located",
    "PoolFull",
]
