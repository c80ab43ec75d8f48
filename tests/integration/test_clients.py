"""Operators see who holds the pool, end a client's session, and read of refused puts in the log."""

from __future__ import annotations

import json
import os
import pwd
import signal
from collections.abc import Callable
from typing import Any

import pytest

from ecd_client import Client
from ecd_client.errors import EntryTooLarge, PoolFull
from ecd_client.session.channel import open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.cli import cli
from support.daemon import Daemon, changed
from support.dma_writer import RESERVED_BYTES, writer
from support.holder import digest, holder
from support.users import needs_root
from support.waiting import HANG_S, eventually, stopped, value_of

MIB = 1 << 20
DATA = os.urandom(3 * MIB)
NAMESPACED = "unshare", "--pid", "--fork", "--kill-child"


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


def clients(daemon: Daemon) -> list[dict[str, Any]]:
    listed = cli(daemon, "clients", "--json")
    assert listed.returncode == 0, listed.stderr
    shown: Any = json.loads(listed.stdout)
    found: list[dict[str, Any]] = shown["clients"]
    return found


def of_process(daemon: Daemon, pid: int, state: str = "open") -> dict[str, Any] | None:
    """The client of this process, once the daemon has seen the process."""
    for each in clients(daemon):
        if (each["seen_pid"], each["state"]) == (pid, state):
            return each
    return None


def put(daemon: Daemon, *keys: str, nbytes: int = len(DATA)) -> None:
    with Client(daemon.address, namespace="n") as client:
        for key in keys:
            client.put_bytes(key, DATA[:nbytes], "uint8", (nbytes,))


def end(daemon: Daemon, client: dict[str, Any]) -> str:
    ended = cli(daemon, "clients", "end", str(client["id"]), "--yes")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_clients_are_listed_by_what_they_hold(daemon: Daemon) -> None:
    put(daemon, "a", "b")
    with (
        holder(daemon.address, "reader") as reader,
        holder(daemon.address, "idler") as idler,
        writer(daemon) as (writing, _),
    ):
        for key in ("a", "b"):
            assert reader.ask("get", key) == digest(DATA)
        for pid in (reader.pid, idler.pid, writing.pid):
            eventually(lambda pid=pid: of_process(daemon, pid), f"{pid} is seen")
        first, second, third = clients(daemon)
        assert [each["pid"] for each in (first, second, third)] == [
            *(writing.pid, reader.pid, idler.pid)
        ]
        assert first["held"]["reserved_bytes"] == RESERVED_BYTES
        held = second["held"]
        assert (held["entries"], held["leases"] + held["pins"]) == (2, 2)
        assert held["leased_bytes"] == 2 * len(DATA)
        assert third["held"]["leased_bytes"] == third["held"]["reserved_bytes"] == 0
        assert second["client"].startswith("reader ecd ")
        assert {each["uid"] for each in (first, second, third)} == {os.getuid()}
        assert pwd.getpwuid(os.getuid()).pw_name == third["user"]
        ages = {each["id"]: each["age_s"] for each in (first, second, third)}
        assert sorted(ages.values(), reverse=True) == [ages[number] for number in sorted(ages)]
        head, *rows = cli(daemon, "clients").stdout.splitlines()
        assert head.split()[:3] == ["id", "pid", "user"]
        assert [row.split()[1] for row in rows] == [
            *(str(each.pid) for each in (writing, reader, idler))
        ]
        assert "2 entries, 6 MiB" in rows[1]
        daemon.evict_all()  # what is leased is hidden, and still held
        assert of_process(daemon, reader.pid)["held"]["leased_bytes"] == 2 * len(DATA)


def test_what_an_engine_says_of_itself_is_listed(daemon: Daemon) -> None:
    engine = pb.Engine(id="e", model="Qwen", namespace="qwen@bf16", stores=True, loads=True)
    with Client(daemon.address, name="vllm worker") as client:
        from ecd_proto.engines import Engine

        described = Engine.of(engine)
        assert described is not None
        client.describe(described)
        found = value_of(lambda: [each for each in clients(daemon) if each["model"]])
        assert [(each["model"], each["namespace"]) for each in found] == [("Qwen", "qwen@bf16")]


@needs_root
def test_the_process_is_named_as_the_daemon_sees_it(daemon: Daemon) -> None:
    with holder(daemon.address, "contained", NAMESPACED):
        found = value_of(lambda: [each for each in clients(daemon) if each["seen_pid"] > 1])
        assert [each["pid"] for each in found] == [1]
        assert "own pid" in cli(daemon, "clients").stdout


def test_a_client_that_was_killed_is_gone_with_all_that_it_held(daemon: Daemon) -> None:
    put(daemon, "a")
    with holder(daemon.address, "reader") as reader, holder(daemon.address, "other") as other:
        for each in (reader, other):
            each.ask("get", "a")
            eventually(lambda each=each: of_process(daemon, each.pid))
        os.kill(reader.pid, signal.SIGKILL)
        eventually(lambda: [each["pid"] for each in clients(daemon)] == [other.pid])
        assert of_process(daemon, other.pid)["held"]["leased_bytes"] == len(DATA)


