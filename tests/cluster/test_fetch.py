"""Several daemons behave as one cache."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch

from ecd_client import Client, Hint, PoolFull
from support.daemon import Daemon, eventually

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def fetched(daemon: Daemon) -> int:
    return daemon.peers().fetches["fetched"]


def test_every_entry_arrives_as_it_left_and_is_local_from_then_on(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    a, b = make_peer("256MiB").start(), make_peer("256MiB").start()
    here, there = client_of(a), client_of(b)
    tensors = {
        f"{dtype}-{shape}": (torch.randn(shape) * 4).to(dtype)
        for dtype in DTYPES
        for shape in [(), (0, 3), (7,), (1369, 3584)]
    }
    # Around the sizes at which an entry is hashed in pieces and read in parts.
    for nbytes in (4 << 20, (4 << 20) + 1, (16 << 20) - 1, 16 << 20, (33 << 20) + 5):
        tensors[str(nbytes)] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    for key, tensor in tensors.items():
        here.put(key, tensor, metadata=key.encode(), cost=0.5)
    for key, tensor in tensors.items():
        with there.get(key, 5.0, nodes=[here.node]) as item:
            assert item.shape == tuple(tensor.shape)
            assert item.tensor.dtype == tensor.dtype
            assert torch.equal(raw(item.tensor), raw(tensor)), key
            assert (item.metadata, item.cost_s) == (key.encode(), 0.5)
    assert fetched(b) == len(tensors)
    holds, asks = a.status().counters, b.status().counters
    assert (holds.hits, holds.saved_s, holds.peer_leases) == (0, 0.0, len(tensors))
    assert (asks.hits, asks.saved_s, asks.peer_leases) == (len(tensors), 0.5 * len(tensors), 0)
    a.terminate()
    for key, tensor in tensors.items():
        with there.get(key) as item:
            assert torch.equal(raw(item.tensor), raw(tensor))
    assert fetched(b) == len(tensors), "the second time nobody asked another node"
    b.check_nothing_leaked()


def test_one_fetch_however_many_wait(make_peer: MakePeer, client_of: ClientOf) -> None:
    a, b = make_peer("256MiB").start(), make_peer("256MiB").start()
    here = client_of(a)
    tensor = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8)
    here.put("k", tensor)
    clients = [client_of(b) for _ in range(8)]
    waiting = [
        found
        for client in clients
        for found in client.get_async(["k"] * 8, 5.0, nodes=[[here.node]] * 8)
    ]
    wait(waiting, 10)
    for found in waiting:
        with found.result() as item:
            assert torch.equal(item.tensor, tensor)
    status = b.peers()
    assert status.fetches["fetched"] == 1
    assert status.peers[0].read_bytes == tensor.nbytes
    eventually(lambda: a.status().leases == 0, what="the peer's lease is given back")


def test_a_batch_of_small_entries(make_peer: MakePeer, client_of: ClientOf) -> None:
    a, b = make_peer().start(), make_peer().start()
    here, there = client_of(a), client_of(b)
    for number in range(64):
        here.put(f"k{number}", torch.full((16 << 10,), number, dtype=torch.uint8))
    keys = [f"k{number}" for number in range(64)]
    founds = there.get_async(
        [*keys, "nothing"], 5.0, nodes=[[here.node]] * 65, only_if_written=True
    )
    for number, found in enumerate(founds[:64]):
        with found.result(10) as item:
            assert (item.tensor == number).all()
    assert founds[64].result(10) is None
    for daemon in (a, b):
        daemon.check_nothing_leaked()


# -- how a key is found ----------------------------------------------------------------------------


def test_hints_alone(make_peer: MakePeer, client_of: ClientOf) -> None:
    a, b = make_peer().start(), make_peer().start()
    here, there = client_of(a), client_of(b)
    here.put("k", torch.ones(100))
    started = time.monotonic()
    [found] = there.get_async(["k"], 5.0, only_if_written=True)
    assert found.result(2) is None, "without a hint and a directory it is a miss"
    assert time.monotonic() - started < 2, "not until the deadline"
    assert there.get("k", 0.0, nodes=[here.node]) is None, "who does not wait gets what is here"
    with there.get("k", 5.0, nodes=["127.0.77.1:1", here.node]) as item:
        assert (item.tensor == 1).all(), "a dead hint costs an attempt"


def test_hints_lead_only_where_they_may(make_peer: MakePeer, client_of: ClientOf) -> None:
    """Hints come from whoever sends requests."""
    a = make_peer().start()
    b = make_peer(ECD_HINT_NETWORKS="10.0.0.0/8").start()
    here, there = client_of(a), client_of(b)
    here.put("k", torch.ones(100))
    for hint in (
        *(here.node, there.node, "169.254.169.254:80", "example.org:443", "127.0.0.1", "::1:9465"),
        *("127.0.0.1:99999", "a" * 5000, "127.0.0.1:9465\n", ""),
    ):
        [found] = there.get_async(["k"], 5.0, only_if_written=True, nodes=[[hint]])
        assert found.result(2) is None, hint
    assert len(b.peers().peers) == 0, "nobody was even asked"
    c = make_peer(ECD_HINT_NETWORKS="10.0.0.0/8", ECD_PEERS=here.node, ECD_DIRECTORY="none").start()
    with client_of(c).get("k", 5.0, nodes=[here.node]) as item:
        assert (item.tensor == 1).all(), "a node that the settings name may always be asked"


def test_static_peers_are_asked_at_one_time(make_peer: MakePeer, client_of: ClientOf) -> None:
    holders = [make_peer().start() for _ in range(2)]
    nobody = "127.0.77.1:1"
    peers = ",".join([nobody, *(daemon.peer for daemon in holders)])
    asking = make_peer(ECD_PEERS=peers).start()
    there = client_of(asking)
    for number, daemon in enumerate(holders):
        client_of(daemon).put(f"k{number}", torch.full((1000,), float(number)))
    for number in range(2):
        with there.get(f"k{number}", 5.0) as item:
            assert (item.tensor == number).all()
    started = time.monotonic()
    [found] = there.get_async(["nothing"], 5.0, only_if_written=True)
    assert found.result(3) is None
    assert time.monotonic() - started < 1.5, "a node that is away is not asked again and again"
    assert asking.peers().directory.kind == "static"
    assert asking.peers().speculative_reads_used == 2


def test_an_entry_that_is_being_written_is_waited_for(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    a, b = make_peer().start(), make_peer().start()
    here, there = client_of(a), client_of(b)

    original = torch.Tensor.copy_

    def slow_copy(target: torch.Tensor, source: torch.Tensor, *rest: object) -> torch.Tensor:
        time.sleep(2.5)
        return original(target, source, *rest)

    there.get("nothing", 0.1, nodes=[here.node])  # the link is there
    torch.Tensor.copy_ = slow_copy
    try:
        for key in ("by a call", "in granted memory"):
            column = torch.full((1 << 20, 2), 3.0)[:, 0]  # torch copies that
            stored = here.put_async(key, column)
            if key == "by a call":
                eventually(lambda: a.status().pools[0].reserved_bytes > 0)
            hint = here.hint(key)
            assert (hint.nbytes > 0) == (key == "in granted memory")
            started = time.monotonic()
            with there.get(key, 5.0, nodes=[hint]) as item:
                assert (item.tensor == 3.0).all()
            assert time.monotonic() - started > 0.3, "it was not stored when it was asked for"
            assert stored.result(5)
    finally:
        torch.Tensor.copy_ = original
    status = b.peers()
    assert (status.speculative_reads, status.speculative_reads_used) == (1, 0), (
        "what lay there before"
    )


def test_offers_bring_entries_ahead_of_need(make_peer: MakePeer, client_of: ClientOf) -> None:
    a, b = make_peer().start(), make_peer().start()
    here, there = client_of(a), client_of(b)
    here.put("before", torch.full((1 << 20,), 1.0))
    here.offer(["before", "after"], [there.node])
    here.offer(["never"], ["169.254.0.1:80", "nonsense"])
    eventually(lambda: there.contains(["before"]) == [True], what="what is stored already")
    here.put("after", torch.full((1 << 20,), 2.0))
    eventually(lambda: there.contains(["after"]) == [True], what="what was stored later")
    with there.get("after") as item:
        assert (item.tensor == 2.0).all()
    assert fetched(b) == 2
    assert b.peers().speculative_reads_used == 2


# -- hints that say where an entry lies ------------------------------------------------------------

LARGEST_AHEAD = 8 << 20


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def test_what_a_hint_locates_is_read_before_it_is_leased(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    a, b = make_peer().start(), make_peer().start()
    here, there = client_of(a), client_of(b)
    tensors = {
        str(nbytes): random_bytes(nbytes)
        for nbytes in (1, 4096, 65537, (1 << 20) + 1, LARGEST_AHEAD, LARGEST_AHEAD + 1)
    }
    for key, tensor in tensors.items():
        here.put(key, tensor.view(1, -1), metadata=key.encode(), cost=0.25)
    hints = {key: here.hint(key) for key in tensors}
    for key, tensor in tensors.items():
        assert (hints[key].node, hints[key].nbytes) == (here.node, tensor.nbytes)
        with there.get(key, 5.0, nodes=[hints[key]]) as item:
            assert item.shape == (1, tensor.nbytes), "what it is comes with the lease"
            assert (item.metadata, item.cost_s) == (key.encode(), 0.25)
            assert torch.equal(item.tensor[0], tensor)
    status = b.peers()
    assert (status.speculative_reads, status.speculative_reads_used) == (len(tensors) - 1,) * 2
    assert status.peers[0].reads == len(tensors)
    assert here.hint("nothing") == (here.node, 0, 0, 0)
    for daemon in (a, b):
        daemon.check_nothing_leaked()


def test_hints_that_hold_no_more_cost_a_read(make_peer: MakePeer, client_of: ClientOf) -> None:
    a, b = make_peer().start(), make_peer().start()
    here, there = client_of(a), client_of(b)
    here.put("moved", random_bytes(1 << 20))
    here.put("gone", random_bytes(1 << 20))
    hints = {key: here.hint(key) for key in ("moved", "gone")}
    a.evict_all()
    here.put("in its place", random_bytes(3 << 20))
    moved = random_bytes(1 << 20)
    here.put("moved", moved)
    here.put("other bytes", random_bytes(1 << 20))
    assert here.hint("moved").offset != hints["moved"].offset
    hints["other bytes"] = here.hint("moved")
    hints["another size"] = here.hint("moved")
    here.put("another size", random_bytes(1 << 19))
    for key, hint in hints.items():
        [found] = there.get_async([key], 5.0, only_if_written=True, nodes=[[hint]])
        item = found.result(6)
        if key == "gone":
            assert item is None
            continue
        with item, here.get(key) as original:
            assert torch.equal(item.tensor, original.tensor), key
    with there.get("moved") as item:
        assert torch.equal(item.tensor, moved)
    status = b.peers()
    assert (status.speculative_reads, status.speculative_reads_used) == (4, 0)
    assert status.fetches["corrupt"] == 0, "the node has done nothing wrong"
    for daemon in (a, b):
        daemon.check_nothing_leaked()


def test_hints_that_cannot_be_are_hints_of_a_node(make_peer: MakePeer, client_of: ClientOf) -> None:
    a, b = make_peer().start(), make_peer().start()
    here, there = client_of(a), client_of(b)
    extents = [
        *((64 << 20, 1), ((64 << 20) - 10, 100), (1 << 63, 1), ((1 << 64) - 1, (1 << 64) - 1)),
        *((0, 0), (5, 0), (0, LARGEST_AHEAD + 1), (0, 1 << 60)),
    ]
    extents = [(0, *place) for place in extents] + [(1, 0, 400), (1 << 31, 0, 400)]
    for number, extent in enumerate(extents):
        here.put(f"k{number}", torch.full((100,), float(number)))
        with there.get(f"k{number}", 5.0, nodes=[Hint(here.node, *extent)]) as item:
            assert (item.tensor == number).all()
    assert b.peers().speculative_reads == 0
    hint = here.hint("k0")
    a.evict_all()
    here.put("k", torch.ones(1000))
    [found] = there.get_async(["k"], 5.0, nodes=[[hint._replace(offset=hint.offset + 1)]])
    with found.result(6) as item:  # between two entries
        assert (item.tensor == 1).all()
    for daemon in (a, b):
        daemon.check_nothing_leaked()


def test_hints_grow_old_while_they_are_followed(make_peer: MakePeer, client_of: ClientOf) -> None:
    """The peer's pool is too small for its keys: hinted places hold other keys' bytes."""
    a, b = make_peer("16MiB").start(), make_peer().start()
    here, there = client_of(a), client_of(b)
    draw = random.Random(1)
    tensors = {
        f"k{number}": random_bytes(draw.choice([64 << 10, 200_000, 1 << 20, 3 << 20]))
        for number in range(60)
    }
    told: dict[str, list[Hint]] = {}
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            key = random.choice(list(tensors))
            with contextlib.suppress(PoolFull):  # of what the other node has leased
                here.put(key, tensors[key])
            told[key] = [*told.get(key, [])[-2:], here.hint(key)]

    side = ThreadPoolExecutor(1)
    writing = side.submit(write)
    try:
        eventually(lambda: len(told) > 40)
        right = 0
        until_s = time.monotonic() + 60.0
        while right < 200 and time.monotonic() < until_s:
            keys = draw.sample(sorted(told), 4)
            nodes = [[draw.choice(told[key])] for key in keys]
            founds = there.get_async(keys, 5.0, only_if_written=True, nodes=nodes)
            for key, found in zip(keys, founds, strict=True):
                if (item := found.result(6)) is not None:
                    with item:
                        assert torch.equal(item.tensor, tensors[key]), key
                    right += 1
            b.evict_all()
    finally:
        over.set()
        side.shutdown()
    writing.result()
    status = b.peers()
    assert right >= 200
    assert 0 < status.speculative_reads_used < status.speculative_reads
    assert (status.fetches["corrupt"], status.fetches["fetched"]) == (0, right)
    for daemon in (a, b):
        daemon.check_nothing_leaked()


# -- bounds ----------------------------------------------------------------------------------------


def test_no_room_is_a_miss(make_peer: MakePeer, client_of: ClientOf) -> None:
    a, b = make_peer("64MiB").start(), make_peer("16MiB").start()
    here, there = client_of(a), client_of(b)
    here.put("huge", torch.zeros(32 << 20, dtype=torch.uint8))
    here.put("big", torch.zeros(12 << 20, dtype=torch.uint8))
    there.put("mine", torch.zeros(10 << 20, dtype=torch.uint8))
    with there.get("mine"):
        for key in ("huge", "big"):
            [found] = there.get_async([key], 5.0, only_if_written=True, nodes=[[here.node]])
            assert found.result(3) is None
    assert b.peers().fetches["no room"] == 2
    eventually(lambda: b.status().leases == 0, what="what is in the way being released")
    with there.get("big", 5.0, nodes=[here.node]) as item:
        assert (item.tensor == 0).all()
    for daemon in (a, b):
        daemon.check_nothing_leaked()


def test_a_daemon_without_peers_listens_on_nothing_but_its_metrics(daemon: Daemon) -> None:
    inodes = set()
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            inodes.add(link.readlink().name.removeprefix("socket:[").rstrip("]"))
    listening = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{daemon.pid}/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[9] in inodes
    ]
    assert [fields[1].split(":")[0] for fields in listening] == ["0100007F"], "127.0.0.1, once"
    assert daemon.peers().node == ""


# -- who may --------------------------------------------------------------------------------------


def test_a_node_without_the_token_gets_nothing_and_is_told_why(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    a = make_peer().start()
    client_of(a).put("k", torch.ones(10))
    for settings in (
        {"ECD_PEER_TOKEN": "another secret of a test"},
        {"ECD_PEER_TOKEN": ""},
    ):
        stranger = make_peer(**settings)
        if not settings["ECD_PEER_TOKEN"]:
            del stranger._settings["ECD_PEER_TOKEN"]
        stranger.start()
        there = client_of(stranger)
        [found] = there.get_async(["k"], 5.0, only_if_written=True, nodes=[[a.peer]])
        assert found.result(3) is None
        [peer] = stranger.peers().peers
        assert "ECD_PEER_TOKEN" in peer.last_error or "token" in peer.last_error


def test_a_node_that_does_not_know_the_token_is_not_believed(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    """A hint may lead to anybody; without the token its bytes are not taken, nor ours told."""
    impostor = make_peer()
    del impostor._settings["ECD_PEER_TOKEN"]
    impostor.start()
    client_of(impostor).put("k", torch.zeros(10))
    b = make_peer().start()
    there = client_of(b)
    [found] = there.get_async(["k"], 5.0, only_if_written=True, nodes=[[impostor.peer]])
    assert found.result(3) is None
    [peer] = b.peers().peers
    assert "does not know the cluster's token" in peer.last_error


def test_mutual_tls(make_peer: MakePeer, client_of: ClientOf, tmp_path: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=tmp_path)

    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem"),
        *("-subj", "/CN=test", "-days", "2"),
    )
    peers = []
    for number in range(2):
        peer = make_peer()
        host = peer.peer.partition(":")[0]
        (tmp_path / "san").write_text(f"subjectAltName=IP:{host}")
        openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{number}.key"),
            *("-out", f"{number}.csr", "-subj", f"/CN=node{number}"),
        )
        openssl(
            *("x509", "-req", "-in", f"{number}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-out", f"{number}.pem", "-days", "2", "-extfile", "san"),
        )
        del peer._settings["ECD_PEER_TOKEN"]
        peer._settings |= {
            "ECD_PEER_TLS_CA": str(tmp_path / "ca.pem"),
            "ECD_PEER_TLS_CERT": str(tmp_path / f"{number}.pem"),
            "ECD_PEER_TLS_KEY": str(tmp_path / f"{number}.key"),
        }
        peers.append(peer.start())
    here, there = map(client_of, peers)
    here.put("k", torch.ones(1000))
    with there.get("k", 5.0, nodes=[here.node]) as item:
        assert (item.tensor == 1).all()
    stranger = make_peer().start()
    [found] = client_of(stranger).get_async(
        ["k"], 5.0, only_if_written=True, nodes=[[peers[0].peer]]
    )
    assert found.result(3) is None, "no certificate, no entry"


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ECD_PROTOCOL": "rdma"}, "Mooncake installed tcp"),
        ({"ECD_PROTOCOL": "nonsense"}, "Mooncake installed tcp"),
        ({"ECD_PEER_ADDRESS": "10.99.99.99:9465"}, "not an address of this machine"),
        ({"ECD_PEER_ADDRESS": "10.99.99.99:9465", "ECD_PEER_TOKEN": ""}, "could be anybody"),
        ({"ECD_PEER_ADDRESS": "nonsense"}, "peer_address"),
        ({"ECD_DIRECTORY": "static"}, "needs peers"),
        ({"ECD_DIRECTORY": "http://x"}, "redis+cluster"),
        ({"ECD_PEERS": "here"}, "host:port"),
        ({"ECD_ENGINE_PORTS": "40000-40031"}, "32768-60999"),
        ({"ECD_ENGINE_PORTS": "18200-18200"}, "at least 2"),
        ({"ECD_PEER_TLS_CA": "/nothing"}, "go together"),
        ({"ECD_MOONCAKE": "PATH=/"}, "begin with MC_"),
        (
            {f"ECD_PEER_TLS_{part}": "/nothing" for part in ("CA", "CERT", "KEY")},
            "cannot read /nothing",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(
    make_peer: MakePeer, settings: dict[str, str], said: str
) -> None:
    daemon = make_peer(**settings)
    if settings.get("ECD_PEER_TOKEN") == "":
        del daemon._settings["ECD_PEER_TOKEN"]
    daemon.start(wait=False)
    assert daemon._process is not None
    assert daemon._process.wait(20) in (1, 2)
    assert said in daemon.text()
    assert "Traceback" not in daemon.text()
    assert "a secret of the test" not in daemon.text()


def test_a_setting_without_an_address_is_explained(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(ECD_PEERS="10.0.0.1:9465")
    daemon.start(wait=False)
    assert daemon._process.wait(20) == 2
    assert "peers needs peer_address" in daemon.text()


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    environ = {
        "ECD_PEER_ADDRESS": "127.0.0.1:9465",
        "ECD_PEER_TOKEN": "a secret of the test",
        "ECD_DIRECTORY": "redis://user:another-secret@127.0.0.1:6379/0",
        "PATH": "/usr/bin",
    }
    for options in ((), ("--json",)):
        shown = subprocess.run(
            [sys.executable, "-m", "ecd", "config", *options],
            capture_output=True,
            text=True,
            env=environ,
            check=True,
        ).stdout
        assert "a secret of" not in shown
        assert "another-secret" not in shown
        assert "127.0.0.1:6379" in shown or not options


# -- for operators ---------------------------------------------------------------------------------


def test_ecd_cli_peers(make_peer: MakePeer, client_of: ClientOf, daemon: Daemon) -> None:
    def cli(which: Daemon, *options: str) -> str:
        command = [sys.executable, "-m", "ecd_client.cli.main", "--address", which.address, "peers"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "serves its node alone" in cli(daemon)
    a = make_peer(ECD_ZONE="east").start()
    b = make_peer(ECD_PEERS=f"{a.peer},127.0.77.1:1").start()
    here, there = client_of(a), client_of(b)
    here.put("k", torch.ones(1 << 20))
    with there.get("k", 5.0):
        pass
    shown = cli(b)
    for text in (a.peer, "connected", "east", "tcp", here.incarnation[:12], "4 MiB", "1 fetched"):
        assert text in shown, shown
    assert "127.0.77.1:1" in shown
    assert "unreachable" in shown
    parsed = json.loads(cli(b, "--json"))
    [peer] = [peer for peer in parsed["peers"] if peer["node"] == a.peer]
    assert (peer["reads"], peer["read_bytes"], peer["failed_reads"]) == (1, 4 << 20, 0)
    assert 0 < peer["round_trip_s"] < 1
    metrics = b.metrics()
    assert f'ecd_peer_read_bytes_total{{peer="{a.peer}"}} 4.194304e+06' in metrics
    assert 'ecd_fetches_total{outcome="fetched"} 1.0' in metrics
    assert "ecd_fetch_seconds_count 1.0" in metrics
    assert "ecd_directory_up 1.0" in metrics


def test_two_nodes_with_the_same_keys_on_disk_do_not_wait_for_each_other(
    make_peer: MakePeer, client_of: ClientOf, tmp_path: Path
) -> None:
    """Both are asked for them at once by clients that encode sooner than they are read."""
    nodes = "127.0.71.1:9465", "127.0.71.2:9465"
    daemons = [
        make_peer(
            "32MiB",
            ECD_PEER_ADDRESS=node,
            ECD_PEERS=other,
            ECD_EVICTION="lru",
            ECD_DISK_POOL_BYTES="1GiB",
            ECD_DISK_DIR=str(tmp_path / node),
            ECD_DISK_WRITE_BYTES_PER_S="1GB",
        ).start()
        for node, other in zip(nodes, nodes[::-1], strict=True)
    ]
    clients = [client_of(daemon) for daemon in daemons]
    keys = [f"k{number}" for number in range(60)]
    for key in keys:
        data = random.Random(key).randbytes(1 << 20)
        for client in clients:
            client.put_bytes(key, data, "uint8", (1 << 20,), cost=0.01)
        time.sleep(0.05)
    away = [key for key in keys if not any(client.contains([key])[0] for client in clients)][:20]
    assert away

    def ask(client: Client) -> None:
        asked = client.get_async(away, 30.0, only_if_written=True, makes=[0.0] * len(away))
        for future in asked:
            item = future.result(40.0)
            if item is not None:
                item.close()

    with ThreadPoolExecutor() as threads:
        list(threads.map(ask, clients))
    assert [daemon.peers().fetches["late"] for daemon in daemons] == [0, 0]


def test_an_entry_on_the_disk_of_a_node_is_found_and_fetched(
    make_peer: MakePeer, client_of: ClientOf, tmp_path: Path
) -> None:
    a = make_peer("8MiB", ECD_DISK_POOL_BYTES="1GiB", ECD_DISK_DIR=str(tmp_path / "disk")).start()
    b = make_peer(ECD_PEERS=a.peer).start()
    here, there = client_of(a), client_of(b)
    data = {f"k{number}": random.Random(number).randbytes(1 << 20) for number in range(16)}
    for key, content in data.items():
        here.put_bytes(key, content, "uint8", (1 << 20,), cost=1.0)
        time.sleep(0.1)
    away = [key for key, stored in zip(data, here.contains(list(data)), strict=True) if not stored]
    are_known = lambda: sum(map(bool, there.locate(away).holders)) > 4  # noqa: E731
    eventually(are_known, 10, "the static directory names the node")
    away = [key for key, who in zip(away, there.locate(away).holders, strict=True) if who]
    for key in away:
        with there.get(key, 5.0, nodes=[here.node]) as item:
            assert bytes(item.view) == data[key]
        time.sleep(0.1)  # leases are given back a moment later, and eight fill the pool
    assert fetched(b) == a.status().disk.reads == len(away)
    a.evict_all()
    b.evict_all()
    [future] = there.get_async([away[0]], 5.0, only_if_written=True)
    assert future.result(5.0) is None, "it is erased"


def test_a_ttl_counts_from_the_put_on_whichever_node(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    ttl = {"ECD_NAMESPACE_TTLS": "default=12s"}
    a, b, strict = make_peer(**ttl).start(), make_peer(**ttl), make_peer()
    b.start()
    strict._settings["ECD_NAMESPACE_TTLS"] = "default=1s"
    strict.start()
    without_rules = client_of(make_peer().start())
    here, there, elsewhere = client_of(a), client_of(b), client_of(strict)
    begun_s = time.monotonic()
    here.put("k", torch.ones(1000))
    here.put("never fetched", torch.ones(1000))
    without_rules.put("of a node without rules", torch.ones(1000))
    time.sleep(2.0)
    nodes = [without_rules.node]
    assert elsewhere.get("of a node without rules", 2.0, nodes=nodes) is None, "it tells the age"
    assert elsewhere.get("k", 2.0, nodes=[here.node]) is None, "it is too old for this node"
    assert fetched(strict) == 0
    with there.get("k", 5.0, nodes=[here.node]) as item:
        assert torch.equal(item.tensor, torch.ones(1000))
    [left] = [entry.expires_in_s for entry in b.entries()]
    assert left <= 12.0 - 2.0
    eventually(lambda: not a.entries() and not b.entries(), 30.0, "on both nodes at one time")
    assert time.monotonic() - begun_s >= 12.0
    assert there.get("never fetched", 1.0, nodes=[here.node]) is None
    assert (a.status().counters.evictions["ttl"], b.status().counters.evictions["ttl"]) == (2, 1)
