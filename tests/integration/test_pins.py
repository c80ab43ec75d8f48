"""Reading without a call: pins against eviction, crash, stop and mischief, with real processes."""

import gc
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ecd_client import Client, EcdError
from ecd_client.session.connection import Connection
from ecd_client.session.leases import Lease
from ecd_client.session.session import Session
from ecd_client.shared.index import AskDaemon
from ecd_proto.shm.session_page import DMA_WORD, MAX_PINS
from support.daemon import Daemon
from support.pin_stress import STEPS
from support.processes import child
from support.waiting import HANG_S, eventually

STRESS = Path(__file__).parents[1] / "support/pin_stress.py"
FOUND_BY_DAY = "scan", "recheck"
"""Steps of the daemon and of the client without which wrong bytes are read within seconds."""
NIGHT = pytest.mark.night


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


def stress(gets: int, without: str = "") -> dict:
    command = [sys.executable, STRESS, "--gets", str(gets), "--without", without]
    with child(command, grace=True, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate()
    return json.loads(said)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("gets", [1000, pytest.param(50_000, marks=NIGHT)])
def test_no_reader_sees_a_wrong_byte_however_fast_memory_is_reused(gets: int) -> None:
    found = stress(gets)
    assert found["wrong"] == 0
    assert found["gets"] >= gets
    assert found["evictions"] > 100
    assert found["forks"] > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=() if step in FOUND_BY_DAY else NIGHT) for step in STEPS],
)
def test_without_this_step_a_reader_sees_wrong_bytes(step: str) -> None:
    """The run ends with the first wrong byte."""
    assert stress(50_000, without=step)["wrong"] > 0


