"""The diagnosis of a daemon by what it says of itself: for `ecd-cli` and for its status page."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecd_proto.contract import (
    GONE,
    NEVER_ASKED,
    REFUSES,
    count_text,
    duration_text,
    size_text,
)
from ecd_proto.engines import Engine, advice, difference, lonely, nearest
from ecd_proto.mapped_file import HUGE_BYTES, HUGE_SHARE
from ecd_proto.v1 import cache_pb2 as pb

GOOD, DOUBTFUL, BAD = "ok", "look", "fix"
MAX_AWAY = 8
"""Unreachable peers that have a finding each."""
MAX_ENGINE_FINDINGS = 8
CONTEXT_BYTES = 512 << 20
"""Memory of a GPU that CUDA takes for a process, about: vLLM does not count it as its own."""
SHMEM_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
COLLAPSES_SINCE = (6, 1)
"""The version of Linux that first moves pages of shared memory to huge ones when asked to."""
SERVING = pb.StatusReply.STATE_SERVING


@dataclass(frozen=True)
class Finding:
    """The result of one check, and advice about it unless it is GOOD."""

    check: str
    state: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Refusal:
    """A cause for which the daemon refuses requests, in words, and what to do about it."""

    noun: str
    what: str
    advice: str

    def text(self, count: int) -> str:
        return f"{count_text(count, self.noun)} {self.what}"


_LARGER_POOL = "raise ECD_HOST_POOL_BYTES if that goes on"
_FEWER_HELD = "look for a client that asks without end, or never releases: ecd-cli clients"
REFUSALS = {
    "entry_too_large": Refusal("put", "larger than the pool", _LARGER_POOL),
    "pool_full": Refusal(
        "put",
        "refused, as the pool was full of what was in use or kept",
        f"`ecd-cli clients` shows who uses it; {_LARGER_POOL}",
    ),
    "quota_full": Refusal(
        "put", "above its namespace's quota", "raise ECD_NAMESPACE_QUOTAS if that goes on"
    ),
    "kept": Refusal(
        "keep",
        "refused: too much was kept",
        "end some with `ecd-cli unkeep`",
    ),
    "sessions": Refusal(
        "session", "refused: there were too many", "look for clients that connect and never close"
    ),
    "peer_links": Refusal(
        "link", "of another node refused: there were too many", "look at who reaches the peer port"
    ),
    "peer_proofs": Refusal(
        "call",
        "of another node refused: it did not prove that it has the token",
        "the log has its address; set one peer_token on all nodes, and their clocks (NTP)",
    ),
    "peer_turns": Refusal(
        "turn",
        "of another node to read refused: too many waited, or too long",
        "raise readers_per_entry if the network carries more",
    ),
    "long_peer_turns": Refusal(
        "turn",
        "of another node to read took over a second while others waited",
        "look for a node that has stopped, or a slow link",
    ),
    "reservations": Refusal("put", "refused: its session had too many under way", _FEWER_HELD),
    "leases": Refusal("lease", "refused: its session had too many", _FEWER_HELD),
    "waits": Refusal("wait", "refused: its session had too many", _FEWER_HELD),
    "makings": Refusal(
        "encode", "not announced to other nodes: too many were", "nothing: it may be made twice"
    ),
    "engines": Refusal(
        "engine", "not shown or compared: there were too many", "nothing: it shares all the same"
    ),
    "encoders": Refusal(
        "encoder", "not registered: there were too many", "look for clients that register many"
    ),
}
"""The words for each cause in `Counters.refused`."""
POOL_CAUSES = "entry_too_large", "pool_full"
"""The causes that the finding about the pool tells of; the advice for the last is for all."""


def refusal(cause: str) -> Refusal:
    """The words for a cause, which may be of a newer daemon."""
    return REFUSALS.get(cause) or Refusal("request", f"refused: {cause}", "upgrade ecd-cli")


def host_pools(status: pb.StatusReply) -> list[pb.PoolStatus]:
    """The pools of entries: a device's has copies alone."""
    return [pool for pool in status.pools if pool.kind != "device"]


