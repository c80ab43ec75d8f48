"""Nodes for a test: network namespaces joined by a cable, each with a /dev/shm of its own.

Everything ends with the processes that hold the namespaces, and those with the test's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.processes import child, run
from support.waiting import HANG_S, eventually

NETWORK = "10.77.0"
CLIENT = Path(__file__).with_name("node_client.py")

LET_OTHERS_IN = """
for path in $SEEN; do  # whoever's home they are in, other users may come there
  ancestor=$path
  while [ -n "$ancestor" ] && [ -n "$(find "$ancestor" -maxdepth 0 -perm -o=x)" ]; do
    ancestor=${ancestor%/*}
  done
  [ -n "$ancestor" ] || continue
  mount --bind "$path" "$PLACE/keep"
  mount -t tmpfs -o mode=755 none "$ancestor"
  mkdir -p "$path"
  mount --bind "$PLACE/keep" "$path"
done
"""
"""For a shell in a mount namespace of its own, where $PLACE/keep is a directory."""
SEEN = shlex.join([sys.base_prefix, str(Path(__file__).parents[2])])
"""What a daemon needs to see: Python and this tree."""


class Node:
    """One namespace, its address, and commands run in it."""

    def __init__(self, number: int) -> None:
        self.address = f"{NETWORK}.{number}"
        self.peer = f"{self.address}:9465"
        # The holder dies with us, however we die.
        command = "setpriv --pdeathsig KILL unshare --net --mount sleep infinity"
        self._life = contextlib.ExitStack()
        self._holder = self._life.enter_context(child(shlex.split(command)))
        own = os.readlink("/proc/self/ns/net")

        def is_apart() -> bool:
            if self._holder.poll() is not None:
                pytest.fail("this machine makes no network namespaces: run as root, or in a VM")
            return self._namespace() not in ("", own)

        eventually(is_apart, "a network namespace")
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.run("ip", "link", "set", "lo", "up")
        # Or the kernel tries to connect for two minutes where nobody answers.
        self.run("sysctl", "-qw", "net.ipv4.tcp_syn_retries=1")

    def _namespace(self) -> str:
        try:
            return os.readlink(f"/proc/{self._holder.pid}/ns/net")
        except OSError:
            return ""

    @property
    def prefix(self) -> list[str]:
        """The words that, before a command, run it on this node."""
        return ["nsenter", "-t", str(self._holder.pid), "-n", "-m", "--"]

    def run(self, *command: str) -> str:
        done = run([*self.prefix, *command], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def plug(self, other: Node) -> None:
        """A cable to the other node."""
        pid = str(other._holder.pid)
        self.run(
            *("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", pid)
        )
        for node in (self, other):
            node.run("ip", "addr", "add", f"{node.address}/24", "dev", "eth0")
            node.run("ip", "link", "set", "eth0", "up")

    def switch(self, nodes: Sequence[Node]) -> None:
        """Be the switch that all of them have a cable to."""
        self.run("ip", "link", "add", "switch", "up", "type", "bridge")
        for number, node in enumerate(nodes):
            port, pid = f"port{number}", str(node._holder.pid)
            self.run(
                *("ip", "link", "add", port, "master", "switch", "up", "type", "veth"),
                *("peer", "name", "eth0", "netns", pid),
            )
            node.run("ip", "addr", "add", f"{node.address}/24", "dev", "eth0")
            node.run("ip", "link", "set", "eth0", "up")

    def cable(self, up: bool) -> None:
        self.run("ip", "link", "set", "eth0", "up" if up else "down")

    def drop(self, other: Node, dropped: bool) -> None:
        """Every packet to the other node is lost on the way, or no longer."""
        if dropped:
            lost = "02:00:00:00:00:99"  # nobody's
            self.run(
                *("ip", "neigh", "replace", other.address, "lladdr", lost, "dev", "eth0"),
                *("nud", "permanent"),
            )
        else:
            self.run("ip", "neigh", "del", other.address, "dev", "eth0")

    def throttle(self, rate: str, limit: str = "1mb") -> None:
        """Send no faster than `rate`; what `limit` does not hold is lost."""
        self.run(
            *("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate),
            *("burst", "128kb", "limit", limit),
        )

    def close(self) -> None:
        self._life.close()


class NodeDaemon(Daemon):
    """A daemon on a node; its socket is a path that every namespace sees."""

    def __init__(self, node: Node, directory: Path, pool: str = "64MiB", **settings: str) -> None:
        clustered = {
            "ECD_PEER_ADDRESS": node.peer,
            "ECD_PEER_TOKEN": "a secret of the test",
            "ECD_HINT_NETWORKS": f"{NETWORK}.0/24",
            "ECD_WARM_RESTART": "false",  # what it leaves is in a /dev/shm that is not ours
        }
        super().__init__(directory, pool, **{**clustered, **settings})
        self.node = node
        self.prefix = node.prefix

    def metrics(self) -> str:
        url = self.metrics_url()
        read = f"import urllib.request as u; print(u.urlopen({url!r}).read().decode())"
        return self.node.run(sys.executable, "-c", read)


class NodeClient:
    """A client process on a node, told what to do."""

    def __init__(self, daemon: NodeDaemon) -> None:
        command = [*daemon.node.prefix, sys.executable, str(CLIENT), daemon.address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._life = contextlib.ExitStack()
        self._process = self._life.enter_context(child(command, **pipes, text=True, bufsize=1))
        assert self._read() == "ready"

    def send(self, do: str, **what: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **what}), file=self._process.stdin)

    def receive(self) -> dict:
        return json.loads(self._read())

    def has_said(self) -> bool:
        """Whether `receive` returns at once."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def ask(self, do: str, **what: object) -> dict:
        self.send(do, **what)
        return self.receive()

    def put(self, key: str, nbytes: int = 1 << 20, seed: int = 1) -> None:
        assert self.ask("put", key=key, nbytes=nbytes, seed=seed) == {"stored": True}

    def get(
        self, key: str, timeout: float = HANG_S, nodes: Sequence[str] = (), seed: int = 1
    ) -> dict:
        """`found`, `right` (the bytes are those of `seed`) and `seconds`."""
        return self.ask("get", key=key, timeout=timeout, nodes=list(nodes), seed=seed)

    def _read(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], HANG_S)
        assert ready, f"the client said nothing within {HANG_S} s"
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """Have the client close, as it does when nothing more is asked."""
        with self._life:
            self._process.communicate(timeout=HANG_S)
