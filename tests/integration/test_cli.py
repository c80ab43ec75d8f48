"""`ecd-cli` as its users run it: a process, its output, its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ecd_client import Client
from support.daemon import Daemon


def cli(daemon: Daemon, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address, *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=60,
    )


def as_json(daemon: Daemon, *arguments: str) -> object:
    done = cli(daemon, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    done = cli(daemon, "get", "k", "-o", str(tmp_path / "out.safetensors"))
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out.safetensors")["embedding"]
    assert found.dtype == dtype
    assert torch.equal(found.float(), tensor.float())


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


def test_ls_and_status_say_the_same_to_people_and_programs(daemon: Daemon) -> None:
    with Client(daemon.address, namespace="n") as client:
        for index in range(5):
            client.put(f"key-{index}", torch.zeros(3, 4))
    found = as_json(daemon, "ls")
    assert [entry["key"]["mm_hash"] for entry in found] == [f"key-{i}" for i in range(5)]
    assert found[0]["content"]["shape"] == [3, 4]
    assert len(as_json(daemon, "ls", "--limit", "2")) == 2
    assert as_json(daemon, "ls", "--namespace", "other") == []
    table = cli(daemon, "ls", "--limit", "2").stdout
    assert "key-1" in table
    assert "--limit" in table
    status = as_json(daemon, "status")
    assert (status["state"], status["entries"]) == ("serving", 5)
    assert status["counters"]["puts"] == 5
    text = cli(daemon, "status").stdout
    assert "serving" in text
    assert daemon.address in text


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
        item.close()
    assert as_json(daemon, "ls") == []


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["evict"], 2, "say which"),
        (["evict", "k", "--all"], 2, "say which"),
        (["evict", "--unused-for", "soon", "--yes"], 2, "not a duration"),
        (["get", "k", "-o", "/dev/null"], 1, "no entry 'k'"),
        (["put", "k", "/nowhere"], 2, "does not exist"),
        (["--address", "tcp://1", "status"], 2, "unix:///path/to/socket"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_mistakes_are_named(daemon: Daemon, arguments: list[str], code: int, says: str) -> None:
    done = cli(daemon, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_are_not_what_they_should_be(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"garbage")
    done = cli(daemon, "put", "k", str(file))
    assert (done.returncode, "not a safetensors file" in done.stderr) == (1, True)
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, file)
    done = cli(daemon, "put", "k", str(file))
    assert (done.returncode, "has 2 tensors" in done.stderr) == (1, True)
    assert cli(daemon, "put", "k", str(file), "--tensor", "b").returncode == 0
    done = cli(daemon, "get", "k", "-o", "/nowhere/x")
    assert (done.returncode, "cannot be written" in done.stderr) == (1, True)
    assert daemon.status().leases == 0


def test_no_daemon_is_exit_code_3(make_daemon: Callable[..., Daemon]) -> None:
    for arguments in (["status"], ["ls"], ["evict", "k"], ["get", "k", "-o", "/dev/null"]):
        done = cli(make_daemon(), *arguments)
        assert done.returncode == 3, done.stderr
        assert "nothing answers on" in done.stderr
