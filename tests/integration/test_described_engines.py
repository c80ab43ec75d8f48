"""Engines that say at their daemon what they are."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ecd_client import Client, InvalidArgument
from ecd_proto.engines import Engine
from ecd_proto.v1 import cache_pb2 as pb
from support.cli import cli
from support.daemon import Daemon, changed
from support.waiting import HANG_S, eventually

PARTS = {"dtype": "bfloat16", "weights": "0a1b2c3d"}
ENCODER = Engine("encoder", "tiny [bold]model[/]", "one", True, False, PARTS, "image")
CONSUMER = Engine(
    "consumer", "tiny [bold]model[/]", "two", False, True, {**PARTS, "dtype": "float32"}, "image"
)


class Described:
    """A client that says which engine it is of, and what it is told."""

    def __init__(self, daemon: Daemon, engine: Engine) -> None:
        self.told: list[Engine] = []
        self.is_told = threading.Event()
        self.client = Client(daemon.address)
        self.client.describe(engine, self._note)

    def _note(self, other: Engine) -> None:
        self.told.append(other)
        self.is_told.set()


@contextlib.contextmanager
def described(daemon: Daemon, engine: Engine) -> Iterator[Described]:
    described = Described(daemon, engine)
    try:
        yield described
    finally:
        described.client.close()


def known(daemon: Daemon) -> list[str]:
    return sorted(each.engine.id for each in daemon.status().engines)


def await_known(daemon: Daemon, *ids: str) -> None:
    eventually(lambda: known(daemon) == sorted(ids), f"described are {ids}")


def test_a_consumer_is_told_of_its_encoder_whichever_comes_first(daemon: Daemon) -> None:
    with described(daemon, ENCODER) as encoder:
        await_known(daemon, "encoder")
        with described(daemon, CONSUMER) as late, described(daemon, CONSUMER) as rank:
            for each in (late, rank):
                assert each.is_told.wait(HANG_S)
        await_known(daemon, "encoder")
    assert encoder.told == []
    await_known(daemon)
    with described(daemon, CONSUMER) as early:
        await_known(daemon, "consumer")
        with described(daemon, ENCODER) as encoder, described(daemon, ENCODER):
            assert early.is_told.wait(HANG_S)
            await_known(daemon, "consumer", "encoder", "encoder")
        early.client.contains(["k"])
    for each in (late, rank, early):
        assert [replace(other, pid=0) for other in each.told] == [ENCODER]
        assert each.told[0].differs_from(CONSUMER) == ["dtype"]


def test_an_engine_says_what_it_is_anew_and_to_each_daemon(daemon: Daemon) -> None:
    with described(daemon, ENCODER) as encoder, described(daemon, CONSUMER) as consumer:
        assert consumer.is_told.wait(HANG_S)
        moved = replace(ENCODER, namespace="moved")
        encoder.client.describe(moved)
        eventually(lambda: "moved" in {each.engine.namespace for each in daemon.status().engines})
        assert len(consumer.told) == 1, "it moves, and comes back, while weights change"
        consumer.is_told.clear()
        daemon.kill()
        daemon.start()
        await_known(daemon, "consumer", "encoder")
        assert consumer.is_told.wait(HANG_S)
        assert consumer.told[-1].namespace == "moved"


def test_nobody_is_told_of_an_engine_that_moves(daemon: Daemon) -> None:
    """Weights change in one engine after the other, which parts them for a while."""
    ours = replace(ENCODER, namespace=CONSUMER.namespace)
    with described(daemon, ours) as encoder, described(daemon, CONSUMER) as consumer:
        await_known(daemon, "consumer", "encoder")
        encoder.client.describe(replace(ours, namespace="moved"))
        eventually(lambda: "moved" in {each.engine.namespace for each in daemon.status().engines})
        with described(daemon, replace(ENCODER, id="third")):
            assert consumer.is_told.wait(HANG_S)
        assert [other.id for other in consumer.told] == ["third"]


def test_operators_see_engines_and_what_parts_them(daemon: Daemon) -> None:
    with described(daemon, ENCODER), described(daemon, CONSUMER) as consumer:
        assert consumer.is_told.wait(HANG_S)
        found = cli(daemon, "doctor").stdout
        assert "look  engines: pid" in found
        assert "differ in dtype (float32 and bfloat16)" in found
        assert "start both with the same dtype" in found
        shown = cli(daemon, "status").stdout
        assert "tiny [bold]model[/]: stores image; namespace one" in shown
        assert "tiny [bold]model[/]: loads image; namespace two" in shown
        engines = json.loads(cli(daemon, "--json", "status").stdout)["engines"]
        assert {each["engine"]["parts"]["dtype"] for each in engines} == {"bfloat16", "float32"}
    await_known(daemon)
    assert "  engines: " not in cli(daemon, "doctor").stdout


def test_a_description_of_another_form_costs_its_session_nothing(daemon: Daemon) -> None:
    with described(daemon, ENCODER) as encoder:
        await_known(daemon, "encoder")
        token = encoder.client._connection.session().token
        for wrong in (
            pb.Engine(id="/"),
            pb.Engine(id="e"),
            pb.Engine(id="e", namespace="n" * 9999),
        ):
            encoder.client._connection.session()._outbox.put(pb.SessionRequest(engine=wrong))
        encoder.client.describe(replace(ENCODER, model="another"))
        eventually(lambda: daemon.status().engines[0].engine.model == "another")
        assert encoder.client._connection.session().token == token
        assert daemon.text().count("describes its engine in a form that is not known") == 1
        for misuse in (None, ENCODER.message, replace(ENCODER, id="/"), replace(ENCODER, model=7)):
            with pytest.raises(InvalidArgument):
                encoder.client.describe(misuse)


def test_a_callback_that_raises_ends_no_session(daemon: Daemon) -> None:
    called = threading.Event()

    def fails(other: Engine) -> None:
        called.set()
        raise LookupError

    with described(daemon, ENCODER), Client(daemon.address) as client:
        client.describe(CONSUMER, fails)
        token = client._connection.session().token
        assert called.wait(HANG_S)
        assert client.put_bytes("k", b"x", "uint8", (1,))
        assert client._connection.session().token == token


def test_a_daemon_of_before_is_told_nothing_and_serves(daemon: Daemon) -> None:
    """It would end a session that sends what it does not know."""
    daemon.terminate()
    daemon.command = changed(
        "from ecd.rpc.cache.sessions import SessionStreams",
        "new = SessionStreams._welcome",
        "def old(streams, stream):",
        "    welcome = new(streams, stream)",
        "    welcome.takes_engine = False",
        "    return welcome",
        "SessionStreams._welcome = old",
        "del SessionStreams._describe",
    )
    daemon.start()
    with described(daemon, ENCODER) as encoder:
        session = encoder.client._connection.session()
        session._renewing.append([])
        session._outbox.put(pb.SessionRequest(renew=pb.Renew()))  # the stream is read in order
        eventually(lambda: not session._renewing, "the daemon's answer")
        assert encoder.client.put_bytes("k", b"x", "uint8", (1,))
        assert encoder.client._connection.session() is session
        assert known(daemon) == []
    assert daemon.entries()