def populated(status: pb.StatusReply) -> str:
    """How much of the pools of a daemon that starts has memory."""
    pools = host_pools(status)
    populated_bytes = sum(pool.populated_bytes for pool in pools)
    return f"{100 * populated_bytes // max(1, sum(pool.pool_bytes for pool in pools))} %"


def examine(status: pb.StatusReply, peers: pb.PeersReply) -> Iterator[Finding]:
    """Every check that a daemon's own figures allow."""
    yield daemon(status)
    if status.pools:  # a daemon of the contract before names none
        yield pool(status)
        if status.unlisted and status.state == SERVING:
            yield unlisted(status)
        if status.state == SERVING:
            yield huge_pages(status)
        yield from (device_pool(each) for each in status.pools if each.kind == "device")
    if status.HasField("disk"):
        yield disk(status.disk)
    yield from engines(status)
    if peers.node:
        yield from nodes(peers)


def daemon(status: pb.StatusReply) -> Finding:
    name = pb.StatusReply.State.Name(status.state).removeprefix("STATE_").lower()
    if status.state == SERVING:
        return Finding(
            "daemon", GOOD, f"serves {count_text(status.entries, 'entry')}, pid {status.pid}"
        )
    found = f"is {name}"
    if status.state == pb.StatusReply.STATE_POPULATING:
        found += f" its pool: {populated(status)}"
    return Finding("daemon", DOUBTFUL, found, "wait; its log says how far it is")


def unlisted(status: pb.StatusReply) -> Finding:
    """Describe entries that are not in the index; there are some."""
    advice = "make /dev/shm larger, or the pool smaller (ECD_HOST_POOL_BYTES)"
    found = f"{status.unlisted:,} of {status.entries:,} entries take a call: no memory for rows"
    return Finding("reading", DOUBTFUL, found, advice)


def pool(status: pb.StatusReply) -> Finding:
    pools = host_pools(status)
    pool_bytes = sum(each.pool_bytes for each in pools)
    share = sum(each.used_bytes for each in pools) / max(1, pool_bytes)
    found = f"{size_text(pool_bytes)}, {share:.0%} in use"
    if not (causes := [cause for cause in POOL_CAUSES if status.counters.refused[cause]]):
        return Finding("pool", GOOD, found)
    refused = "; ".join(REFUSALS[each].text(status.counters.refused[each]) for each in causes)
    found += f"; {refused}, in {duration_text(status.uptime_s)}"
    advice = REFUSALS[causes[-1]].advice
    if kept_bytes := sum(each.kept_bytes for each in pools):
        found += f"; {size_text(kept_bytes)} are kept"
        advice = f"`ecd-cli ls --kept` lists what is kept, `ecd-cli unkeep` ends a keep; {advice}"
    return Finding("pool", DOUBTFUL, found, advice)


