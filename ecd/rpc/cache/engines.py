"""The engines of this node by their own descriptions: which must learn of another, which encode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ecd.base.clock import Clock
from ecd.core.model.types import SessionId
from ecd_proto.encoders import MAX_ENCODERS, RegisteredEncoder
from ecd_proto.engines import MAX_ENGINES, Engine, lonely, nearest
from ecd_proto.v1 import cache_pb2 as pb


class Engines:
    """The descriptions of open sessions, MAX_ENGINES at most, and MAX_ENCODERS API servers."""

    def __init__(self, clock: Clock, node: str = "") -> None:
        """`node` is the host:port at which other nodes reach the daemon; empty: nowhere."""
        self._host = node.rpartition(":")[0].lower() or "127.0.0.1"
        self._clock = clock
        self._by_session: dict[SessionId, Engine] = {}
        self._registered: dict[SessionId, tuple[RegisteredEncoder, float]] = {}
        self._told: set[SessionId] = set()

    def describe(self, session: SessionId, engine: Engine) -> bool:
        """Store the description of a session's engine. False: there are too many."""
        if session not in self._by_session and len(self._by_session) >= MAX_ENGINES:
            return False
        self._by_session[session] = engine
        return True

    def get(self, session: SessionId) -> Engine | None:
        return self._by_session.get(session)

    def forget(self, session: SessionId) -> None:
        self._by_session.pop(session, None)
        self._registered.pop(session, None)
        self._told.discard(session)

    def register(self, session: SessionId, encoder: RegisteredEncoder) -> bool:
        """Store where an engine's API server is reached. False: there are too many."""
        known, now_s = encoder.reached_at(self._host), self._clock.now_s()
        if session not in self._registered:
            urls = {(each.engine, each.url) for each, _ in self._registered.values()}
            if (known.engine, known.url) not in urls and len(urls) >= MAX_ENCODERS:
                return False
        before, since_s = self._registered.get(session, (known, now_s))
        self._registered[session] = known, since_s if before.url == known.url else now_s
        return True

    def encoders(self) -> list[RegisteredEncoder]:
        """The registered engines that store, the oldest first.

        API servers of the same engines have one URL. Each reports the requests that it serves.
        """
        storing = {engine.id: engine for engine in self._by_session.values() if engine.stores}
        now_s = self._clock.now_s()
        found: dict[tuple[str, str], RegisteredEncoder] = {}
        for encoder, since_s in self._registered.values():
            engine = storing.get(encoder.engine)
            if engine is None:
                continue
            server = encoder.engine, encoder.url
            if first := found.get(server):
                found[server] = replace(first, active=first.active + encoder.active)
                continue
            found[server] = replace(
                encoder,
                namespace=engine.namespace,
                loads=engine.loads,
                age_s=now_s - since_s,
                node="",
            )
        return list(found.values())

    def statuses(self) -> list[pb.EngineStatus]:
        return [engine.status for engine in self._by_session.values()]

    def told_by_arrival(self, came: SessionId) -> Iterator[tuple[SessionId, Engine]]:
        """The sessions that are apart now that this one has come, and from which engine each is.

        A session is named once. The one that came may be apart from any engine, each other one
        from it alone: of those that came earlier it has been told.
        """
        engines = self._by_session
        alone = lonely(list(engines.values()))
        for session in engines.keys() - self._told:
            engine = engines[session]
            if any(engine is each for each in alone):
                those = engines.values() if session == came else [engines[came]]
                if (apart := nearest(engine, those)) is not None:
                    self._told.add(session)
                    yield session, apart
