"""The gRPC server: services, health, reflection, and the interceptor of every call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ecd.base.clock import Clock
from ecd.base.wire import InvalidRequest
from ecd.live.slow_log import time_stages
from ecd.rpc.cache.cache_service import CacheService, Observe
from ecd.rpc.cache.convert import STATUS, SessionOver
from ecd.rpc.listener import Listener
from ecd.rpc.socket import OwnedSocket, SocketError
from ecd_proto.contract import MAX_MESSAGE_BYTES
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Cache"].full_name
MAX_PENDING_CALLS = 1 << 20
"""Calls that wait to be taken up. By default some of them are cancelled from 1,000 on, and a client
that reads CANCELLED gives up its session; each client of ours has up to 64 on their way."""
ALWAYS_ANSWERED = f"/{SERVICE}/Status"

Behavior = Callable[[Any, Any], Awaitable[Any]]


class _Calls(grpc.aio.ServerInterceptor):
    """Refuses calls while the daemon is not serving, names errors, measures time."""

    def __init__(
        self,
        unavailable: Callable[[], str | None],
        observe: Observe,
        clock: Clock,
    ) -> None:
        self._unavailable, self._observe, self._clock = unavailable, observe, clock
        self._handlers: dict[str, Any] = {}  # one wrapped handler a method

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        wrapped = self._handlers.get(details.method)
        if wrapped is not None:
            return wrapped
        handler = await continuation(details)
        if handler is None or not details.method.startswith(f"/{SERVICE}/"):
            return handler
        wrapped = self._handlers[details.method] = self._wrapped(details.method, handler)
        return wrapped

    def _wrapped(self, method: str, handler: Any) -> Any:
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._wrap(method, handler.unary_unary, timed=True),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.stream_stream_rpc_method_handler(
            self._wrap(method, handler.stream_stream, timed=False),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _wrap(self, method: str, behavior: Behavior, timed: bool) -> Behavior:
        name = method.rpartition("/")[2]

        async def called(request: Any, context: Any) -> Any:
            reason = None if method == ALWAYS_ANSWERED else self._unavailable()
            if reason is not None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, reason)
            started_s = self._clock.now_s()
            reply = None
            time_stages()
            try:
                reply = await behavior(request, context)
                return reply
            except (InvalidRequest, SessionOver) as error:
                await context.abort(STATUS[type(error)], str(error))
            finally:
                if timed:
                    self._observe(name, self._clock.now_s() - started_s, request, reply)

        return called


class Server:
    """The daemon's gRPC server on one unix socket."""

    def __init__(
        self,
        service: CacheService,
        unavailable: Callable[[], str | None],
        observe: Observe,
        clock: Clock,
    ) -> None:
        """`unavailable` says why calls are refused now; `observe` receives each call's seconds."""
        self._service, self._clock = service, clock
        self._calls = _Calls(unavailable, observe, clock)
        self._health = health.aio.HealthServicer()
        self._listeners: list[Listener] = []

    async def start(self, socket: OwnedSocket, gid: int | None, health_address: str | None) -> None:
        """Listen. Raises SocketError: one of the addresses cannot be had."""
        await self.set_serving(False)
        try:
            await self._listen(lambda: self._make(socket, gid))
        except (RuntimeError, OSError) as error:
            raise SocketError(
                f"cannot listen on {socket.path}: {error}. ECD_ADDRESS or --address must name a "
                "place this user may write to"
            ) from None
        if health_address is not None:
            try:
                await self._listen(lambda: self._make_probed(health_address))
            except RuntimeError:
                raise SocketError(
                    f"the health service cannot listen on {health_address}: the port is taken, or "
                    "the address is not this machine's. Choose another with ECD_HEALTH_ADDRESS"
                ) from None

    async def _listen(self, make: Callable[[], Any]) -> None:
        self._listeners.append(Listener(make, self._clock))
        await self._listeners[-1].start()

    def _make(self, socket: OwnedSocket, gid: int | None) -> Any:
        """A server on the socket. Raises RuntimeError, OSError and SocketError: it is not bound."""
        server = grpc.aio.server(
            interceptors=[self._calls],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ],
        )
        pb_grpc.add_CacheServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        socket.bind(server, gid)
        return server

    def _make_probed(self, address: str) -> Any:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_insecure_port(address)
        return server

    async def set_serving(self, serving: bool) -> None:
        """Set the answer of the health service."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Let calls in flight finish, for `grace_s` at most."""
        await asyncio.gather(*(listener.stop(grace_s) for listener in self._listeners))
