"""The names that `ecd-cli` shows can be typed, and so can their unique beginnings."""

from __future__ import annotations

import pytest

from ecd_client import Client
from ecd_client.cli.render import short, short_namespace
from support.cli import as_json, cli
from support.daemon import Daemon

QWEN = "Qwen/Qwen2.5-VL-7B-Instruct|revision 957d|bfloat16|weights 1a2b"
OTHER = "Qwen/Qwen3-VL-8B-Instruct|revision 22ba|bfloat16|weights 3c4d"
CAT, DOG, CAR = "957d176dd" + "0" * 55, "957d99999" + "1" * 55, "22ba7a650" + "2" * 55


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    with Client(unused_daemon.address) as client:
        for key in (CAT, DOG, CAR):
            client.put_bytes(key, b"x", "uint8", (1,), namespace=QWEN)
        client.put_bytes(CAR, b"xy", "uint8", (2,), namespace=OTHER)
    return unused_daemon


def got(daemon: Daemon, *arguments: str) -> tuple[str, str]:
    found = as_json(daemon, "get", *arguments, "-o", "/dev/null")
    return found["namespace"], found["mm_hash"]


def test_a_namespace_is_shown_by_its_model() -> None:
    assert short_namespace(QWEN) == "Qwen/Qwen2.5-VL-7B-Instruct..1a2b"
    assert short_namespace(OTHER) == "Qwen/Qwen3-VL-8B-Instruct..3c4d"
    assert short_namespace("/models/" + "n" * 900) == "/models/" + "n" * 32 + "..nnnn"
    for whole in ("default", "tenant-1|bfloat16", "m" * 46, "model-of-24-letters-here|a"):
        assert short_namespace(whole) == whole


def test_a_key_is_found_by_its_beginning_and_as_it_is_shown(daemon: Daemon) -> None:
    for typed in (CAT, short(CAT), "957d1", CAT[:30]):
        assert got(daemon, typed) == (QWEN, CAT), typed
    for typed in (QWEN, short_namespace(QWEN), "Qwen/Qwen2"):
        assert got(daemon, "22ba", "--namespace", typed) == (QWEN, CAR), typed
        assert got(daemon, CAR, "-n", typed) == (QWEN, CAR), typed
    assert as_json(daemon, "keep", "957d1")["mm_hash"] == CAT
    assert as_json(daemon, "unkeep", short(CAT))["mm_hash"] == CAT
    found = as_json(daemon, "locate", "957d1", "-n", "Qwen/Qwen2")
    assert (found["namespace"], list(found["located"])) == (QWEN, [CAT])


def test_several_keys_that_begin_so_are_listed(daemon: Daemon) -> None:
    done = cli(daemon, "get", "957d", "-o", "/dev/null")
    assert done.returncode == 2
    assert CAT in done.stderr
    assert DOG in done.stderr
    assert CAR not in done.stderr
    done = cli(daemon, "get", "22ba", "-o", "/dev/null")
    assert done.returncode == 2
    assert f"--namespace {OTHER!r}" in done.stderr
    done = cli(daemon, "get", "22ba", "-n", "Qwen/", "-o", "/dev/null")
    assert done.returncode == 2
    assert "several namespaces begin with 'Qwen/'" in done.stderr
    assert cli(daemon, "get", "ffff", "-o", "/dev/null").returncode == 1


def test_a_name_that_is_shown_whole_is_typed_whole(daemon: Daemon) -> None:
    """`img-1` is not `img-10`, which a program would take for the former."""
    with Client(daemon.address) as client:
        client.put_bytes("img-10", b"x", "uint8", (1,), namespace="tenant-10")
    done = cli(daemon, "get", "img-1", "-o", "/dev/null")
    assert (done.returncode, "no entry 'img-1'" in done.stderr) == (1, True)
    assert as_json(daemon, "ls", "--namespace", "tenant-1")["entries"] == []
    done = cli(daemon, "get", "img-10", "--namespace", "tenant-1", "-o", "/dev/null")
    assert done.returncode == 1


def test_evict_asks_before_it_evicts_a_completed_name(daemon: Daemon) -> None:
    for arguments in (["957d1"], ["957d1", "-n", QWEN], ["-n", "Qwen/Qwen2"]):
        done = cli(daemon, "evict", *arguments)
        assert done.returncode == 2, arguments
        assert "type the whole name" in done.stderr
        assert repr(QWEN) in done.stderr
        assert as_json(daemon, "evict", *arguments, "--dry-run")["entries"] > 0
    assert cli(daemon, "evict", "957d1", "--yes").returncode == 1
    assert as_json(daemon, "evict", "-n", "Qwen/Qwen2", "--yes")["entries"] == 0
    assert as_json(daemon, "ls")["total"] == 4
    assert as_json(daemon, "evict", CAT)["entries"] == 1


def test_ls_is_limited_to_a_namespace_by_its_beginning(daemon: Daemon) -> None:
    for limit, sizes in ((["-n", "Qwen/Qwen3"], [2]), (["--prefix", "22"], [1, 2])):
        found = as_json(daemon, "ls", *limit)["entries"]
        assert [each["content"]["nbytes"] for each in found] == sizes