def test_a_hit_makes_no_call_and_a_stopped_daemon_does_not_matter(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        client.put("k", torch.arange(1000))
        with daemon.stopped():  # a call would fail
            with client.get("k") as item:
                assert torch.equal(item.tensor, torch.arange(1000))
                assert item.shape == (1000,)
                assert item.dtype == "int64"
            assert client.get("other") is None
            assert client.contains(["k", "other"]) == [True, False]
            futures = client.get_async(["k", "k"])
            assert all(future.done() for future in futures)
            assert [future.result().nbytes for future in futures] == [8000, 8000]


def test_what_is_pinned_outlives_its_eviction_and_no_longer(daemon: Daemon, client: Client) -> None:
    before_s = daemon.status().counters.saved_s
    client.put("k", torch.full((1 << 20,), 3, dtype=torch.uint8), metadata=b"m", cost=1.5)
    client.get("k").close()
    assert daemon.status().counters.saved_s == before_s, "it was handed over"
    item = client.get("k")
    assert (item.metadata, item.cost_s) == (b"m", 1.5)
    assert daemon.status().counters.saved_s - before_s == 1.5
    assert daemon.evict_all().leased == 1
    assert not client.contains(["k"])[0]
    client.put("k", torch.full((1 << 20,), 4, dtype=torch.uint8))
    assert (item.tensor == 3).all()
    assert daemon.status().pools[0].used_bytes == 2 << 20
    item.close()
    eventually(lambda: daemon.status().pools[0].used_bytes == 1 << 20)
    with client.get("k") as item:
        assert (item.tensor == 4).all()


def test_use_keeps_an_entry_warm_and_is_counted(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon("16MiB").start()
    with Client(daemon.address) as client:
        for number in range(12):
            client.put(f"k{number}", torch.zeros(1 << 20, dtype=torch.uint8))
        for _ in range(3):
            client.get("k0").close()
        for number in range(12, 20):
            client.put(f"k{number}", torch.zeros(1 << 20, dtype=torch.uint8))
        assert client.contains(["k0", "k1", "k2"]) == [True, False, False]
        client.get("k1")
        counters = daemon.status().counters
        assert (counters.hits, counters.misses) == (3, 1)
        assert counters.bytes_out == 3 << 20


def test_more_items_than_pins_are_leased_by_calls(daemon: Daemon, client: Client) -> None:
    client.put("k", torch.ones(1))
    items = [client.get("k") for _ in range(MAX_PINS + 3)]
    assert daemon.status().leases == 1 + 3  # a session's pins of one entry are one
    assert all((item.tensor == 1).all() for item in items)
    for item in items:
        item.close()
    eventually(lambda: daemon.status().leases == 0)


def test_what_no_row_can_hold_is_asked_for(client: Client) -> None:
    metadata, long_key = bytes(range(256)) * 16, "h" * 1000
    client.put("k", torch.ones(1), metadata=metadata)
    client.put(long_key, torch.ones(2))
    assert client.contains(["k", long_key, "h" * 999]) == [True, True, False]
    for key, shape in (("k", (1,)), (long_key, (2,))):
        with client.get(key) as item:
            assert item.shape == shape
    with client.get("k") as item:
        assert item.metadata == metadata


def test_who_waits_for_what_no_row_can_hold_pins_it(daemon: Daemon) -> None:
    metadata = bytes(4096)
    with Client(daemon.address) as writer, Client(daemon.address) as reader:
        plain, large = reader.get_async(["plain", "large"], HANG_S)
        writer.put("plain", torch.ones(1))
        writer.put("large", torch.ones(2), metadata=metadata)
        with plain.result(HANG_S) as item:
            assert item.handle().expires_s == float("inf"), "pinned, when the wait was over"
        with large.result(HANG_S) as item:
            assert item.metadata == metadata
            assert item.handle().expires_s == float("inf")
            eventually(lambda: daemon.status().leases == 1, "the lease is over, the pin is seen")
        eventually(lambda: daemon.status().leases == 0)


def test_what_no_row_can_hold_stays_right_for_who_has_pinned_it(
    make_daemon: Callable[..., Daemon],
) -> None:
    """It is evicted, its memory is wanted, and the daemon dies, with no lease that may run out."""
    daemon = make_daemon("4MiB").start()
    with Client(daemon.address) as client, Client(daemon.address) as writer:
        writer.put("h" * 200, torch.ones(1 << 20, dtype=torch.uint8))
        with client.get("h" * 200) as item:
            assert daemon.evict_all().entries == 1
            for number in range(12):
                writer.put(f"{number}", torch.zeros(1 << 20, dtype=torch.uint8))
            assert (item.tensor == 1).all()
            daemon.kill()
            eventually(lambda: not client.connected)
            assert item.handle().expires_s == float("inf")
            assert (item.tensor == 1).all()


def test_a_lease_that_has_run_out_is_no_reason_to_pin(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry may have been evicted, and the pins looked at, before this one was announced."""
    client.put("h" * 200, torch.ones(1))
    session = client._connection.session()
    free, refs = list(session.index._free), session._refs
    with monkeypatch.context() as late:
        late.setattr(Lease, "holds", False)
        item = client.get("h" * 200)
    assert item.handle().expires_s < float("inf")
    item.close()
    assert (session.index._free, session._refs) == (free, refs)


def test_a_client_that_cannot_use_the_index_asks(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecd_client.shared.board.join_barriers", lambda: False)
    with Client(daemon.address) as client:
        client.put("k", torch.ones(10))
        assert client._connection.session().index is None
        with client.get("k") as item:
            assert (item.tensor == 1).all()
        assert client.contains(["k", "other"]) == [True, False]
        assert client.get("other") is None


def test_an_entry_in_a_pool_that_is_not_mapped_is_an_error_with_its_cause(
    daemon: Daemon, client: Client
) -> None:
    client.put("k", torch.ones(10))
    pools = client._connection.session().pools.by_number
    pools[1] = pools.pop(0)
    with pytest.raises(EcdError, match=r"of pool 0, and this client has mapped only \[1\]"):
        client.get("k")
    assert client.get_now("k") == (None, True)
    assert client.contains(["k"]) == [True]
    with pytest.raises(EcdError, match="of pool 0"):
        client.put("larger than the grant", torch.ones(5 << 20))
    eventually(lambda: daemon.status().leases == 0)
    pools[0] = pools.pop(1)
    with client.get("k") as item:
        assert (item.tensor == 1).all()


def test_a_session_that_ended_before_its_lock_is_not_used(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon has given its page to another client by then."""
    daemon = make_daemon().start()
    begins, goes_on = threading.Event(), threading.Event()
    announced: list[Session] = []
    begin, announce = Session.__init__, Connection._announce

    def begin_late(session: Session, *about: object) -> None:
        if not begins.is_set():
            begins.set()
            assert goes_on.wait(HANG_S)
        begin(session, *about)

    def note(connection: Connection, session: Session | None) -> None:
        if session is not None:
            announced.append(session)
        announce(connection, session)

    monkeypatch.setattr(Connection, "_announce", note)
    monkeypatch.setattr(Session, "__init__", begin_late)
    with Client(daemon.address, connect_timeout=0) as late:
        assert begins.wait(HANG_S)
        late._connection._stream.cancel()  # as where the connection breaks
        eventually(lambda: daemon.status().sessions == 0)
        with Client(daemon.address) as other:
            own = other._connection.session()
            says_dma = own.index._page.view(8 * DMA_WORD, 8)
            says_dma[0] = 1
            goes_on.set()
            late.wait_connected(HANG_S)
            assert [session.puts.page_number for session in announced] == [0, 1]
            assert announced[0] is own
            assert says_dma[0] == 1, "the late session has written into this one's page"


def test_threads_share_one_page(daemon: Daemon, client: Client) -> None:
    wrong = []
    before = daemon.status().counters.hits
    for number in range(20):
        client.put(str(number), torch.full((1000,), number))

    def read() -> None:
        for step in range(1500):
            number = step % 20
            with client.get(str(number)) as item:
                if not (item.tensor == number).all():
                    wrong.append(number)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert daemon.status().counters.hits - before == 6000
    index = client._connection.session().index
    assert len(index._free) == MAX_PINS
    with pytest.raises(AskDaemon):
        index.contains("default", [""])


def bytes_of(shown: object) -> bytes:
    shown = shown.numpy() if isinstance(shown, torch.Tensor) else shown
    return memoryview(shown).tobytes()


@pytest.mark.parametrize("by_calls", [False, True])
@pytest.mark.parametrize(
    "kept",
    [
        lambda item: item.view,
        lambda item: item.view[10:20],
        lambda item: item.tensor,
        lambda item: item.tensor[5:9].view(torch.int8),
        lambda item: item.tensor.numpy()[3:],
        lambda item: item.tensor.numpy().view("int8"),
    ],
)
def test_whatever_shows_an_entry_keeps_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, kept: Callable, by_calls: bool
) -> None:
    if by_calls:
        monkeypatch.setattr("ecd_client.shared.board.join_barriers", lambda: False)
    with Client(daemon.address) as client:
        client.put("k", torch.full((1 << 20,), 1, dtype=torch.uint8))
        shown = kept(client.get("k"))
        daemon.evict_all()
        daemon.crowd()
        assert set(bytes_of(shown)) == {1}
        gc.disable()  # the end waits for nothing
        try:
            del shown
            eventually(lambda: daemon.status().leases == 0)
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", ["pin", "lease"])
def test_a_hold_that_is_ended_twice_ends_once(client: Client, kind: str) -> None:
    """As by an item whose maker is interrupted: two items would share the pin's word."""
    client.put_bytes("k", b"1" * 4096, "uint8", (4096,))
    session = client._connection.session()
    if kind == "lease":
        session.index._free.clear()
    free, refs = list(session.index._free), session._refs
    item = client.get("k")
    assert (item._hold.expires_s == math.inf) == (kind == "pin")
    hold = item._hold
    item.close()
    hold.end()
    assert (session.index._free, session._refs) == (free, refs)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "at",
    [
        "ecd_client.shared.index.row_mark",
        "ecd_client.shared.index.IndexReader._note_use",
        "ecd_client.session.session.Pin",
        "ecd_client.acquire.Item",
    ],
)
def test_an_interrupted_get_keeps_no_pin(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    client.put("k", torch.ones(1))
    session = client._connection.session()
    refs = session._refs
    with monkeypatch.context() as patched:
        patched.setattr(at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.get("k")
    assert session._refs == refs
    assert len(session.index._free) == MAX_PINS
    daemon.evict_all()
    assert daemon.status().leases == 0
