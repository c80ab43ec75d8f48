"""`ecd-cli` as its users run it: its output, its exit code; on terminals as a process."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ecd.__main__ import OF_ECD_CLI
from ecd_client import Client
from ecd_client.cli import bench, render
from ecd_client.cli.bench import WrongBytes
from ecd_client.cli.context import out
from ecd_client.cli.main import app
from ecd_client.cli.top import Top
from ecd_client.errors import EntryTooLarge, PoolFull
from ecd_client.session.channel import open_channel
from ecd_proto.shm.files import IN_MEMORY, filesystem
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.cli import PROGRAM, as_json, cli
from support.daemon import Daemon, memory_of
from support.processes import child, run
from support.waiting import HANG_S, eventually

HEAD = ["namespace", "mm_hash", "pool", "dtype", "shape", "size", "leases"]


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


@pytest.fixture
def own_daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon().start()


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, running: subprocess.Popen[bytes], ours: int) -> None:
        self.running, self._ours = running, ours

    def write(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, text: bytes, times: int = 1) -> bytes:
        """What it has shown, once that is among it so many times."""
        seen = b""
        while seen.count(text) < times:
            seen += os.read(self._ours, 65536)
        return seen

    def rest(self) -> bytes:
        """What it shows until it ends well."""
        seen = b""
        with suppress(OSError):  # that nobody holds the other end any more
            while some := os.read(self._ours, 65536):
                seen += some
        assert self.running.wait(HANG_S) == 0
        return seen


@contextmanager
def on_a_terminal(
    daemon: Daemon, *arguments: str, columns: int = 120, **about: object
) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    command = [*PROGRAM, "--address", daemon.address, *arguments]
    about["env"] = os.environ | {"COLUMNS": str(columns)}
    try:
        with child(command, **ends, **about) as running:
            os.close(theirs)
            yield Terminal(running, ours)
    finally:
        os.close(ours)


def shown(daemon: Daemon, *arguments: str, columns: int = 120) -> str:
    with on_a_terminal(daemon, *arguments, columns=columns) as terminal:
        return terminal.rest().decode()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float32]
)
def test_a_tensor_goes_in_and_comes_out_as_it_was(
    daemon: Daemon, tmp_path: Path, dtype: torch.dtype
) -> None:
    tensor = (torch.randn(7, 5) * 3).to(dtype)
    save_file({"x": tensor}, tmp_path / "in.safetensors")
    done = cli(daemon, "put", "k", str(tmp_path / "in.safetensors"))
    assert (done.returncode, done.stdout) == (0, "stored\n")
    assert as_json(daemon, "put", "k", str(tmp_path / "in.safetensors"))["stored"] is False
    again = cli(daemon, "put", "k", str(tmp_path / "in.safetensors"))
    assert (again.returncode, "not replaced" in again.stdout) == (0, True)
    done = cli(daemon, "get", "k", "-o", str(tmp_path / "out.safetensors"))
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out.safetensors")["embedding"]
    assert found.dtype == dtype
    assert torch.equal(found.float(), tensor.float())


def test_get_prints_to_a_pipe(daemon: Daemon, tmp_path: Path) -> None:
    with Client(daemon.address, namespace="n") as client:
        client.put("k", torch.ones(3), metadata=b"grid")
    file = tmp_path / "k"
    assert cli(daemon, "get", "k", "-o", str(file)).returncode == 0
    command = [*PROGRAM, "--address", daemon.address, "get", "k", "-o", "-"]
    done = run(command, capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, file.read_bytes())
    assert not (tmp_path / "-").exists()
    refused = cli(daemon, "get", "k", "-o", "-", "--json")
    assert (refused.returncode, "leave one out" in refused.stderr) == (2, True)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_get_prints_nothing_beside_the_bytes(daemon: Daemon, tmp_path: Path, name: str) -> None:
    with Client(daemon.address, namespace="n") as client:
        client.put("k", torch.ones(3))
    assert cli(daemon, "get", "k", "-o", str(tmp_path / "k")).returncode == 0
    done = run([*PROGRAM, "--address", daemon.address, "get", "k", "-o", name], capture_output=True)
    assert (done.returncode, done.stdout) == (0, (tmp_path / "k").read_bytes())
    refused = cli(daemon, "get", "k", "-o", name, "--json")
    assert (refused.returncode, f"-o {name} would both print" in refused.stderr) == (2, True)


CLOSED, FULL = ">&-", ">/dev/full"


@pytest.mark.parametrize(("to", "why"), [(CLOSED, "Bad file"), (FULL, "No space left on device")])
@pytest.mark.parametrize("command", ["get k -o -", "ls", "status --json", "version"])
def test_a_command_that_cannot_print_says_so(
    daemon: Daemon, command: str, to: str, why: str
) -> None:
    with Client(daemon.address, namespace="n") as client:
        client.put("k", torch.ones(100_000))
    line = f"{shlex.join(PROGRAM)} --address {daemon.address} {command} {to}"
    done = run(["sh", "-c", line], capture_output=True, text=True)
    text = json.loads(done.stderr)["error"] if "--json" in command else done.stderr
    assert done.returncode == 1
    assert text.removeprefix("ecd-cli: ").startswith(f"standard output cannot be written: {why}")
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(("to", "why"), [(CLOSED, "Bad file"), (FULL, "No space left on device")])
def test_ecd_too_says_that_it_cannot_print(to: str, why: str) -> None:
    line = f"{shlex.join([sys.executable, '-m', 'ecd', 'config'])} {to}"
    done = run(["sh", "-c", line], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"ecd: standard output cannot be written: {why}")


def test_a_daemon_serves_without_standard_output_and_error(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon()
    daemon.command = ("sh", "-c", f"exec {sys.executable} -m ecd serve >&- 2>&-")
    assert as_json(daemon.start(), "status")["state"] == "serving"


def test_metadata_and_cost_travel_with_the_file(daemon: Daemon, tmp_path: Path) -> None:
    with Client(daemon.address, namespace="n") as client:
        client.put("k", torch.ones(3), metadata=b"\x00grid\xff", cost=0.25)
    file = tmp_path / "k.safetensors"
    assert as_json(daemon, "get", "k", "-o", str(file))["namespace"] == "n"
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["ecd.mm_hash"] == "k"
    cli(daemon, "put", "again", str(file))
    with Client(daemon.address) as client, client.get("again") as item:
        assert (item.metadata, item.cost_s) == (b"\x00grid\xff", 0.25)


def test_namespaces_are_summed_up_and_one_can_be_dropped(daemon: Daemon, client: Client) -> None:
    for number in range(3):
        client.put(f"old-{number}", torch.zeros(10 + number), namespace="model|version-1")
    client.put("new", torch.zeros(100), namespace="model|version-2")

    def rows() -> dict[str, dict]:
        return {row["namespace"]: row for row in as_json(daemon, "namespaces")}

    found = rows()
    stored = {name: row for name, row in found.items() if row["entries"]}
    assert {name: (row["entries"], row["nbytes"]) for name, row in stored.items()} == {
        "model|version-1": (3, 4 * 33),
        "model|version-2": (1, 400),
    }
    assert found["model|version-1"]["misses"] is None, "nothing was looked up"
    client.get("new", namespace="model|version-2").close()
    assert client.get("none", namespace="model|version-2", timeout=0.001) is None
    counted = rows()["model|version-2"]
    assert (counted["handed_over"], counted["reused"], counted["misses"]) == (1, 0, 1)
    assert "version-1" in cli(daemon, "namespaces").stdout
    cli(daemon, "evict", "--namespace", "model|version-1", "--yes")
    gone = rows()["model|version-1"]
    assert (gone["entries"], gone["newest_s"], gone["evictions"]) == (0, None, 3)


def test_names_that_look_like_markup_are_shown_as_they_are(daemon: Daemon, client: Client) -> None:
    client.put_bytes("[red]k", b"x", "uint8", (1,), namespace="[/x]")
    for command in (["ls"], ["namespaces"], ["top", "--once"]):
        done = cli(daemon, *command)
        assert done.returncode == 0, done.stderr
        assert "[/x]" in done.stdout
        assert command == ["namespaces"] or "[red]k" in done.stdout
    client.put_bytes("\x1b]0;k\n", b"x", "uint8", (1,), namespace="\x9b2J")
    for command in (["ls"], ["namespaces"], ["top", "--once"], ["evict", "--all", "--dry-run"]):
        done = cli(daemon, *command)
        assert all(c.isprintable() or c == "\n" for c in done.stdout + done.stderr), command
        assert command[0] == "evict" or "\\x9b2J" in done.stdout
    [found] = (line for line in cli(daemon, "ls").stdout.splitlines() if "\\x9b2J" in line)
    assert "\\x1b]0;k\\n" in found


def test_what_daemons_say_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    node, zone, error = "[red]10.0.0.2:9465", "[/zone]", "[/] :cat: [b]broke"
    peer = pb.PeerStatus(node=node, state="unreachable", zone=zone, last_error=error)
    directory = pb.DirectoryStatus(kind="redis", last_error="[/x] refused")
    peers = pb.PeersReply(node="[u]here", directory=directory, peers=[peer])
    status = pb.StatusReply(name="[i]ecd", node="[/n]")
    render.peers(out, peers)
    render.status(out, status, "unix:///[/a]")
    said = capsys.readouterr().out
    names = node, zone, error, "[/x] refused", "[u]here", "[i]ecd", "[/n]", "[/a]"
    assert all(name in said for name in names), said
    replies = {"Peers": peers, "Status": status}
    out.print(Top(lambda method, _: replies[method], lambda: iter(()), rows=1).frame())
    said = capsys.readouterr().out
    assert all(name in said for name in (node, zone, error, "[i]ecd")), said


def test_ls_and_status_say_the_same_to_people_and_programs(daemon: Daemon) -> None:
    before = daemon.status().counters.puts
    with Client(daemon.address, namespace="n") as client:
        for index in range(5):
            client.put(f"key-{index}", torch.zeros(3, 4))
    found = as_json(daemon, "ls")["entries"]
    assert [entry["key"]["mm_hash"] for entry in found] == [f"key-{i}" for i in range(5)]
    assert found[0]["content"]["shape"] == [3, 4]
    assert as_json(daemon, "ls", "--namespace", "other")["entries"] == []
    head, *rows = cli(daemon, "ls", "--limit", "2").stdout.splitlines()
    assert head.split() == [*HEAD, "hits", "age", "idle"]
    assert [row.split()[:5] for row in rows] == [
        ["n", f"key-{index}", "host", "float32", "3x4"] for index in range(2)
    ]
    status = as_json(daemon, "status")
    assert (status["schema"], status["address"]) == ("ecd.status/1", daemon.address)
    assert (status["state"], status["entries"]) == ("serving", 5)
    assert status["counters"]["puts"] == before + 5
    text = cli(daemon, "status").stdout
    assert "serving" in text
    assert daemon.address in text


def test_ls_finds_and_sorts_and_keeps_keys_whole_in_a_pipe(daemon: Daemon) -> None:
    long, other = "a" * 900, "b" * 64
    done = cli(daemon, "ls")
    assert (done.stdout, done.stderr) == ("", "No entries.\n")
    with Client(daemon.address, namespace="/models/" + "n" * 900) as client:
        for key, nbytes in ((long, 1), (other, 4 << 20), ("c", 1536)):
            client.put_bytes(key, bytes(nbytes), "uint8", (nbytes,))
        daemon.status()  # all are listed: a read before that counts for no entry
        client.get("c").close()
    rows = cli(daemon, "ls").stdout.splitlines()[1:]
    assert [row.split()[1] for row in rows] == [long, other, "c"]
    assert [row.split()[5:7] for row in rows] == [["1", "bytes"], ["4", "MiB"], ["1.5", "KiB"]]
    for sort, limit, keys in (("size", "2", [other, "c"]), ("hits", "1", ["c"])):
        found = as_json(daemon, "ls", "--sort", sort, "--limit", limit)["entries"]
        assert [entry["key"]["mm_hash"] for entry in found] == keys
    [found] = as_json(daemon, "ls", "--prefix", "bb", "--sort", "idle")["entries"]
    assert found["key"]["mm_hash"] == other
    listed = shown(daemon, "ls")
    assert f"{other[:9]}..{other[-9:]}" in listed
    assert other not in listed
    assert other in shown(daemon, "ls", "--wide")
    narrow = shown(daemon, "ls", columns=80)
    assert f"{other[:9]}..{other[-9:]}" in narrow
    assert "4 MiB" in narrow
    assert "\u2026" not in narrow, "what has no room is left out, not cut"


def test_evict_takes_several_keys(daemon: Daemon) -> None:
    with Client(daemon.address, namespace="n") as client:
        for key in "abcde":
            client.put(key, torch.ones(256, dtype=torch.int8))
        assert cli(daemon, "evict", "a", "b", "b", "--dry-run").stdout == (
            "Would evict 2 entries, 512 bytes.\n"
        )
        assert as_json(daemon, "evict", "a", "b", "--unused-for", "0s")["nbytes"] == 512
        done = cli(daemon, "evict", "c", "gone", "a", "--json")
        assert (done.returncode, json.loads(done.stdout)["entries"]) == (1, 1)
        gone = "no entry 'gone' in any namespace\nno entry 'a' in any namespace"
        assert json.loads(done.stderr)["error"] == gone, "the others are evicted all the same"
        late = cli(daemon, "evict", "d", "e", "--older-than", "1h")
        assert late.returncode == 1
        assert late.stderr.count("meets the conditions") == 2
        assert client.contains([*"abcde"]) == [False, False, False, True, True]


def test_evict_says_what_goes_and_asks_before_more_than_one(daemon: Daemon) -> None:
    with Client(daemon.address, namespace="n") as client:
        for index in range(5):
            client.put(f"key-{index}", torch.zeros(1024))
        client.put("key-0", torch.zeros(1024), namespace="m")

        done = cli(daemon, "evict", "key-0")
        assert done.returncode == 2
        assert "--namespace 'm'" in done.stderr
        assert "--namespace 'n'" in done.stderr
        assert as_json(daemon, "evict", "key-0", "--namespace", "m")["entries"] == 1
        assert cli(daemon, "evict", "key-0", "--namespace", "m").returncode == 1
        assert as_json(daemon, "evict", "--namespace", "n", "--dry-run")["entries"] == 5
        assert client.contains(["key-0"]) == [True]

        assert "takes no condition" in cli(daemon, "evict", "--all", "--namespace", "n").stderr
        for arguments in (["--all"], ["--namespace", "n"], ["--unused-for", "0s"]):
            done = cli(daemon, "evict", *arguments)
            assert done.returncode == 2
            assert "5 entries" in done.stderr
            assert "--yes" in done.stderr
        assert as_json(daemon, "evict", "--older-than", "1h", "--yes")["entries"] == 0
        item = client.get("key-1")
        reply = as_json(daemon, "evict", "--all", "--yes")
        assert (reply["entries"], reply["leased"]) == (5, 1)
        assert torch.equal(item.tensor, torch.zeros(1024)), "a leased entry goes when released"
        assert as_json(daemon, "ls")["entries"] == [], "it is in no list, but `clients`"
        assert "4 KiB leased" in cli(daemon, "status").stdout
        item.close()
    assert as_json(daemon, "ls")["entries"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["evict"], 2, "say which"),
        (["evict", "k", "l", "--all"], 2, "takes no condition"),
        (["evict", "k", "--all"], 2, "takes no condition"),
        (["evict", "--unused-for", "soon", "--yes"], 2, "--unused-for must be a duration, such as"),
        (["evict", "--older-than", "5", "--yes"], 2, "--older-than needs a unit, such as 5s, 5m"),
        (["top", "--interval", "0.1"], 2, "--interval must be at least 200ms, got '0.1'"),
        (["top", "--interval", "10ms"], 2, "--interval must be at least 200ms, got '10ms'"),
        (["get", "k", "-o", "/dev/null"], 1, "ecd-cli: no entry 'k'"),
        (["put", "k", "/nowhere"], 2, "does not exist"),
        (["--address", "tcp://1", "status"], 2, "unix:///path/to/socket"),
        (["watch"], 1, "start it with ECD_EVENTS_ADDRESS"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_mistakes_are_named(daemon: Daemon, arguments: list[str], code: int, says: str) -> None:
    done = cli(daemon, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_daemon_that_is_too_old_for_a_command_is_no_daemon_that_is_away(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/s"
    server = grpc.server(ThreadPoolExecutor(1))  # which knows no call
    server.add_insecure_port(address)
    server.start()
    try:
        command = [*PROGRAM, "--address", address, "clients"]
        done = run(command, check=False, capture_output=True, text=True)
    finally:
        server.stop(None).wait(HANG_S)
    assert done.returncode == 1
    assert done.stderr == "ecd-cli: the daemon is older than this command: upgrade it\n"


def test_files_that_are_not_what_they_should_be(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"garbage")
    done = cli(daemon, "put", "k", str(file))
    assert (done.returncode, "not a safetensors file" in done.stderr) == (1, True)
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, file)
    done = cli(daemon, "put", "k", str(file))
    assert (done.returncode, "has 2 tensors" in done.stderr) == (1, True)
    assert cli(daemon, "put", "k", str(file), "--tensor", "b").returncode == 0
    for head, says in (({}, "has no tensor\n"), ({"__metadata__": None}, "has no tensor\n")):
        header = json.dumps(head).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        done = cli(daemon, "put", "k", str(file))
        assert (done.returncode, done.stderr.endswith(says)) == (1, True)
    header = json.dumps(
        {"__metadata__": None, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert cli(daemon, "put", "without-metadata", str(file)).returncode == 0
    done = cli(daemon, "get", "k", "-o", "/nowhere/x")
    assert (done.returncode, "cannot be written" in done.stderr) == (1, True)
    assert daemon.status().leases == 0


def test_get_spoils_nothing_that_it_cannot_write_to(daemon: Daemon, tmp_path: Path) -> None:
    with Client(daemon.address) as client:
        client.put_bytes("k", b"x", "uint8", (1,))
    done = cli(daemon, "get", "k", "-o", str(tmp_path))
    assert (done.returncode, done.stderr) == (
        1,
        f"ecd-cli: {tmp_path} cannot be written: Is a directory\n",
    )
    full = tmp_path / "full"
    os.mknod(full, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
    done = cli(daemon, "get", "k", "-o", str(full))
    assert (done.returncode, "No space left on device" in done.stderr) == (1, True)
    assert full.is_char_device()


def test_the_address_may_stand_anywhere_and_be_a_path(daemon: Daemon) -> None:
    """Of a process, whose exit code and output are those of a call in this one."""
    path = daemon.address.removeprefix("unix://")
    program = Path(sys.executable).with_name("ecd-cli")
    for arguments in (
        ["ls", "--address", path],
        ["ls", f"--address={path}", "--limit", "1"],
        ["evict", "--address", path],
    ):
        done = run([program, *arguments], capture_output=True, text=True)
        within = cli(daemon, arguments[0])
        ends = [(each.returncode, each.stdout, each.stderr) for each in (done, within)]
        assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["evict", "--json"], 2, "say which"),
        (["nonsense", "--json"], 2, "No such command"),
        (["--json", "evict", "k", "--yes"], 1, "no entry 'k' in any namespace"),
        (["status", "--json", "--address", "/nowhere/s"], 3, "there is no /nowhere/s"),
        (["put", "k", __file__, "--json"], 1, "is not a safetensors file"),
    ],
)
def test_a_program_reads_errors_as_json(
    daemon: Daemon, arguments: list[str], code: int, says: str
) -> None:
    done = cli(daemon, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    error = json.loads(done.stderr)
    assert error["exit_code"] == code
    assert says in error["error"]


def test_no_daemon_is_exit_code_3(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    for arguments in (["status"], ["ls"], ["evict", "k"], ["get", "k", "-o", "/dev/null"]):
        done = cli(daemon, *arguments)
        assert done.returncode == 3, done.stderr
        assert "nothing answers on" in done.stderr
        assert "there is no /" in done.stderr
    daemon.start().kill()
    assert "which a dead daemon left; start the daemon" in cli(daemon, "status").stderr
    done = run([*PROGRAM, "--address", __file__, "status"], capture_output=True, text=True)
    assert f"{__file__} is no socket; say where the daemon's is (ECD_ADDRESS)" in done.stderr


# -- looking after it ------------------------------------------------------------------------------


def findings(daemon: Daemon, prefix: tuple[str, ...] = ()) -> tuple[int, dict[str, dict]]:
    """The exit code of `doctor`, and what it found, by check."""
    if prefix:
        command = [*prefix, *PROGRAM, "--address", daemon.address, "doctor", "--json"]
        done = run(command, capture_output=True, text=True)
    else:
        done = cli(daemon, "doctor", "--json")
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert all(bool(finding["advice"]) == (finding["state"] != "ok") for finding in found)
    return done.returncode, {finding["check"]: finding for finding in found}


def test_doctor_finds_nothing_wrong_with_a_daemon_that_is_well(daemon: Daemon) -> None:
    code, found = findings(daemon)
    assert code == 0
    for check in ("socket", "daemon", "versions", "reading", "pool", "other nodes"):
        assert found[check]["state"] == "ok", found[check]
    assert found["reading"]["found"] == "hits make no call"
    assert "clock" not in found, "without other nodes none matters"
    assert cli(daemon, "doctor").stdout.count("\n") >= len(found)


def test_doctor_says_that_there_is_no_daemon(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    code, found = findings(daemon)
    assert code == 1
    assert "there is no" in found["socket"]["found"]
    daemon.start()
    daemon.kill()
    code, found = findings(daemon)
    assert code == 1
    assert "a dead daemon left" in found["socket"]["found"]
    assert "daemon" not in found, "it would say the same once more"


def test_status_and_doctor_say_the_same_of_a_daemon_that_stands_still(own_daemon: Daemon) -> None:
    with own_daemon.stopped():
        _, found = findings(own_daemon)
        done = cli(own_daemon, "status")
    assert (found["daemon"]["state"], found["socket"]["state"]) == ("fix", "ok")
    assert found["daemon"]["found"] in done.stderr
    assert "doctor" not in found["daemon"]["found"]


def test_doctor_says_that_a_user_may_not_connect(own_daemon: Daemon) -> None:
    os.chown(own_daemon.address.removeprefix("unix://"), 12345, 12345)
    weak = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    code, found = findings(own_daemon, weak)
    assert code == 1
    assert "does not let this user in" in found["socket"]["found"]
    assert "group" in found["socket"]["advice"]
    assert "daemon" not in found, "one cause, one finding"
    command = [*weak, *PROGRAM, "--address", own_daemon.address, "status"]
    done = run(command, capture_output=True, text=True)
    assert done.returncode == 3
    assert f"{found['socket']['found']}; {found['socket']['advice']}" in done.stderr


@pytest.mark.parametrize("program", ["ecd", "ecd-cli"])
def test_each_program_tells_its_version_and_its_options(program: str) -> None:
    path = Path(sys.executable).with_name(program)
    told = run([path, "--version"], capture_output=True, text=True)
    assert told.stdout.strip() == version("encoder-cache-daemon")
    assert "Usage" in run([path, "-h"], capture_output=True, text=True).stdout


def test_help_and_version_are_commands_too(daemon: Daemon) -> None:
    assert "Evict entries by their keys" in cli(daemon, "help", "evict").stdout
    assert "bench" in cli(daemon, "help").stdout
    assert cli(daemon, "help", "nonsense").returncode == 2
    assert cli(daemon, "version").stdout.strip() == version("encoder-cache-daemon")


def test_the_help_of_serve_shows_the_default_and_no_value() -> None:
    env = os.environ | {"ECD_ADDRESS": "unix:///a/b.sock", "COLUMNS": "300"}
    told = run(
        [sys.executable, "-m", "ecd", "serve", "-h"], env=env, capture_output=True, text=True
    )
    assert "ECD_ADDRESS, default unix:///run/ecd/ecd.sock for root" in told.stdout
    assert "/a/b.sock" not in told.stdout


def test_ecd_says_which_program_is_meant() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    assert set(OF_ECD_CLI) == names - {"help", "version"}, "`ecd version` is the daemon's"
    command = [sys.executable, "-m", "ecd", "ls", "--sort", "size"]
    done = run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(": ecd-cli ls --sort size\n")


def test_an_environment_without_the_daemon_says_so() -> None:
    script = "import sys; sys.modules['uvloop'] = None; from ecd.__main__ import main; main()"
    done = run([sys.executable, "-c", script, "serve"], capture_output=True, text=True)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "not installed here (uvloop is missing)" in line


def test_doctor_says_that_a_daemon_is_of_another_version(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nv = m.version\n"
        "m.version = lambda name: '0.0.9' if name == 'encoder-cache-daemon' else v(name)\n"
    )
    _, found = findings(daemon, ("env", f"PYTHONPATH={tmp_path}"))
    assert found["versions"]["state"] == "look"
    assert "client ecd 0.0.9" in found["versions"]["found"]


@pytest.mark.parametrize(
    ("version", "state", "advised"),
    [
        ("0.27.1", "look", "look for a newer vLLM"),
        ("0.33.0+cpu", "ok", ""),
        ("0.34.0", "look", "look for a newer ecd"),
    ],
)
def test_doctor_says_of_a_vllm_that_nobody_has_tried(
    daemon: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    state: str,
    advised: str,
) -> None:
    about = tmp_path / f"vllm-{version}.dist-info/METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = findings(daemon)[1]["vLLM"]
    assert (found["found"], found["state"]) == (version, state)
    assert found["advice"].endswith(advised)


def test_doctor_says_that_a_container_does_not_see_the_pool(daemon: Daemon) -> None:
    apart = "unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"
    if run([*apart, "true"]).returncode:
        pytest.skip("NO OTHER /dev/shm IS TRIED: this user mounts nothing")
    _, found = findings(daemon, apart)
    assert "No such file" in found["reading"]["found"]
    assert "mount it into the container" in found["reading"]["advice"]


def test_doctor_says_that_the_pool_is_too_small(own_daemon: Daemon) -> None:
    too_large = pytest.raises(EntryTooLarge, match="100 MiB, and the whole pool has 64 MiB: raise")
    with Client(own_daemon.address) as client:
        with too_large:
            client.put_bytes("k", bytes(100 << 20), "uint8", (100 << 20,))
        code, found = findings(own_daemon)
        assert code == 0, "it may be long ago"
        assert "1 put larger than the pool, in " in found["pool"]["found"]
        assert found["pool"]["advice"] == "raise ECD_HOST_POOL_BYTES if that goes on"
        client.put_bytes("k", bytes(40 << 20), "uint8", (40 << 20,))
        with (
            client.get("k"),
            pytest.raises(PoolFull, match="or raise ECD_HOST_POOL_BYTES"),
        ):
            client.put_bytes("more", bytes(40 << 20), "uint8", (40 << 20,))
    _, found = findings(own_daemon)
    both = "1 put larger than the pool; 1 put refused, as the pool was full of what was in use or "
    assert both in found["pool"]["found"]
    assert found["pool"]["advice"].startswith("`ecd-cli clients` shows who uses it; raise")


def test_a_pool_full_of_what_is_kept_is_said_with_the_way_out(own_daemon: Daemon) -> None:
    with Client(own_daemon.address) as client:
        client.put_bytes("kept", bytes(28 << 20), "uint8", (28 << 20,))
        assert cli(own_daemon, "keep", "kept").returncode == 0
        refused = r"28 MiB are leased, kept .*`ecd-cli ls --kept` show.* by `ecd-cli unkeep`, or"
        with pytest.raises(PoolFull, match=refused):
            client.put_bytes("more", bytes(50 << 20), "uint8", (50 << 20,))
    eventually(lambda: "is refused" in own_daemon.text())
    assert "28 MiB are leased, kept or being written" in own_daemon.text()
    assert "end a keep by `ecd-cli unkeep`" in own_daemon.text()
    _, found = findings(own_daemon)
    assert found["pool"]["found"].endswith("; 28 MiB are kept")
    assert found["pool"]["advice"].startswith("`ecd-cli ls --kept` lists what is kept")


def test_doctor_and_the_log_say_that_a_session_has_no_memory(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    with memory_of(tmp_path / "shm", "64m") as place:
        daemon = make_daemon("16MiB", ECD_SHM_DIR=str(place)).start()
        space = os.statvfs(place)
        with (place / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_bsize)
        _, found = findings(daemon)
        assert "make room in memory if the daemon's log says so" in found["reading"]["advice"]
        said = f"no memory in {place} for a session's pins: No space left on device. Its gets and"
        assert said in daemon.text()
        daemon.close()


def test_doctor_and_serve_say_that_a_disk_is_no_memory(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    kind = filesystem(tmp_path)
    if kind in ("", *IN_MEMORY):
        pytest.skip("no disk here")
    _, found = findings(Daemon(tmp_path), ("env", f"ECD_SHM_DIR={tmp_path}"))
    said = found["shared memory"]
    assert (said["state"], said["found"]) == ("look", f"{tmp_path} is on {kind}, not in memory")
    daemon = make_daemon("16MiB", ECD_SHM_DIR=str(tmp_path)).start()
    assert f"shm_dir {tmp_path} is on {kind}, not in memory" in daemon.text()


def test_doctor_says_which_nodes_and_directory_are_away(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(
        ECD_PEER_ADDRESS="127.0.83.1:9465",
        ECD_ENGINE_PORTS="30000-30031",
        ECD_DIRECTORY="redis://127.0.83.3:1/0",
        ECD_HINT_NETWORKS="127.0.83.0/24",
    ).start()
    with Client(daemon.address) as client:
        assert client.get("k", 1.0, nodes=["127.0.83.2:9465"]) is None
    code, found = findings(daemon)
    assert code == 1
    assert found["peer port"]["state"] == found["engine port"]["state"] == "ok"
    assert found["directory"]["state"] == "fix"
    assert found["peers"]["found"].startswith("127.0.83.2:9465: ")
    assert "clock" in found


def test_bench_measures_and_leaves_everything_as_it_was(daemon: Daemon) -> None:
    before = daemon.status().bench.puts
    with Client(daemon.address) as client:
        client.put("k", torch.ones(3))
        rows = as_json(daemon, "bench", "--rounds", "2")
        assert [row["size"] for row in rows] == ["64 KiB", "1 MiB"]  # what a pool of 64 MiB takes
        assert all(row["put_us"] > row["contains_us"] > 0 for row in rows)
        assert client.contains(["k"]) == [True]
    assert daemon.status().entries == 1
    done = cli(daemon, "bench", "--rounds", "1")
    assert "as it was put in" in done.stdout
    assert "Not measured for lack of room: 8 MiB, 32 MiB. The largest free piece" in done.stderr
    assert f"{before + 40} puts by ecd-cli bench" in cli(daemon, "status").stdout.replace("\n", " ")


def test_bench_that_is_ended_leaves_no_entry(daemon: Daemon) -> None:
    command = [*PROGRAM, "--address", daemon.address, "bench", "--rounds", "1000000"]
    with child(command, grace=True) as process:
        eventually(lambda: daemon.status().entries > 0)
        process.terminate()
        assert process.wait(HANG_S) == 1
    assert daemon.status().entries == 0


def test_bench_says_that_there_is_no_room(daemon: Daemon) -> None:
    with Client(daemon.address) as client:
        client.put("k", torch.zeros(64 * 1023 << 10, dtype=torch.uint8))
        done = cli(daemon, "bench")
        assert done.returncode == 1
        assert "no room" in done.stderr
        with pytest.raises(WrongBytes, match=r"nearly full .* evicts it to make room"):
            bench._get(client, "one that was evicted")
        assert client.contains(["k"]) == [True]


@pytest.mark.parametrize(("quota", "code"), [("32KiB", 1), ("1MiB", 0)])
def test_bench_names_the_quota_that_cuts_it(
    make_daemon: Callable[..., Daemon], quota: str, code: int
) -> None:
    done = cli(make_daemon(ECD_NAMESPACE_QUOTAS=f"*={quota}").start(), "bench", "--rounds", "1")
    assert done.returncode == code
    assert "a quota evicts or refuses its entries: add" in done.stderr
    assert '"ecd-cli bench *=256 MiB" to ECD_NAMESPACE_QUOTAS' in done.stderr
    assert ("64 KiB" in done.stdout) is (code == 0), "what fits is measured"


class Clock:
    """Stands still until a test moves it."""

    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


def test_top_shows_what_happens_in_a_second(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("ecd_client.cli.top.clock", clock)
    with open_channel(daemon.address) as channel, Client(daemon.address) as client:
        stub = pb_grpc.CacheStub(channel)
        top = Top(
            lambda method, request: getattr(stub, method)(request, timeout=HANG_S),
            lambda: iter(daemon.entries()),
            rows=1,
        )
        assert top.as_json()["per_second"] is None
        client.put("k", torch.ones(3))
        daemon.wait_idle()  # it is listed: a read before that counts for no entry
        for _ in range(6):
            client.get("k").close()
        assert [client.get("none") for _ in range(2)] == [None] * 2
        clock.at_s += 2.0
        rates = top.as_json()["per_second"]
    assert [rates[name] for name in ("hits", "misses", "hit_ratio")] == [3.0, 1.0, 0.75]
    assert (rates["handed_over"], rates["saved_ratio"]) == (0.5, 5 / 7), "the first, of six"
    assert [rates[name] for name in ("puts", "bytes_in", "bytes_out")] == [0.5, 6.0, 36.0]


def test_top_shows_what_is_hot_and_what_is_large(daemon: Daemon) -> None:
    with Client(daemon.address) as client:
        client.put("small", torch.ones(3))
        client.put("large", torch.ones(3000))
        daemon.status()  # all are listed: a read before that counts for no entry
        client.get("small").close()
    told = as_json(daemon, "top", "--once", "--interval", "0.2")
    assert (told["schema"], told["status"]["schema"]) == ("ecd.top/1", "ecd.status/1")
    assert told["per_second"]["hits"] == 0
    assert [entry["key"]["mm_hash"] for entry in told["biggest"]] == ["large", "small"]
    assert [entry["key"]["mm_hash"] for entry in told["hottest"]] == ["small"]
    shown = cli(daemon, "top", "--once", "--interval", "200ms").stdout
    assert "of encodes saved" in shown
    titles = ["hottest", "biggest", "namespaces"]
    assert [line for line in shown.splitlines() if line in titles] == titles


def test_top_prints_a_line_a_look_for_programs(daemon: Daemon) -> None:
    command = [*PROGRAM, "--address", daemon.address, "top", "--json", "--interval", "200ms"]
    with child(command, stdout=subprocess.PIPE, text=True) as running:
        looks = [json.loads(running.stdout.readline()) for _ in range(3)]
        running.send_signal(signal.SIGINT)
        running.stdout.read()
        assert running.wait(HANG_S) == 0
    times = [datetime.fromisoformat(each["time"]) for each in looks]
    assert sorted(times) == times
    assert all(each.tzinfo for each in times)


@pytest.mark.parametrize("how", ["q", "SIGINT"])
def test_top_goes_on_until_it_is_told_to_stop(daemon: Daemon, how: str) -> None:
    """On a terminal of its own, in colour."""

    def below_nohup() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    about = {"preexec_fn": below_nohup}
    with on_a_terminal(daemon, "top", "--interval", "200ms", **about) as terminal:
        assert b"\x1b[1;32mserving" in terminal.until(b"lookups/s", times=3)
        if how == "q":
            terminal.write(b"xq")
        else:
            terminal.running.send_signal(signal.SIGINT)
        terminal.rest()


def test_top_outlives_the_daemon(own_daemon: Daemon) -> None:
    with on_a_terminal(own_daemon, "top", "--interval", "200ms") as terminal:
        terminal.until(b"lookups/s")
        own_daemon.kill()
        terminal.until(b"no answer")
        own_daemon.start()
        terminal.until(b"lookups/s")
        terminal.write(b"q")
        terminal.rest()


def completed(address: str, *words: str) -> list[str]:
    """What a shell offers for the last word."""
    done = run(
        [Path(sys.executable).with_name("ecd-cli")],
        env={
            **os.environ,
            "ECD_ADDRESS": address,
            "_ECD_CLI_COMPLETE": "complete_bash",
            "COMP_WORDS": shlex.join(["ecd-cli", *words]),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_can_be_told_to_complete(daemon: Daemon) -> None:
    assert "doctor" in completed("unix:///nowhere", "do")
    with Client(daemon.address) as client:
        for name in ("complete-a", "complete-b|x", "complete/a-model-of-24-letters|main 1a2b"):
            client.put("k", torch.ones(3), namespace=name)
        expected = ["complete-a", "complete/a-model-of-24-letters..1a2b"]
        for words in (["ls", "-n"], ["evict", "--namespace"]):
            assert completed(daemon.address, *words, "complete") == expected
        assert completed(daemon.address, "ls", "-n", "complete/") == expected[1:]
    assert completed("unix:///nowhere", "ls", "-n", "complete") == []
