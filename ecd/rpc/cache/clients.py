"""The clients of a daemon for operators: who they are, and what each holds of the pools."""

from __future__ import annotations

from collections.abc import Iterable

from ecd.core.model.types import Held, SessionId
from ecd.live.live import LiveCache
from ecd.live.turns import Pace
from ecd.rpc.cache.sessions import SessionStreams
from ecd.rpc.cache.stream import Stream
from ecd_proto.v1 import cache_pb2 as pb


class Clients:
    """Lists the sessions of clients and ends them, for operators."""

    def __init__(self, live: LiveCache, streams: SessionStreams) -> None:
        self._live, self._streams = live, streams

    async def all(self, pace: Pace) -> pb.ClientsReply:
        """Every client, in turns: each is as it was at some moment of the call."""
        reply = pb.ClientsReply(incarnation=self._streams.identity.incarnation)
        clients = list(self._streams.each())
        others = set(self._live.cache.views.all_sessions())
        for stream, state in clients:
            others.discard(stream.session)
            held = await self._held(stream.session, pace)
            reply.clients.append(self._info(stream, state, held))
        total = Held()
        for session in others:
            held = await self._held(session, pace)
            total = Held(*map(sum, zip(total, held, strict=True)))
        reply.others.CopyFrom(pb.Held(**total._asdict()))
        return reply

    async def end(self, ids: Iterable[int]) -> list[bool]:
        """End these clients' sessions. False for each that is not open."""
        return [await self._streams.end_client(SessionId(number)) for number in ids]

    async def _held(self, session: SessionId, pace: Pace) -> Held:
        held = Held()
        for summed in self._live.cache.views.held_by(session):
            await pace.step()
            held = summed
        return held

    def _info(
        self, stream: Stream, state: pb.ClientInfo.State.ValueType, held: Held
    ) -> pb.ClientInfo:
        process, engine = stream.process, self._streams.engines.get(stream.session)
        return pb.ClientInfo(
            id=stream.session,
            state=state,
            client=stream.client,
            pid=stream.pid,
            seen_pid=process.pid,
            uid=process.uid if process.uid >= 0 else None,
            model=engine.model if engine else "",
            namespace=engine.namespace if engine else "",
            age_s=self._live.clock.now_s() - stream.opened_s,
            held=pb.Held(**held._asdict()),
            pinned_bytes=self._streams.pinned_bytes(stream.session),
        )
