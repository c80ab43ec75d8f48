"""The questions which nodes hold some keys, and which engines encode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ecd_client.session.session import Session
from ecd_client.values import Key, to_key
from ecd_proto.encoders import RegisteredEncoder
from ecd_proto.v1 import cache_pb2 as pb


class Holder(NamedTuple):
    """A node that holds an entry, by the host:port of its Peer service.

    The entry's bytes and the seconds since it was stored there are None where only that node knows.
    Its metadata is empty there, too, or if it has none.
    """

    node: str
    nbytes: int | None
    age_s: float | None
    metadata: bytes = b""


class Located(NamedTuple):
    """The holders of each key, this node first.

    `is_partial`: the list may be incomplete: no directory is configured, or the directory or a node
    did not answer in time.
    """

    holders: list[list[Holder]]
    is_partial: bool


def locate(session: Session, keys: Sequence[Key]) -> Located:
    """The nodes that hold these keys. Raises EcdError."""
    return located(session.calls.alone("locate", pb.LocateRequest(keys=map(to_key, keys))))


def encoders(session: Session, namespace: str) -> list[RegisteredEncoder]:
    """The encoders of the namespace. Raises EcdError."""
    reply = session.calls.alone("encoders", pb.EncodersRequest(namespace=namespace))
    return list(filter(None, map(RegisteredEncoder.of, reply.encoders)))


def located(reply: Any) -> Located:
    holders = [
        [
            Holder(
                at.node,
                at.nbytes or None,
                at.age_s if at.HasField("age_s") else None,
                at.metadata,
            )
            for at in key.holders
        ]
        for key in reply.located
    ]
    return Located(holders, reply.is_partial)
