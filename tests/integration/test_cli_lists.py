"""Lists of `ecd-cli`: a limit that they reach is said beside them, and programs can go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ecd_client import Client, EntryTooLarge
from support.cli import as_json, cli
from support.daemon import Daemon


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    with Client(unused_daemon.address) as client:
        for number in range(7):
            client.put_bytes(f"key-{number}", b"x", "uint8", (1,), namespace=f"n{number % 2}")
    return unused_daemon


def keys(document: dict) -> list[str]:
    return [entry["key"]["mm_hash"] for entry in document["entries"]]


def test_ls_says_on_stderr_that_it_shows_some(daemon: Daemon) -> None:
    done = cli(daemon, "ls", "--limit", "3")
    assert len(done.stdout.splitlines()) == 1 + 3, "a head and three rows"
    after = as_json(daemon, "ls", "--limit", "3")["next_after"]
    assert done.stderr == f"3 of 7 entries: --limit shows more, --after {after} the next ones.\n"
    done = cli(daemon, "ls", "--limit", "3", "--sort", "size")
    assert done.stderr == "3 of 7 entries: --limit shows more.\n"
    done = cli(daemon, "ls", "--limit", "3", "--sort", "size", "--prefix", "key-")
    assert done.stderr == "3 entries, not all: --limit shows more.\n"
    assert cli(daemon, "ls", "--limit", "7").stderr == ""


@pytest.mark.parametrize(
    ("chosen", "total"), [([], 7), (["--namespace", "n1"], 3), (["--prefix", "key-"], 7)]
)
def test_a_program_reads_a_list_to_its_end(daemon: Daemon, chosen: list[str], total: int) -> None:
    whole = as_json(daemon, "ls", *chosen)
    assert whole["schema"] == "ecd.entries/1"
    assert (whole["total"], whole["next_after"], len(whole["entries"])) == (total, None, total)
    found, after = list[str](), 0
    while after is not None:
        page = as_json(daemon, "ls", *chosen, "--limit", "2", "--after", str(after))
        assert page["total"] == (None if chosen else total)
        assert len(page["entries"]) <= 2
        found, after = found + keys(page), page["next_after"]
    assert found == keys(whole)


def test_a_sorted_list_has_no_next_page(daemon: Daemon) -> None:
    page = as_json(daemon, "ls", "--sort", "size", "--limit", "2")
    assert (page["total"], page["next_after"]) == (7, None)
    done = cli(daemon, "ls", "--sort", "size", "--after", "1")
    assert (done.returncode, "leave --sort out" in done.stderr) == (2, True)


def test_namespaces_says_whose_rules_it_does_not_know(daemon: Daemon) -> None:
    assert cli(daemon, "namespaces").stderr == ""
    with Client(daemon.address) as client:
        for number in range(60):
            client.put_bytes("k", b"x", "uint8", (1,), namespace=f"more-{number}")
    done = cli(daemon, "namespaces")
    assert len(done.stdout.splitlines()) == 1 + 62
    some = "the 50 largest namespaces and of those with lookups"
    assert done.stderr == f"Quotas and TTLs are shown of {some}.\n"


def test_namespaces_shows_those_that_have_counters_and_no_entries(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(ECD_NAMESPACE_QUOTAS="small=8KiB", ECD_NAMESPACE_TTLS="small=1h").start()
    done = cli(daemon, "namespaces")
    assert (done.stdout, done.stderr) == ("", "No entries.\n")
    with Client(daemon.address, namespace="small") as client:
        client.put_bytes("k", b"x", "uint8", (1,), namespace="full")
        assert client.get("none") is None
        with pytest.raises(EntryTooLarge):
            client.put_bytes("k", bytes(9000), "uint8", (9000,))
    daemon.wait_idle()
    full, small = as_json(daemon, "namespaces")
    assert (full["namespace"], full["entries"]) == ("full", 1)
    assert (small["namespace"], small["entries"], small["newest_s"]) == ("small", 0, None)
    assert (small["misses"], small["refused"]) == (1, 1)
    assert (small["quota_bytes"], small["ttl_s"]) == (8192, 3600)
    _, _, row = cli(daemon, "namespaces").stdout.splitlines()
    assert row.split() == ["small", "0", "0", "bytes", *"01", "0", "s", "8", "KiB", "1", "h"]
