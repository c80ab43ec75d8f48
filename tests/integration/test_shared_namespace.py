"""The engine's namespace in memory: whose memory the API server reads."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecd_client.vllm.base.identity.shared_namespace import SeenNamespace, SharedNamespace
from ecd_proto.mapped_file import memory_file
from support.processes import child
from support.users import MALLORY, acting_as, needs_root

SEAL_EXEC = 0x20
"""F_SEAL_EXEC of Linux 6.3."""
MAKE = """
import os, sys
fd = os.memfd_create(sys.argv[1], os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 4096)
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def instance() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def shared(instance: str) -> Iterator[SharedNamespace]:
    shared = SharedNamespace(instance)
    yield shared
    shared.close()


def test_the_api_server_reads_what_the_engine_writes(
    instance: str, shared: SharedNamespace
) -> None:
    seen = SeenNamespace(instance)
    assert seen.read() is None
    for namespace in ("model|files-1", None, "model|files-2"):
        shared.write(namespace)
        assert seen.read() == namespace
    with pytest.raises(FileNotFoundError):
        SeenNamespace(instance + "0")


def test_nobody_changes_the_size_of_what_is_read(instance: str, shared: SharedNamespace) -> None:
    shared.write("model")
    seen = SeenNamespace(instance)
    for nbytes in (0, 2 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(shared._fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(shared._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    shared.write("another")
    assert seen.read() == "another"


@needs_root
def test_memory_of_another_user_is_not_read(instance: str) -> None:
    """Root sees everybody's, of processes with lower numbers first."""
    with acting_as(MALLORY):
        other = SharedNamespace(instance)
    other.write("mallory's")
    with pytest.raises(FileNotFoundError):
        SeenNamespace(instance)
    own = SharedNamespace(instance)
    own.write("model")
    assert SeenNamespace(instance).read() == "model"
    own.close()
    other.close()


def test_memory_that_may_shrink_is_not_read(instance: str) -> None:
    command = [sys.executable, "-c", MAKE, f"ecd-namespace-{instance}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with child(command, **pipes) as maker:
        assert maker.stdout.readline() == "made\n"
        with pytest.raises(FileNotFoundError):
            SeenNamespace(instance)


def test_memory_keeps_its_size_and_cannot_be_executed() -> None:
    """Linux 6.3 to 6.5 refuse any other where `vm.memfd_noexec` is 2."""
    fd = memory_file("of a test", mmap.PAGESIZE)
    if Path("/proc/sys/vm/memfd_noexec").exists():
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEAL_EXEC
    for nbytes in (0, 2 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    os.close(fd)
