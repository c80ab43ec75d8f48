"""The names that `ecd-cli` shows can be typed; a whole name stands for no other."""

from __future__ import annotations

import pytest

from ecd_client import Client
from ecd_client.cli.render import short, short_namespace
from support.cli import as_json, cli
from support.daemon import Daemon

QWEN = "Qwen/Qwen2.5-VL-7B-Instruct|revision 957d|bfloat16|weights 1a2b"
OTHER = "Qwen/Qwen3-VL-8B-Instruct|revision 22ba|bfloat16|weights 3c4d"
CAT, DOG, CAR = "957d176dd" + "0" * 55, "957d99999" + "1" * 55, "22ba7a650" + "2" * 55
DOG_2 = DOG[:-1] + "f"


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
    for typed in (CAT, short(CAT), "957d17", CAT[:31], "957d1..0"):
        assert got(daemon, typed) == (QWEN, CAT), typed
    for typed in (QWEN, short_namespace(QWEN), "Qwen/Qwen2..b"):
        assert got(daemon, "22ba7a", "--namespace", typed) == (QWEN, CAR), typed
        assert got(daemon, CAR, "-n", typed) == (QWEN, CAR), typed
    assert as_json(daemon, "keep", "957d17")["mm_hash"] == CAT
    assert as_json(daemon, "unkeep", short(CAT))["mm_hash"] == CAT
    found = as_json(daemon, "locate", "957d17", "-n", "Qwen/Qwen2..b")
    assert (found["namespace"], list(found["located"])) == (QWEN, [CAT])


def test_stderr_says_what_a_completed_name_stands_for(daemon: Daemon) -> None:
    namespace, typed = f"Qwen/..b stands for {QWEN}\n", ("-n", "Qwen/..b")
    for arguments in (
        ["get", "957d17", "-o", "/dev/null"],
        ["keep", "957d17"],
        ["unkeep", "957d17"],
    ):
        assert cli(daemon, *arguments).stderr == f"957d17 stands for {CAT}\n"
    done = cli(daemon, "locate", "957d17", CAR, *typed)
    assert done.stderr == f"{namespace}957d17 stands for {CAT}\n"
    assert cli(daemon, "ls", *typed, "--json").stderr == namespace
    assert cli(daemon, "get", CAT, "-n", QWEN, "-o", "/dev/null").stderr == ""


def test_several_keys_that_begin_so_are_listed(daemon: Daemon) -> None:
    done = cli(daemon, "get", "957d..", "-o", "/dev/null")
    assert done.returncode == 1, "only what has an end too is a name that tables show"
    done = cli(daemon, "get", "957d9", "-o", "/dev/null")
    assert done.returncode == 1, "it is too short"
    with Client(daemon.address) as client:
        client.put_bytes(DOG_2, b"x", "uint8", (1,), namespace=QWEN)
    done = cli(daemon, "get", "957d99", "-o", "/dev/null")
    assert done.returncode == 2
    assert DOG in done.stderr
    assert DOG_2 in done.stderr
    assert CAT not in done.stderr
    done = cli(daemon, "get", "22ba7a", "-o", "/dev/null")
    assert done.returncode == 2
    assert f"--namespace {OTHER!r}" in done.stderr
    with Client(daemon.address) as client:
        client.put_bytes(CAR, b"x", "uint8", (1,), namespace=OTHER.replace("3c4d", "1a2b"))
    done = cli(daemon, "get", "22ba7a", "-n", "Qwen/..1a2b", "-o", "/dev/null")
    assert done.returncode == 2
    assert "'Qwen/..1a2b' may be several namespaces" in done.stderr
    assert cli(daemon, "get", "ffffff", "-o", "/dev/null").returncode == 1


def test_a_name_that_is_shown_whole_is_typed_whole(daemon: Daemon) -> None:
    """`img-1` is not `img-10`, which a program would take for the former."""
    with Client(daemon.address) as client:
        client.put_bytes("img-10", b"x", "uint8", (1,), namespace="tenant-10")
    done = cli(daemon, "get", "img-1", "-o", "/dev/null")
    assert (done.returncode, "no entry 'img-1'" in done.stderr) == (1, True)
    assert as_json(daemon, "ls", "--namespace", "tenant-1")["entries"] == []
    done = cli(daemon, "get", "img-10", "--namespace", "tenant-1", "-o", "/dev/null")
    assert done.returncode == 1


def test_a_whole_name_stands_for_no_longer_one(daemon: Daemon) -> None:
    picture, tenant = "img-2026-11-29-000001", "org/a-model-of-24-letters|a-rather-long-revision"
    longer = f"{picture}-thumbnail"
    with Client(daemon.address) as client:
        client.put_bytes(longer, b"x", "uint8", (1,), namespace=QWEN)
        client.put_bytes(picture, b"x", "uint8", (1,), namespace=f"{tenant}|tenant")
        client.put_bytes(CAT[:32] + "|2", b"x", "uint8", (1,), namespace=OTHER)
    ask = "--timeout", "1s", "-o", "/dev/null"
    for arguments in (
        ["get", picture, "-n", QWEN, *ask],
        ["get", CAT[:32], *ask],
        ["get", CAT[:40], "-n", QWEN, *ask],
        ["get", picture, "-n", tenant, *ask],
        ["keep", picture, "-n", QWEN],
        ["unkeep", picture, "-n", QWEN],
        ["locate", picture, "-n", QWEN],
    ):
        done = cli(daemon, *arguments)
        assert done.returncode == 1, arguments
        assert "stands for" not in done.stderr
    assert as_json(daemon, "ls", "-n", tenant)["entries"] == []
    assert as_json(daemon, "evict", "-n", tenant, "--dry-run")["entries"] == 0


def test_evict_asks_before_it_evicts_a_completed_name(daemon: Daemon) -> None:
    for arguments in (["957d17"], ["957d17", "-n", QWEN], ["-n", "Qwen/Qwen2..b"]):
        done = cli(daemon, "evict", *arguments)
        assert done.returncode == 2, arguments
        assert "type the whole name" in done.stderr
        assert repr(QWEN) in done.stderr
        assert as_json(daemon, "evict", *arguments, "--dry-run")["entries"] > 0
    several = cli(daemon, "evict", "957d17", DOG, "22ba7a", "-n", QWEN)
    assert several.returncode == 2
    assert f"evict 3 entries, 3 bytes, of {QWEN!r} {CAT!r}, {QWEN!r} {DOG!r}" in several.stderr
    assert cli(daemon, "evict", DOG, "22ba7a").returncode == 2, "none, if one is unclear"
    assert cli(daemon, "evict", "957d17", "--yes").returncode == 1
    assert as_json(daemon, "evict", "-n", "Qwen/Qwen2..b", "--yes")["entries"] == 0
    assert as_json(daemon, "ls")["total"] == 4
    assert as_json(daemon, "evict", CAT)["entries"] == 1


def test_ls_is_limited_to_a_namespace_as_it_is_shown(daemon: Daemon) -> None:
    for limit, sizes in ((["-n", "Qwen/Qwen3..d"], [2]), (["--prefix", "22"], [1, 2])):
        found = as_json(daemon, "ls", *limit)["entries"]
        assert [each["content"]["nbytes"] for each in found] == sizes
