"""Quotas, TTLs and kept entries, as operators set them for a real daemon."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from ecd_client import Client
from ecd_client.errors import EntryTooLarge, PoolFull
from support.cli import cli
from support.daemon import Daemon
from support.waiting import eventually

MIB = 1 << 20
_changes = count(1)
SetRules = Callable[[str], None]


@pytest.fixture(scope="module")
def unstarted_daemon(tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    daemon = Daemon(tmp_path_factory.mktemp("shared"))
    file = daemon.directory / "ecd.toml"
    file.write_text("")
    daemon.command = (*Daemon.command, "--config", str(file))
    return daemon


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


@pytest.fixture
def set_rules(daemon: Daemon) -> Iterator[SetRules]:
    """Has the daemon take rules over while it runs."""

    def set_rules(rules: str) -> None:
        threshold = f"{float(next(_changes))}"  # a setting that tells when they are read
        text = f"slow_log_s = {threshold}\n{rules}"
        (daemon.directory / "ecd.toml").write_text(text)
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: f"slow_log_s is {threshold} now" in daemon.text())

    yield set_rules
    set_rules("")


def put(client: Client, *keys: str, nbytes: int = MIB) -> None:
    for key in keys:
        assert client.put_bytes(key, bytes(nbytes), "uint8", (nbytes,))


def nbytes_of(daemon: Daemon, namespace: str) -> int:
    named = {each.namespace: each.nbytes for each in daemon.status().namespaces}
    return named.get(namespace, 0)


def is_there(client: Client, key: str) -> bool:
    item = client.get(key)
    if item is not None:
        item.close()
    return item is not None


def evictions(daemon: Daemon) -> dict[str, int]:
    return dict(daemon.status().counters.evictions)


def test_a_namespace_at_its_quota_loses_its_own_entries_and_no_others(
    daemon: Daemon, set_rules: SetRules
) -> None:
    set_rules('[namespace_quotas]\n"tenant-*" = "8MiB"\n"*" = "50%"\n')
    before, full = evictions(daemon), daemon.status().counters.refused["quota_full"]
    with (
        Client(daemon.address, namespace="free") as free,
        Client(daemon.address, namespace="tenant-a") as tenant,
        Client(daemon.address, namespace="tenant-b") as other,
    ):
        put(free, *(f"f{number}" for number in range(20)))
        put(other, "b0", "b1")
        put(tenant, *(f"a{number}" for number in range(8)))
        for number in range(8, 24):
            assert is_there(tenant, "a0"), "what is read stays"
            put(tenant, f"a{number}")
            eventually(lambda: nbytes_of(daemon, "tenant-a") <= 8 * MIB)
        assert sorted(key for key in daemon.names() if key[0] == "a") == [
            "a0",
            *(f"a{number}" for number in range(17, 24)),
        ]
        assert all(is_there(free, f"f{number}") for number in range(20))
        assert all(is_there(other, key) for key in ("b0", "b1"))
        assert evictions(daemon) == {**before, "quota": before["quota"] + 16}

        with pytest.raises(EntryTooLarge, match="'tenant-a' is 8 MiB: raise ECD_NAMESPACE_QUO"):
            put(tenant, "too large", nbytes=9 * MIB)
        held = [tenant.get(key) for key in ("a0", *(f"a{number}" for number in range(17, 24)))]
        assert all(held)
        with pytest.raises(PoolFull, match="quota of 'tenant-a', 8 MiB"):
            put(tenant, "no room", nbytes=6 * MIB)  # more than a grant has: by a call
        assert daemon.status().counters.refused["quota_full"] == full + 2
        for item in held:
            assert item is not None
            item.close()
        eventually(lambda: not daemon.status().leases)
        put(tenant, "room", nbytes=6 * MIB)
        assert nbytes_of(daemon, "tenant-a") <= 8 * MIB

    shown = cli(daemon, "namespaces").stdout
    assert "quota" in shown.splitlines()[0]
    assert "8 MiB" in next(line for line in shown.splitlines() if line.startswith("tenant-a"))
    rows = json.loads(cli(daemon, "namespaces", "--json").stdout)
    assert {row["namespace"]: row["quota_bytes"] for row in rows if row["entries"]} == {
        "free": 32 * MIB,
        "tenant-a": 8 * MIB,
        "tenant-b": 8 * MIB,
    }
    metrics = daemon.metrics()
    assert 'ecd_namespace_quota_bytes{namespace="tenant-a"} 8.388608e+06' in metrics
    assert 'ecd_evictions_total{reason="quota"}' in metrics


def test_entries_are_served_until_their_ttl_and_not_after_it(
    daemon: Daemon, set_rules: SetRules
) -> None:
    set_rules('[namespace_ttls]\n"short" = "30m"\n"*" = "1h"\n')
    before, idle = evictions(daemon), sum(daemon.status().counters.idle_evictions)
    with (
        Client(daemon.address, namespace="short") as short,
        Client(daemon.address, namespace="long") as long,
    ):
        put(long, "stays")
        put(short, "called", nbytes=20 * MIB)
        put(short, "mapped")
        held = short.get("mapped")
        assert held is not None
        assert is_there(short, "mapped")
        assert "left" in cli(daemon, "ls").stdout.splitlines()[0]
        rows = json.loads(cli(daemon, "namespaces", "--json").stdout)
        ttls = {row["namespace"]: row["ttl_s"] for row in rows if row["entries"]}
        assert ttls == {"long": 3600, "short": 1800}
        set_rules('[namespace_ttls]\n"short" = "0.001s"\n"*" = "1h"\n')
        eventually(lambda: not is_there(short, "mapped"), "its time is over")
        eventually(lambda: not any(short.contains(["mapped", "called"])))
        assert bytes(held.view[:8]) == bytes(8), "who has it reads on"
        held.close()
        assert is_there(long, "stays")
        set_rules('[namespace_ttls]\n"*" = "1h"\n')
        put(short, "mapped")  # anew
        assert is_there(short, "mapped")
    assert evictions(daemon) == {**before, "ttl": before["ttl"] + 2}
    assert sum(daemon.status().counters.idle_evictions) == idle, "none of it was for room"


def test_what_an_operator_keeps_outlasts_a_crowd_until_it_is_kept_no_more(daemon: Daemon) -> None:
    with Client(daemon.address, namespace="n") as client:
        put(client, "kept", "for a while", "over it", nbytes=12 * MIB)
        assert cli(daemon, "keep", "kept").stdout == "kept until `ecd-cli unkeep`\n"
        for_a_while = cli(daemon, "keep", "for a while", "--namespace", "n", "--for", "1h")
        assert for_a_while.stdout == "kept for 1 h\n"
        refused = cli(daemon, "keep", "over it")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "takes 12 MiB, and 24 MiB of at most 32 MiB are kept" in refused.stderr
        for time, says in (("soon", "must be a duration"), ("9999d", "must be at most 3650d")):
            wrong = cli(daemon, "keep", "kept", "--for", time)
            assert wrong.returncode == 2
            assert f"--for {says}" in wrong.stderr
        assert cli(daemon, "keep", "nothing").returncode == 1
        assert cli(daemon, "keep", "nothing", "--namespace", "n").stderr == (
            "ecd-cli: no entry 'nothing' in the namespace 'n' is in memory\n"
        )
        assert "24 MiB kept (2 entries; at most 32 MiB)" in cli(daemon, "status").stdout
        kept = json.loads(cli(daemon, "ls", "--kept", "--json").stdout)["entries"]
        assert sorted(entry["key"]["mm_hash"] for entry in kept) == ["for a while", "kept"]
        assert "ecd_pool_kept_bytes" in daemon.metrics()

        daemon.crowd()
        assert is_there(client, "kept")
        assert is_there(client, "for a while")
        assert not is_there(client, "over it")
        assert cli(daemon, "unkeep", "for a while").stdout == "no longer kept\n"
        assert "was not kept" in cli(daemon, "unkeep", "for a while").stderr
        assert cli(daemon, "keep", "kept", "--for", "1s").returncode == 0  # shortened
        eventually(lambda: daemon.status().pools[0].kept == 0, "it is kept no longer")

        def is_crowded_out() -> bool:
            daemon.crowd()
            return "kept" not in daemon.names()

        eventually(is_crowded_out, "its uses outlast a crowd or two, and no more")

        put(client, "evicted")
        cli(daemon, "keep", "evicted")
        evicted = cli(daemon, "evict", "evicted")
        assert evicted.stdout == "Evicted 1 entry, 1 MiB; 1 of them kept.\n"
        assert daemon.status().pools[0].kept == 0


def test_rules_are_taken_over_while_the_daemon_runs(daemon: Daemon, set_rules: SetRules) -> None:
    with Client(daemon.address, namespace="n=1,a") as client:
        put(client, *(f"k{number}" for number in range(12)))
        set_rules('[namespace_quotas]\n"n=1,*" = "4MiB"\n')
        eventually(lambda: nbytes_of(daemon, "n=1,a") == 4 * MIB)
        assert [is_there(client, f"k{number}") for number in (7, 8)] == [False, True]
        set_rules('[namespace_ttls]\n"*" = "1s"\n')
        eventually(lambda: not daemon.status().entries, "they are older than that")
        (daemon.directory / "ecd.toml").write_text('[namespace_ttls]\n"*" = "soon"\n')
        os.kill(daemon.pid, signal.SIGHUP)
        said = "the settings stay as they are: namespace_ttls"
        eventually(lambda: said in daemon.text(), "it says what is wrong")