def huge_pages(status: pb.StatusReply) -> Finding:
    """Check that clients need not take a page fault for every 4 KiB that they touch first."""
    pools = host_pools(status)
    possible_bytes = sum(each.populated_bytes // HUGE_BYTES * HUGE_BYTES for each in pools)
    share = sum(each.huge_bytes for each in pools) / possible_bytes if possible_bytes else 1.0
    found = f"{share:.0%} of the pool lies in huge pages"
    if share >= HUGE_SHARE:
        return Finding("huge pages", GOOD, found)
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < COLLAPSES_SINCE:
        advice = "Linux 6.1 or newer; until then the first use of memory takes longer"
    elif _setting(SHMEM_HUGE_PAGES) == "deny":
        advice = f"echo never > {SHMEM_HUGE_PAGES}, and start the daemon anew"
    else:
        advice = "memory is in pieces: start the daemon before others, or lower the pool's size"
    return Finding("huge pages", DOUBTFUL, found, advice)


def _setting(path: str) -> str:
    """The word in brackets, which is in force, of a kernel's setting; "" if there is none."""
    with contextlib.suppress(OSError):
        chosen = re.search(r"\[(\w+)\]", Path(path).read_text())
        return chosen[1] if chosen else ""
    return ""


def utilization_left(pool_bytes: int, device_bytes: int) -> str:
    """Advice on the share of a GPU that vLLM may take beside a device pool and its own context."""
    left = math.floor(100 * (1 - (pool_bytes + CONTEXT_BYTES) / max(1, device_bytes))) / 100
    return (
        f"start an engine there with --gpu-memory-utilization {max(0.0, left):.2f} or less, and as "
        "much less as its log says for loads"
    )


def device_pool(each: pb.PoolStatus) -> Finding:
    size = size_text(each.pool_bytes)
    if each.populated_bytes:
        left = f"; {utilization_left(each.pool_bytes, each.device_bytes)}" * bool(each.device_bytes)
        return Finding("device pool", GOOD, f"{size} on {each.path}{left}")
    found = f"{size} on {each.path}: {each.problem or 'no memory'}; engines use the host pool"
    advice = "stop what fills the GPU, or lower ECD_DEVICE_POOL_BYTES and restart the daemon"
    return Finding("device pool", DOUBTFUL, found, advice)


def disk(status: pb.DiskStatus) -> Finding:
    resting = disk_rests(status)
    share = status.used_bytes / max(1, status.pool_bytes)
    found = f"{size_text(status.pool_bytes)}, {share:.0%} in use"
    if not resting:
        return Finding("disk tier", GOOD, found)
    advice = f"the log says why; check the disk that has {status.path}"
    if status.is_full:
        advice = (
            f"free space on the disk that has {status.path}, or lower ECD_DISK_POOL_BYTES to what "
            "that disk has room for"
        )
    return Finding("disk tier", DOUBTFUL, f"{found}; {resting}", advice)


def disk_rests(status: pb.DiskStatus) -> str:
    """Which of the disk's reads and writes rest, and why; "" if none does."""
    failed = ["reads"] if status.reads_rest else []
    if status.writes_rest and not status.is_full:
        failed.append("writes")
    after = [f"{' and '.join(failed)} rest after failures"] if failed else []
    return "; ".join((["the disk is full: writes rest"] if status.is_full else []) + after)


def engines(status: pb.StatusReply) -> Iterator[Finding]:
    """Check that engines share, and none is kept from what another one of its model stores."""
    known = [Engine.of(each.engine, each.pid) for each in status.engines]
    described = [engine for engine in known if engine is not None]
    found: dict[object, Finding] = {}
    for engine in lonely(described):
        other = nearest(engine, described)
        if other is not None:
            text = (
                f"pid {engine.pid} finds nothing of what pid {other.pid} stores for one model "
                f"({engine.model}): their namespaces differ in {difference(engine, other)}"
            )
            pair = frozenset((engine.namespace, other.namespace))
            found.setdefault(pair, Finding("engines", DOUBTFUL, text, advice(engine, other)))
    for engine in described:
        if not (engine.stores or engine.loads):
            text, log = f"pid {engine.pid} shares {engine.shares}", "its log says what helps"
            found.setdefault(engine.id, Finding("engines", DOUBTFUL, text, log))
    yield from list(found.values())[:MAX_ENGINE_FINDINGS]
    if described and not found:
        count = count_text(len({each.id for each in described}), "engine")
        yield Finding("engines", GOOD, f"{count}: none is kept from what another one stores")


_REFUSALS_OF_REDIS = {
    "without any password": "take the password out of the URL of ECD_DIRECTORY",
    "NOAUTH|WRONGPASS|username-password|[Ii]nvalid password|Authentication required|"
    "already authenticated": "put the user and the password into the URL of ECD_DIRECTORY",
    "maxmemory|OOM": "raise maxmemory of that Redis: it is full",
    "DB index|invalid DB": "mend the number of the database in the URL of ECD_DIRECTORY",
    "Cluster mode is not enabled": "begin the URL of ECD_DIRECTORY with redis:// or rediss://",
    "NOPERM|no permissions": "allow the user of ECD_DIRECTORY the command that is named",
    "read only replica": "name the primary in ECD_DIRECTORY: a replica takes no writes",
    "MISCONF": "free space where that Redis saves its data; its log has the error",
    "loading the dataset": "wait: that Redis has started, and reads its data",
    "max number of clients": "raise maxclients of that Redis",
    "CLUSTERDOWN|Hash slot": "mend that Redis Cluster: redis-cli --cluster check",
}
"""Advice by what Redis says, the first that fits."""


_ADVICE_ON_PEERS = "start it, or compare its token, TLS files, protocol and clock with this node's"


def nodes(peers: pb.PeersReply) -> Iterator[Finding]:
    """Check the directory, and up to MAX_AWAY of the nodes that cannot be reached."""
    directory = peers.directory
    if directory.up:
        yield Finding("directory", GOOD, directory.kind)
    else:
        yield Finding("directory", BAD, *directory_down(directory))
    if configured := [peer for peer in peers.peers if peer.configured]:
        yield _configured(configured)
    away = [peer for peer in peers.peers if peer.state == "unreachable" and not peer.configured]
    away.sort(key=lambda peer: not peer.incarnation)  # anybody can make up a node's name
    if not (away or configured):
        yield _known(peers)
    for peer in away[:MAX_AWAY]:
        yield Finding("peers", BAD, f"{peer.node}: {peer.last_error}", _ADVICE_ON_PEERS)
    if len(away) > MAX_AWAY:
        found = f"{len(away) - MAX_AWAY:,} more are unreachable"
        yield Finding("peers", BAD, found, "ecd-cli peers has all of them")


def directory_down(directory: pb.DirectoryStatus) -> tuple[str, str]:
    """How a directory fails that is down, and advice."""
    said = directory.last_error.removeprefix(REFUSES)
    for pattern, remedy in _REFUSALS_OF_REDIS.items():
        if re.search(pattern, said):
            return f"{directory.kind} {REFUSES}{said}", remedy
    if said != directory.last_error:
        return f"{directory.kind} {REFUSES}{said}", "its documentation and log explain that answer"
    remedy = f"check that {directory.kind} runs, and that ECD_DIRECTORY leads to it"
    return f"{directory.kind} does not answer: {said}", remedy


def _known(peers: pb.PeersReply) -> Finding:
    """Count the nodes that the settings do not name; none is unreachable."""
    there = [peer for peer in peers.peers if peer.state != GONE]
    known = max(len(there), peers.directory.nodes - 1)
    found = f"{known:,} known, none unreachable"
    if not known and peers.directory.nodes:
        advice = (
            "start the others with the same ECD_DIRECTORY and ECD_CLUSTER; daemons of older "
            "versions are not listed"
        )
        return Finding("peers", DOUBTFUL, f"{peers.directory.kind} lists no other node", advice)
    asked = sum(peer.state != NEVER_ASKED for peer in there)
    return Finding("peers", GOOD, found + (f"; {known - asked:,} never asked" * (known > asked)))


def _configured(peers: Sequence[pb.PeerStatus]) -> Finding:
    """Count the nodes of the settings that answer, and name up to MAX_AWAY that do not."""
    silent = [peer for peer in peers if peer.state not in ("connected", "idle")]
    answer = len(peers) - len(silent)
    verb = "answers" if answer == 1 else "answer"
    found = f"{answer:,} of {len(peers):,} configured nodes {verb}"
    away = [peer for peer in silent if peer.state == "unreachable"]
    if away:
        named = "; ".join(f"{peer.node}: {peer.last_error}" for peer in away[:MAX_AWAY])
        more = f"; and {len(away) - MAX_AWAY:,} more" if len(away) > MAX_AWAY else ""
        return Finding("peers", BAD, f"{found}, not {named}{more}", _ADVICE_ON_PEERS)
    if silent:
        trying = ", ".join(peer.node for peer in silent)
        return Finding("peers", DOUBTFUL, f"{found} so far, not {trying}", "look again in a second")
    return Finding("peers", GOOD, found)
