"""The gRPC server that other nodes reach."""

from __future__ import annotations

from typing import Any

import grpc

from ecd.base.clock import Clock
from ecd.rpc.listener import Listener
from ecd.rpc.peer.peer_service import PeerService
from ecd_proto.contract import MAX_MESSAGE_BYTES
from ecd_proto.v1 import peer_pb2_grpc as pb_grpc

MAX_PENDING_CALLS = 1 << 14
"""Calls that wait to be taken up: ten thousand nodes may open their links in one moment. By default
some are cancelled from 1,000 on, and a node whose call is cancelled takes this one for unreachable.
"""


class PeerServerError(Exception):
    """The address for peers cannot be bound; the message says what to change."""


class PeerServer:
    """One address for peers, and the service behind it."""

    def __init__(
        self, service: PeerService, credentials: grpc.ServerCredentials | None, clock: Clock
    ) -> None:
        self._service, self._credentials, self._clock = service, credentials, clock
        self._listener: Listener | None = None

    def bind(self, address: str) -> None:
        """Bind the address, for `start`. Raises PeerServerError."""
        try:
            self._listener = Listener(lambda: self._make(address), self._clock)
        except RuntimeError:
            raise PeerServerError(
                f"cannot listen for peers on {address}: it is not an address of this machine, or "
                "something listens there. ECD_PEER_ADDRESS is where other nodes reach this one"
            ) from None

    def _make(self, address: str) -> Any:
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 3_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ]
        )
        pb_grpc.add_PeerServicer_to_server(self._service, server)
        if self._credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, self._credentials)
        return server

    async def start(self) -> None:
        assert self._listener is not None
        await self._listener.start()

    async def stop(self, grace_s: float) -> None:
        self._service.end_all()
        if self._listener is not None:
            await self._listener.stop(grace_s)
