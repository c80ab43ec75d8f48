"""Streams of gRPC's between simulated daemons, as the daemon's code sees them.

A stream's messages arrive in order, each after a delay. A direction that is cut holds them until it
heals; after KEEPALIVE_S the stream breaks on both sides. A rogue network also loses, doubles and
swaps messages, which TCP does not do: peers that lie can.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from ecd_proto.v1 import peer_pb2 as pb
from simulation.clock import OUTSIDE, PROCESS, Process
from simulation.network import KEEPALIVE_S, Network

CONNECT_S = 0.0002
END, BROKEN = object(), object()


class RpcFailed(grpc.RpcError):
    def __init__(self, details: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        super().__init__(details)
        self._details, self._code = details, code

    def details(self) -> str:
        return self._details

    def code(self) -> grpc.StatusCode:
        return self._code


class Channel:
    """In place of grpc.aio.Channel: one stream at most is opened on it."""

    def __init__(self, network: Network, process: Process, source: str, target: str) -> None:
        self._about = network, process, source, target
        self._stream: Stream | None = None

    def unary_unary(self, *_: object, **__: object) -> None:
        """The daemon makes no such call of a peer."""

    def stream_stream(self, *_: object, **__: object) -> Callable[..., Call]:
        def call(metadata: object = ()) -> Call:
            self._stream = Stream(*self._about)
            return Call(self._stream)

        return call

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()


class Pipe:
    """One direction of a stream: messages, then END or BROKEN."""

    def __init__(self, network: Network, source: str, target: str, stream: Stream) -> None:
        self._network, self._way, self._stream = network, (source, target), stream
        self._held: list[object] = []
        self._arrived: deque[object] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._last_s, self._count = 0.0, 0
        self.is_over = False

    def send(self, message: object) -> None:
        network, loop = self._network, self._network.loop
        sender = PROCESS.get()
        if sender is not None and not sender.alive:
            return
        self._count += 1
        copies = 1
        at_s = loop.now_s + network.delay_s()
        is_first = self._count == 1
        is_rogue = network.rng.random() < network.weather.rogue
        if is_rogue and isinstance(message, bytes) and not is_first:
            copies = network.rng.choice((0, 1, 2))
            self._last_s = 0.0  # it may overtake
        for _ in range(copies):
            at_s = max(at_s, self._last_s)
            self._last_s = at_s
            loop.call_at(at_s, self._arrive, message, context=OUTSIDE)

    def _arrive(self, message: object) -> None:
        if self._way in self._network.cut:
            self._held.append(message)
            return
        receiver = self._stream.processes[self is self._stream.up]
        if receiver is None or receiver.alive:
            self.put(message)
        elif message is BROKEN:
            self._stream.end()  # or two dead processes would tell each other for ever
        else:
            self._stream.lose(int(self is self._stream.up))  # whoever is there now resets it

    def flush(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self.put(message)

    def put(self, message: object) -> None:
        if self.is_over:
            return
        if message is BROKEN:
            self._arrived.clear()
        self.is_over = message in (END, BROKEN)
        self._arrived.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> object:
        """The next message; END and BROKEN stay."""
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        first = self._arrived[0]
        return first if first in (END, BROKEN) else self._arrived.popleft()


class Stream:
    """One call of Peer.Link, and the connection under it."""

    def __init__(self, network: Network, process: Process, client: str, server: str) -> None:
        self.network, self.client, self.server = network, client, server
        self.processes: list[Process | None] = [process, None]
        self.up = Pipe(network, client, server, self)
        self.down = Pipe(network, server, client, self)
        self.status: RpcFailed | None = None
        self._handler: asyncio.Task[object] | None = None
        self._is_cancelled = False
        network.streams.append(self)
        network.loop.call_later(network.delay_s() + CONNECT_S, self._connect, context=OUTSIDE)

    def _connect(self) -> None:
        way = self.client, self.server
        if self._is_cancelled or way in self.network.cut or way[::-1] in self.network.cut:
            return  # the caller gives up in time
        process, service = self.network.listening.get(self.server, (None, None))
        if process is None:
            self.down.put(BROKEN)
            return
        self.processes[1] = process
        self._handler = process.start(self._serve(service))

    async def _serve(self, service: Any) -> None:
        context = ServerContext(self)
        try:
            await service.Link(Requests(self.up), context)
        except Aborted:
            pass
        finally:
            self.down.send(END)

    def cancel(self) -> None:
        """The client ends the call."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self.down.put(BROKEN)
            self.up.send(BROKEN)
            self._later(self.end)

    def lose(self, side: int) -> None:
        """The process of one side (0: the client's) has died: the other hears of it."""
        if side == 0:
            self.up.send(BROKEN)
            self._later(self.end)
        else:
            self.down.send(BROKEN)

    def _later(self, end: Callable[[], None]) -> None:
        """Do at the server what the client's end does, once it is heard."""
        network = self.network

        def arrive() -> None:
            if (self.client, self.server) in network.cut:
                network.loop.call_later(KEEPALIVE_S[1], end, context=OUTSIDE)
            else:
                end()

        network.loop.call_later(network.delay_s(), arrive, context=OUTSIDE)

    def end(self) -> None:
        """Forget the stream, and end the server's part of the call."""
        if self in self.network.streams:
            self.network.streams.remove(self)
        if self._handler is not None:
            self._handler.cancel()

    def break_if_cut(self) -> None:
        way = self.client, self.server
        if way in self.network.cut or way[::-1] in self.network.cut:
            self.break_now()

    def break_now(self) -> None:
        self.down.put(BROKEN)
        self.up.put(BROKEN)
        self.end()


class Call:
    """The client's side of a stream, in place of grpc.aio.StreamStreamCall."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def write(self, request: pb.LinkRequest) -> None:
        if self._stream.down.is_over:
            raise asyncio.InvalidStateError("the call is over")
        _maybe_break(self._stream)
        self._stream.up.send(request.SerializeToString())
        await asyncio.sleep(0)

    async def read(self) -> object:
        message = await self._stream.down.get()
        if message is BROKEN:
            raise RpcFailed("the connection broke")
        if message is END:
            if self._stream.status is not None:
                raise self._stream.status
            return grpc.aio.EOF
        return pb.LinkReply.FromString(message)

    async def details(self) -> str:
        return ""

    async def initial_metadata(self) -> tuple[()]:
        return ()

    def cancel(self) -> None:
        self._stream.cancel()


class Requests:
    """The requests of a stream, as the server iterates over them."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> pb.LinkRequest:
        message = await self._pipe.get()
        if message in (END, BROKEN):
            raise StopAsyncIteration
        return pb.LinkRequest.FromString(message)


class Aborted(Exception):
    """The service ended the call with a status."""


class ServerContext:
    """The server's side of a stream, in place of grpc.aio.ServicerContext."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def write(self, reply: pb.LinkReply) -> None:
        _maybe_break(self._stream)
        self._stream.down.send(reply.SerializeToString())
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self._stream.status = RpcFailed(details, code)
        raise Aborted(details)


def _maybe_break(stream: Stream) -> None:
    network = stream.network
    if network.rng.random() < network.weather.breaks:
        network.loop.call_later(network.delay_s(), stream.break_now, context=OUTSIDE)
