"""Several daemons behave as one cache."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ecd.commands import app
from ecd.settings.config import ConfigError
from ecd.settings.config_sources import load
from ecd_client import Client, Hint, PoolFull
from support.daemon import Daemon
from support.pairs import Pair, missed, patient_pair, start_all
from support.processes import run
from support.waiting import HANG_S, eventually

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
POOL_BYTES = 256 << 20
TOKEN = "a secret of the test"
NOBODY = "127.0.77.1:1"


@pytest.fixture(scope="module")
def lasting(make_lasting_peer: MakePeer) -> Pair:
    return patient_pair(make_lasting_peer, f"{POOL_BYTES}", ECD_ZONE="east")


@pytest.fixture
def peers(lasting: Pair, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with lasting.for_test(request.node.name) as pair:
        yield pair


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def counts(daemon: Daemon) -> tuple[float, ...]:
    told = daemon.status().counters
    return told.hits, told.saved_s, told.peer_leases


def test_every_entry_arrives_as_it_left_and_is_local_from_then_on(peers: Pair) -> None:
    here, there = peers.here, peers.there
    tensors = {
        f"{dtype}-{shape}": (torch.randn(shape) * 4).to(dtype)
        for dtype in DTYPES
        for shape in [(), (0, 3), (7,), (1369, 3584)]
    }
    # Around the sizes at which an entry is hashed in pieces and read in parts.
    for nbytes in (4 << 20, (4 << 20) + 1, (16 << 20) - 1, 16 << 20, (33 << 20) + 5):
        tensors[str(nbytes)] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    before = [counts(daemon) for daemon in (peers.a, peers.b)]
    for key, tensor in tensors.items():
        here.put(key, tensor, metadata=key.encode(), cost=0.5)
    for key, tensor in tensors.items():
        with there.get(key, HANG_S, nodes=[here.node]) as item:
            assert item.shape == tuple(tensor.shape)
            assert item.tensor.dtype == tensor.dtype
            assert torch.equal(raw(item.tensor), raw(tensor)), key
            assert (item.metadata, item.cost_s) == (key.encode(), 0.5)
    assert peers.counted["fetched"] == len(tensors)
    holds, asks = (
        [now - then for now, then in zip(counts(daemon), were, strict=True)]
        for daemon, were in zip((peers.a, peers.b), before, strict=True)
    )
    assert holds == [0, 0.0, len(tensors)]
    assert asks == [len(tensors), 0.0, 0], "they were handed over"
    peers.a.evict_all()
    for key, tensor in tensors.items():
        with there.get(key) as item:
            assert torch.equal(raw(item.tensor), raw(tensor))
    saved_s = counts(peers.b)[1] - before[1][1]
    assert saved_s == pytest.approx(0.5 * len(tensors))
    assert peers.counted["fetched"] == len(tensors), "the second time nobody asked another node"


def test_one_fetch_however_many_wait(peers: Pair) -> None:
    tensor = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8)
    peers.here.put("k", tensor)
    clients = [peers.client_of(peers.b) for _ in range(8)]
    waiting = [
        found
        for client in clients
        for found in client.get_async(["k"] * 8, HANG_S, nodes=[[peers.a.peer]] * 8)
    ]
    for found in waiting:
        with found.result(HANG_S) as item:
            assert torch.equal(item.tensor, tensor)
    assert peers.counted["fetched"] == 1
    assert peers.counted["read_bytes"] == tensor.nbytes
    eventually(lambda: peers.a.status().leases == 0, what="the peer's lease is given back")


def test_a_batch_of_small_entries(peers: Pair) -> None:
    keys = [f"k{number}" for number in range(64)]
    for number, key in enumerate(keys):
        peers.here.put(key, torch.full((16 << 10,), number, dtype=torch.uint8))
    about = {"only_if_written": True, "nodes": [[peers.a.peer]] * 65}
    *founds, nothing = peers.there.get_async([*keys, "nothing"], HANG_S, **about)
    for number, found in enumerate(founds):
        with found.result(HANG_S) as item:
            assert (item.tensor == number).all()
    assert nothing.result(HANG_S) is None


# -- how a key is found ----------------------------------------------------------------------------


def test_hints_alone(peers: Pair) -> None:
    here, there = peers.here, peers.there
    here.put("k", torch.ones(100))
    assert missed(there, "k"), "without a hint and a directory"
    assert there.get("k", 0.0, nodes=[here.node]) is None, "who does not wait gets what is here"
    with there.get("k", HANG_S, nodes=[NOBODY, here.node]) as item:
        assert (item.tensor == 1).all(), "a dead hint costs an attempt"


def test_an_entry_that_is_being_written_is_waited_for(
    peers: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, copy = peers.here, peers.there, torch.Tensor.copy_
    for key in ("by a call", "in granted memory"):
        go_on = threading.Event()

        def copy_later(target: torch.Tensor, *rest: object, go_on=go_on) -> torch.Tensor:
            assert go_on.wait(HANG_S)
            return copy(target, *rest)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
        column = torch.full((1 << 20, 2), 3.0)[:, 0]  # torch copies that
        stored = here.put_async(key, column)
        if key == "by a call":
            eventually(lambda: peers.a.status().pools[0].reserved_bytes > 0)
        hint = here.hint(key)
        assert (hint.nbytes > 0) == (key == "in granted memory")
        [found] = there.get_async([key], HANG_S, nodes=[[hint]])
        eventually(lambda: peers.a.status().waits == 1, "the other node waits for the writer")
        eventually(lambda: peers.in_flight == 0, "what it reads meanwhile has come")
        go_on.set()
        with found.result(HANG_S) as item:
            assert (item.tensor == 3.0).all()
        assert stored.result(HANG_S)
    counted = peers.counted
    assert (counted["speculative"], counted["speculative used"]) == (1, 0), "what lay there before"


# -- hints that say where an entry lies ------------------------------------------------------------

LARGEST_AHEAD = 8 << 20


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def test_what_a_hint_locates_is_read_before_it_is_leased(peers: Pair) -> None:
    here, there = peers.here, peers.there
    tensors = {
        str(nbytes): random_bytes(nbytes)
        for nbytes in (1, 4096, 65537, (1 << 20) + 1, LARGEST_AHEAD, LARGEST_AHEAD + 1)
    }
    for key, tensor in tensors.items():
        here.put(key, tensor.view(1, -1), metadata=key.encode(), cost=0.25)
    hints = {key: here.hint(key) for key in tensors}
    for key, tensor in tensors.items():
        assert (hints[key].node, hints[key].nbytes) == (here.node, tensor.nbytes)
        with there.get(key, HANG_S, nodes=[hints[key]]) as item:
            assert item.shape == (1, tensor.nbytes), "what it is comes with the lease"
            assert (item.metadata, item.cost_s) == (key.encode(), 0.25)
            assert torch.equal(item.tensor[0], tensor)
    counted = peers.counted
    assert (counted["speculative"], counted["speculative used"]) == (len(tensors) - 1,) * 2
    assert counted["reads"] == len(tensors)
    assert here.hint("nothing") == (here.node, 0, 0, 0)


def test_hints_that_hold_no_more_cost_a_read(peers: Pair) -> None:
    here, there = peers.here, peers.there
    here.put("moved", random_bytes(1 << 20))
    here.put("gone", random_bytes(1 << 20))
    hints = {key: here.hint(key) for key in ("moved", "gone")}
    peers.a.evict_all()
    here.put("in its place", random_bytes(3 << 20))
    moved = random_bytes(1 << 20)
    here.put("moved", moved)
    here.put("other bytes", random_bytes(1 << 20))
    assert here.hint("moved").offset != hints["moved"].offset
    hints["other bytes"] = here.hint("moved")
    hints["another size"] = here.hint("moved")
    here.put("another size", random_bytes(1 << 19))
    for key, hint in hints.items():
        if key == "gone":
            assert missed(there, key, [hint])
            continue
        with there.get(key, HANG_S, nodes=[hint]) as item, here.get(key) as original:
            assert torch.equal(item.tensor, original.tensor), key
    with there.get("moved") as item:
        assert torch.equal(item.tensor, moved)
    counted = peers.counted
    assert (counted["speculative"], counted["speculative used"]) == (4, 0)
    assert counted["corrupt"] == 0, "the node has done nothing wrong"


def test_hints_that_cannot_be_are_hints_of_a_node(peers: Pair) -> None:
    here, there = peers.here, peers.there
    extents = [
        *((POOL_BYTES, 1), (POOL_BYTES - 10, 100), (1 << 63, 1), ((1 << 64) - 1, (1 << 64) - 1)),
        *((0, 0), (5, 0), (0, LARGEST_AHEAD + 1), (0, 1 << 60)),
    ]
    extents = [(0, *place) for place in extents] + [(1, 0, 400), (1 << 31, 0, 400)]
    for number, extent in enumerate(extents):
        here.put(f"k{number}", torch.full((100,), float(number)))
        with there.get(f"k{number}", HANG_S, nodes=[Hint(here.node, *extent)]) as item:
            assert (item.tensor == number).all()
    assert peers.counted["speculative"] == 0
    hint = here.hint("k0")
    peers.a.evict_all()
    here.put("k", torch.ones(1000))
    between_two = hint._replace(offset=hint.offset + 1)
    with there.get("k", HANG_S, nodes=[between_two]) as item:
        assert (item.tensor == 1).all()


def test_hints_grow_old_while_they_are_followed(peers: Pair, make_peer: MakePeer) -> None:
    """The peer's pool is too small for its keys: hinted places hold other keys' bytes."""
    a, b = make_peer("16MiB").start(), peers.b
    here, there = peers.client_of(a), peers.there
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
    right = 0

    def are_right() -> bool:
        nonlocal right
        keys = draw.sample(sorted(told), 4)
        nodes = [[draw.choice(told[key])] for key in keys]
        founds = there.get_async(keys, HANG_S, only_if_written=True, nodes=nodes)
        for key, found in zip(keys, founds, strict=True):
            if (item := found.result(HANG_S)) is not None:
                with item:
                    assert torch.equal(item.tensor, tensors[key]), key
                right += 1
        b.evict_all()
        return right >= 100

    try:
        eventually(lambda: len(told) > 40)
        eventually(are_right, "100 entries have come")
    finally:
        over.set()
        side.shutdown()
    writing.result(HANG_S)
    counted = peers.counted
    assert 0 < counted["speculative used"] < counted["speculative"]
    assert (counted["corrupt"], counted["fetched"]) == (0, right)
    a.check_nothing_leaked()


# -- bounds ----------------------------------------------------------------------------------------


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
    peers: Pair, make_peer: MakePeer
) -> None:
    peers.here.put("k", torch.ones(10))
    another = "another secret of a test"
    strangers = [make_peer(ECD_PEER_TOKEN=another, ECD_PEERS=peers.a.peer), make_peer()]
    del strangers[1]._settings["ECD_PEER_TOKEN"]
    start_all(*strangers)
    for stranger in strangers:
        assert missed(peers.client_of(stranger), "k", [peers.a.peer])
        [peer] = stranger.peers().peers
        assert "ECD_PEER_TOKEN" in peer.last_error or "token" in peer.last_error
    told = f"WARNING ecd.cluster.peers.peers: peer {peers.a.peer}: no proof of the cluster's token"
    assert told in strangers[0].text()
    assert "is refused: no proof of the cluster's token" in peers.a.text()


def test_a_node_that_does_not_know_the_token_is_not_believed(
    peers: Pair, make_peer: MakePeer
) -> None:
    """A hint may lead to anybody; without the token its bytes are not taken, nor ours told."""
    impostor = make_peer()
    del impostor._settings["ECD_PEER_TOKEN"]
    peers.client_of(impostor.start()).put("k", torch.zeros(10))
    assert missed(peers.there, "k", [impostor.peer])
    [peer] = [peer for peer in peers.b.peers().peers if peer.node == impostor.peer]
    assert "does not know the cluster's token: set one ECD_PEER_TOKEN" in peer.last_error


def test_mutual_tls(peers: Pair, make_peer: MakePeer, tmp_path: Path) -> None:
    def openssl(*arguments: str) -> None:
        run(["openssl", *arguments], check=True, capture_output=True, cwd=tmp_path)

    new_key = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"
    openssl(
        *("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem"),
        *("-subj", "/CN=test", "-days", "2"),
    )
    secure = []
    for number in range(2):
        peer = make_peer()
        host = peer.peer.partition(":")[0]
        (tmp_path / "san").write_text(f"subjectAltName=IP:{host}")
        openssl(
            *("req", *new_key, "-keyout", f"{number}.key"),
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
        secure.append(peer)
    mixed = make_peer()
    mixed._settings |= secure[0]._settings | {"ECD_PEER_TLS_KEY": str(tmp_path / "1.key")}
    mixed.start(wait=False)
    assert mixed._process is not None
    assert mixed._process.wait(HANG_S) == 1
    assert "must be a certificate and its private key" in mixed.text()
    start_all(*secure)
    here, there = map(peers.client_of, secure)
    here.put("k", torch.ones(1000))
    with there.get("k", HANG_S, nodes=[here.node]) as item:
        assert (item.tensor == 1).all()
    assert missed(peers.there, "k", [here.node]), "no certificate, no entry"


# -- settings -------------------------------------------------------------------------------------


def test_settings_that_this_machine_cannot_have_are_named(make_peer: MakePeer) -> None:
    """The daemon ends, with a line that says which one."""
    missing = {f"ECD_PEER_TLS_{part}": "/nothing" for part in ("CA", "CERT", "KEY")}
    said = {
        make_peer(ECD_PROTOCOL="rdma"): "Mooncake installed tcp",
        make_peer(ECD_PROTOCOL="nonsense"): "Mooncake installed tcp",
        make_peer(ECD_PEER_ADDRESS="10.99.99.99:9465"): "not an address of this machine",
        make_peer(**missing): "cannot read /nothing",
        make_peer(**dict.fromkeys(missing, __file__)): f"{__file__} has no certificate in PEM",
        make_peer(ECD_PEER_ADDRESS="nonsense"): "peer_address",
        make_peer(ECD_PEER_ADDRESS="0.0.0.0:9465"): "the address by which other nodes reach",
    }
    for daemon in said:
        daemon.start(wait=False)
    for daemon, what in said.items():
        assert daemon._process is not None
        assert daemon._process.wait(HANG_S) in (1, 2)
        assert what in daemon.text()
        assert "Traceback" not in daemon.text()
        assert TOKEN not in daemon.text()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peer_address": "10.99.99.99:9465", "peer_token": None}, "could be anybody"),
        ({"peer_address": None, "peers": "10.0.0.1:9465"}, "peers needs peer_address"),
        ({"directory": "static"}, "needs peers"),
        ({"directory": "http://x"}, "redis+cluster"),
        ({"peers": "here"}, "host:port"),
        ({"engine_ports": "40000-40031"}, "32768-60999"),
        ({"engine_ports": "18200-18200"}, "at least 2"),
        ({"peer_tls_ca": "/nothing"}, "go together"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, str | None], said: str) -> None:
    whole = {"peer_address": "127.0.77.1:9465", "peer_token": TOKEN, **settings}
    with pytest.raises(ConfigError) as refused:
        load({name: value for name, value in whole.items() if value is not None}, None)
    assert said in str(refused.value)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_secrets_are_not_printed(options: tuple[str, ...]) -> None:
    environ = {
        "ECD_PEER_ADDRESS": "127.0.0.1:9465",
        "ECD_PEER_TOKEN": TOKEN,
        "ECD_DIRECTORY": "redis://user:another-secret@127.0.0.1:6379/0",
    }
    shown = CliRunner(env=environ).invoke(app, ["config", *options])
    assert shown.exit_code == 0, shown.output
    assert "a secret of" not in shown.output
    assert "another-secret" not in shown.output
    assert "127.0.0.1:6379" in shown.output or not options


# -- for operators ---------------------------------------------------------------------------------


def test_ecd_cli_peers(peers: Pair, make_daemon: MakePeer, make_peer: MakePeer) -> None:
    def cli(which: Daemon, *options: str) -> str:
        command = [sys.executable, "-m", "ecd_client.cli.main", "--address", which.address, "peers"]
        done = run([*command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    a, here = peers.a, peers.here
    alone, b = make_daemon(), make_peer(ECD_PEERS=f"{a.peer},{NOBODY}")
    start_all(alone, b)
    assert "serves its node alone" in cli(alone)
    here.put("k", torch.ones(1 << 20))
    peers.client_of(b).get("k", HANG_S).close()
    state = lambda node: [peer.state for peer in b.peers().peers if peer.node == node]  # noqa: E731
    eventually(lambda: state(NOBODY) == ["unreachable"])
    shown = cli(b)
    for text in (a.peer, "connected", "east", "tcp", here.incarnation[:12], "4 MiB", "1 fetched"):
        assert text in shown, shown
    assert NOBODY in shown
    assert "unreachable" in shown
    parsed = json.loads(cli(b, "--json"))
    [peer] = [peer for peer in parsed["peers"] if peer["node"] == a.peer]
    assert (peer["reads"], peer["read_bytes"], peer["failed_reads"]) == (1, 4 << 20, 0)
    assert peer["round_trip_s"] > 0
    metrics = b.metrics()
    assert f'ecd_peer_read_bytes_total{{peer="{a.peer}"}} 4.194304e+06' in metrics
    assert 'ecd_fetches_total{outcome="fetched"} 1.0' in metrics
    assert "ecd_fetch_seconds_count 1.0" in metrics
    assert "ecd_directory_up 1.0" in metrics