def test_a_dead_client_for_which_a_device_may_copy_is_listed_until_it_is_over(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon()
    daemon.command = changed(
        "import signal",
        "from ecd.rpc.cache import attach",
        "attach.DMA_GRACE_S = 1e9",
        "signal.signal(signal.SIGUSR1, lambda *_: setattr(attach, 'DMA_GRACE_S', 0.0))",
    )
    daemon.start()
    with writer(daemon, "attach", "word") as (process, _):
        os.kill(process.pid, signal.SIGKILL)
        found = value_of(lambda: of_process(daemon, process.pid, "waiting_for_dma"))
        assert found["held"]["reserved_bytes"] == RESERVED_BYTES
        assert "a GPU may still copy" in cli(daemon, "clients").stdout
        refused = cli(daemon, "clients", "end", str(found["id"]), "--yes")
        assert refused.returncode == 1
        assert "has ended already" in refused.stderr
        os.kill(daemon.pid, signal.SIGUSR1)
        eventually(lambda: not clients(daemon))
    daemon.check_nothing_leaked()


def test_a_device_may_copy_on_for_a_session_that_was_ended(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon()
    daemon.command = changed("from ecd.rpc.cache import attach", "attach.DMA_GRACE_S = 1e9")
    daemon.start()
    with writer(daemon, "attach", "word") as (process, _):
        end(daemon, value_of(lambda: of_process(daemon, process.pid)))
        daemon.crowd()
        assert daemon.status().pools[0].reserved_bytes == RESERVED_BYTES


def test_an_ended_client_recovers_and_keeps_what_it_reads(daemon: Daemon) -> None:
    put(daemon, "a", "b")
    with holder(daemon.address, "reader") as reader:
        assert reader.ask("get", "a") == digest(DATA)
        first = value_of(lambda: of_process(daemon, reader.pid))
        assert "which held 3 MiB" in end(daemon, first)
        assert "an operator has ended its session" in daemon.text()
        second = value_of(lambda: of_process(daemon, reader.pid))
        assert second["id"] > first["id"]
        left = of_process(daemon, reader.pid, "ended")
        assert (left["id"], left["held"]["leased_bytes"]) == (first["id"], len(DATA))
        daemon.crowd()
        assert reader.ask("again", "a") == digest(DATA)  # the process still reads it
        put(daemon, "b")  # if it was evicted
        eventually(lambda: reader.ask("get", "b") == digest(DATA), "it gets items again")
        assert reader.ask("put", "c", "1000") == "True"
        assert reader.ask("close", "a") == "closed"
        eventually(lambda: of_process(daemon, reader.pid, "ended") is None)
        assert reader.ask("again", "b") == digest(DATA)


def test_the_session_of_a_stopped_process_can_be_ended(daemon: Daemon) -> None:
    with holder(daemon.address, "hung") as hung:
        found = value_of(lambda: of_process(daemon, hung.pid))
        with stopped(hung.pid):
            end(daemon, found)
            assert of_process(daemon, hung.pid) is None
            assert of_process(daemon, hung.pid, "ended")["id"] == found["id"]
            again = cli(daemon, "clients", "end", str(found["id"]), "--yes")
            assert again.returncode == 1
        eventually(lambda: hung.ask("put", "k", "10") in ("True", "False"), "it puts again")


def test_a_call_of_an_ended_session_says_why(daemon: Daemon) -> None:
    with Client(daemon.address) as client, open_channel(daemon.address) as channel:
        token = client._connection.session().token
        [found] = clients(daemon)
        reply = pb_grpc.CacheStub(channel).EndClients(
            pb.EndClientsRequest(ids=[found["id"], found["id"], 1 << 60]), timeout=HANG_S
        )
        assert list(reply.ended) == [True, False, False]
        eventually(lambda: client._connection._cause is not None)
        assert "at an operator's request" in str(client._connection._cause)
        eventually(lambda: client._connection.session(HANG_S).token != token)


def test_nothing_is_ended_by_mistake(daemon: Daemon) -> None:
    with Client(daemon.address) as client:
        session = client._connection.session()
        [found] = clients(daemon)
        for arguments, code, why in (
            (("999999",), 1, "no client has the ID 999999"),
            ((str(found["id"]), "999999"), 1, "no client has the ID 999999"),
            ((str(found["id"]),), 2, f"this would end {found['id']} ("),
            (("x",), 2, ""),
        ):
            answer = cli(daemon, "clients", "end", *arguments, *(["--yes"] if code == 1 else []))
            assert answer.returncode == code, answer
            assert why in answer.stderr
        assert client._connection.current is session


def test_refused_puts_are_in_the_log_once_a_minute(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(ECD_NAMESPACE_QUOTAS="small=8MiB", ECD_LOG_LEVEL="warning").start()

    def refusals() -> list[str]:
        return [line for line in daemon.text().splitlines() if "is refused:" in line]

    def put(client: Client, key: str, mib: int) -> None:
        client.put_bytes(key, bytes(mib * MIB), "uint8", (mib * MIB,))

    with (
        Client(daemon.address, namespace="n") as client,
        Client(daemon.address, namespace="small") as other,
    ):
        for _ in range(3):
            with pytest.raises(EntryTooLarge):
                put(client, "k", 65)
        [line] = refusals()
        assert "a put of 65 MiB in namespace n is refused: the whole pool has 64 MiB" in line
        assert "WARNING" in line
        with pytest.raises(EntryTooLarge):
            put(other, "k", 9)
        put(other, "k", 8)
        with other.get("k"), pytest.raises(PoolFull, match="ecd-cli clients") as of_quota:
            put(other, "l", 5)
        put(client, "k", 36)
        with client.get("k"), pytest.raises(PoolFull, match="ecd-cli clients") as of_pool:
            put(client, "l", 36)
    _, quota, full, pool = refusals()
    assert "the quota of 'small' is 8 MiB: raise ECD_NAMESPACE_QUOTAS" in quota
    assert "the quota of 'small', 8 MiB, is full of what is leased, kept or being written" in full
    assert "36 MiB are leased, kept or being written (`ecd-cli clients` and" in pool
    assert "by `ecd-cli unkeep`, or raise ECD_HOST_POOL_BYTES" in pool
    for line, error in ((full, of_quota), (pool, of_pool)):
        assert line.endswith(str(error.value).partition(": ")[2]), "the same words"
