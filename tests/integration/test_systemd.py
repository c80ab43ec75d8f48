"""The unit file and the daemon beneath it: notifications, watchdog, reload, logs, real systemd."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ecd_client import Client
from ecd_proto.v1 import cache_pb2 as pb
from support.daemon import Daemon, eventually
from support.nodes import LET_OTHERS_IN, SEEN

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
ECD = Path(sys.executable).with_name("ecd")


class Manager:
    """A socket where systemd would listen for notifications."""

    def __init__(self, directory: Path) -> None:
        self.address = str(directory / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self.heard: list[str] = []

    def hear(self, timeout_s: float) -> str | None:
        """The next message; None: there was none for so long."""
        self._socket.settimeout(timeout_s)
        try:
            self.heard.append(self._socket.recv(4096).decode().strip())
        except TimeoutError:
            return None
        return self.heard[-1]

    def wait_for(self, message: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.hear(1.0) != message:
            assert time.monotonic() < deadline, self.heard

    def fill(self) -> None:
        """Leave no room for another message, as when it does not read for a while."""
        sent = 1
        while sent:  # by a new sender, as each may have so much under way
            sent = 0
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
                contextlib.suppress(BlockingIOError),
            ):
                sender.setblocking(False)
                while sender.sendto(b"STATUS=full", self.address):
                    sent += 1

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path)
    yield manager
    manager.close()


def test_ready_is_said_once_the_pool_is_populated(manager: Manager, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, pool="3GiB", NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="900000")
    try:
        daemon.start(wait=False)
        manager.wait_for("READY=1")
        assert daemon.status().state == pb.StatusReply.STATE_SERVING
        before = manager.heard[:-1]
        assert before, "no word while it populated"
        assert all(said.startswith("STATUS=populating ") for said in before)
        manager.wait_for("STATUS=serving 0 entries")
        with Client(daemon.address) as client:
            for number in range(1204):
                client.put_bytes(str(number), b"x", "uint8", (1,))
            manager.wait_for("STATUS=serving 1,204 entries")
        daemon.terminate()
        manager.wait_for("STATUS=stopping")
    finally:
        daemon.close()


def test_a_manager_that_reads_late_learns_that_it_serves(manager: Manager, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="900000")
    try:
        manager.fill()
        daemon.start()
        time.sleep(0.5)
        manager.wait_for("READY=1", 20.0)
    finally:
        daemon.close()


BLOCKED_BY_SIGUSR1 = """
import asyncio, signal, time, uvloop
run = uvloop.run
def block():
    print("blocked", flush=True)
    time.sleep(6.0)
def run_blockable(main):
    async def work():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, block)
        await main
    run(work())
uvloop.run = run_blockable
from ecd.__main__ import main
main()
"""


def test_the_watchdog_hears_nothing_of_a_blocked_loop(manager: Manager, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="900000")
    daemon.command = (sys.executable, "-c", BLOCKED_BY_SIGUSR1, "serve")
    try:
        daemon.start()
        manager.wait_for("WATCHDOG=1")
        started_s = time.monotonic()
        for _ in range(4):
            manager.wait_for("WATCHDOG=1", 5.0)
        assert time.monotonic() - started_s < 4 * 0.9
        os.kill(daemon.pid, signal.SIGUSR1)
        eventually(lambda: "blocked" in daemon.text())
        while manager.hear(0.1):
            pass
        assert manager.hear(1.5) is None, "it says that it runs, and does not"
        manager.wait_for("WATCHDOG=1", 15.0)
    finally:
        daemon.close()


def test_a_daemon_whose_manager_went_away_serves_on(manager: Manager, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="90000")
    try:
        daemon.start()
        manager.close()
        os.unlink(manager.address)
        time.sleep(0.3)
        assert daemon.status().state == pb.StatusReply.STATE_SERVING
        assert "Traceback" not in daemon.text()
    finally:
        daemon.close()


def test_hangup_reloads_what_can_be_and_names_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "ecd.toml"
    file.write_text('zone = "a"\n')
    daemon = Daemon(
        tmp_path,
        ECD_PEER_ADDRESS="127.0.94.1:9465",
        ECD_PEERS="127.0.94.2:9465",
        ECD_ENGINE_PORTS="28000-28031",
    )
    daemon.command = (*Daemon.command, "--config", str(file))

    def reload(settings: str, expected: str) -> None:
        file.write_text(settings)
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: expected in daemon.text(), 5.0, expected)

    try:
        daemon.start()
        reload('zone = "a"\n', "no setting has changed")
        reload('zone = "a"\nfetch_timeout_s = 1.5\n', "fetch_timeout_s is 1.5 now")
        reload('zone = "b"\n', "fetch_timeout_s is 5.0 now")
        assert "zone changed: the next start takes it over" in daemon.text()
        reload("lease_ttl_s = 0.0\n", "the settings stay as they are: lease_ttl_s")
        reload("nonsense", "the settings stay as they are")
        file.unlink()
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: f"no such file: {file}" in daemon.text(), 5.0, "it says what is missing")
        with Client(daemon.address) as client:
            assert client.get("nobody has it") is None
    finally:
        daemon.close()


def test_hangup_ends_a_daemon_that_has_no_file(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path).start()
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: not daemon.shm.exists(), 10.0, "its files are gone")
    daemon.close()


def test_lines_carry_their_severity_to_the_journal(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.log.touch()
    there = daemon.log.stat()
    daemon._settings["JOURNAL_STREAM"] = f"{there.st_dev}:{there.st_ino}"
    daemon._settings["ECD_MISSPELT"] = "1"
    try:
        daemon.start()
        lines = daemon.text().splitlines()
        assert "<4>ecd: ECD_MISSPELT is not a setting of ecd: see `ecd config`" in lines
        assert any(line.startswith("<6>ecd.daemon: serving on ") for line in lines)
    finally:
        daemon.close()


def test_lines_are_json_where_that_is_wanted(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ECD_LOG_FORMAT="json")
    try:
        daemon.start()
        lines = [json.loads(line) for line in daemon.text().splitlines()]
        [serving] = [line for line in lines if line["message"].startswith("serving on ")]
        assert serving["level"] == "INFO"
        assert serving["logger"] == "ecd.daemon"
        assert serving["time"]
    finally:
        daemon.close()


# -- systemd ---------------------------------------------------------------------------------------


def unit(directory: Path, settings: Path) -> Path:
    """The unit as it is shipped, but for where the daemon and its settings are."""
    text = (UNITS / "ecd.service").read_text()
    for there, here in (("/opt/ecd/bin/ecd", ECD), ("/etc/ecd/ecd.toml", settings)):
        assert text.count(there) == 1
        text = text.replace(there, str(here))
    file = directory / "ecd.service"
    file.write_text(text)
    return file


@pytest.mark.parametrize("devices", [False, True])
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path, devices: bool) -> None:
    file = unit(tmp_path, tmp_path / "ecd.toml")
    if devices:
        (tmp_path / "ecd.service.d").mkdir()
        shutil.copy(UNITS / "devices.conf", tmp_path / "ecd.service.d")
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    assert not re.search(r"ecd\.service|devices\.conf", checked.stderr), checked.stderr
    exposed = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=40", file],
        capture_output=True,
        text=True,
    )
    assert exposed.returncode == 0, exposed.stdout


def test_the_settings_that_are_shipped_are_settings(tmp_path: Path) -> None:
    said = (UNITS / "ecd.toml").read_text()
    every = re.sub(r'^# (?=\[|"|\w+ = )', "", said, flags=re.MULTILINE)
    assert "\nnamespace" not in every
    assert every.count("\n[namespace_") == 2
    for text in (said, every):
        file = tmp_path / "ecd.toml"
        file.write_text(text)
        shown = subprocess.run(
            [ECD, "config", "--json", "--config", file],
            env={**os.environ, "ECD_PEER_TOKEN": "sixteen letters or more"},
            capture_output=True,
            text=True,
        )
        assert shown.returncode == 0, shown.stderr
    settings = json.loads(shown.stdout)
    assert settings["namespace_quotas"]["value"]
    assert settings["peers"]["value"]


def test_its_user_and_its_directory_are_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for tool, file in (("systemd-sysusers", "sysusers"), ("systemd-tmpfiles", "tmpfiles")):
        create = ["--create"] if file == "tmpfiles" else []
        command = [tool, f"--root={tmp_path}", *create, UNITS / f"ecd.{file}.conf"]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
    user = (tmp_path / "etc/passwd").read_text().split(":")
    assert user[0] == "ecd"
    uid, gid = int(user[2]), int(user[3])
    for directory, owner in (("etc/ecd", 0), ("dev/shm/ecd-default", uid)):
        made = (tmp_path / directory).stat()
        assert (made.st_uid, made.st_gid, made.st_mode & 0o777) == (owner, gid, 0o750)
    assert (tmp_path / "dev/shm/ecd-default/keep").stat().st_uid == uid


BELOW_TMP = " ".join(
    path
    for path in (sys.base_prefix, str(Path(__file__).parents[2]))
    if path.startswith(("/tmp/", "/var/tmp/"))
)
"""What the daemon needs and PrivateTmp would hide."""
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user", "umount", "final")
BOOT = f"""
set -e
mount --make-rprivate /
mkdir "$PLACE/keep"
{LET_OTHERS_IN}mount -t tmpfs none /run
mkdir -p /run/systemd/system /run/settings /run/out
cp "$PLACE/ecd.toml" /run/settings
for file in passwd group; do mount --bind "$PLACE/$file" /etc/$file; done
export container=ecd-test SYSTEMD_UNIT_PATH="$PLACE/units"
exec /lib/systemd/systemd --system --unit=multi-user.target --show-status=no
"""


class Machine:
    """systemd as the first process of namespaces of its own, with our unit and nothing else."""

    def __init__(self, place: Path) -> None:
        self.place = place
        units = place / "units"
        units.mkdir()
        for target in TARGETS:
            (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        unit(units, Path("/run/settings/ecd.toml"))
        (units / "ecd.service.d").mkdir()
        (units / "ecd.service.d" / "test.conf").write_text(
            "[Service]\n"
            "ProtectHome=no\n"  # the tests' Python may be in one
            f"BindReadOnlyPaths={BELOW_TMP}\n"
            f"StandardError=append:{place}/ecd.log\n"
            "WatchdogSec=6\nTimeoutStartSec=60\n"
        )
        (place / "ecd.toml").write_text(
            'name = "systemd-test"\nhost_pool_bytes = "64MiB"\nmetrics_address = "127.0.0.1:0"\n'
            'peer_address = "127.0.84.1:9465"\nengine_ports = "31000-31031"\n'
        )
        (place / "passwd").write_text(
            Path("/etc/passwd").read_text() + "ecd:x:993:993::/:/bin/sh\n"
        )
        (place / "group").write_text(Path("/etc/group").read_text() + "ecd:x:993:\n")
        (place / "boot").write_text(BOOT)
        self._process = subprocess.Popen(
            [*("unshare", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child"),
             *("--mount-proc", "sh", place / "boot")],
            env={
                "PATH": os.environ["PATH"],
                "PLACE": str(place),
                "SEEN": SEEN,
            },
            stdin=subprocess.DEVNULL,
            stdout=(place / "systemd.log").open("w"),
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        eventually(lambda: self.systemctl("is-active", "multi-user.target"), 20.0, "it is up")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command beside its first process."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        first = children.read_text().split()
        return subprocess.run(
            ["nsenter", "--target", first[0] if first else "-", "--all", *command],
            capture_output=True,
            text=True,
        )

    def systemctl(self, *arguments: str) -> str:
        """Run systemctl; returns its answer, empty if it fails."""
        done = self.run("systemctl", *arguments)
        return done.stdout.strip() if done.returncode == 0 else ""

    def show(self, what: str) -> str:
        return self.systemctl("show", "ecd", "--value", f"--property={what}")

    def log(self) -> str:
        return (self.place / "ecd.log").read_text()

    def close(self) -> None:
        self.systemctl("stop", "ecd")
        self._process.kill()
        self._process.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def test_systemd_runs_the_unit(machine: Machine) -> None:
    started = machine.run("systemctl", "start", "ecd")
    assert started.returncode == 0, started.stderr + machine.show("Result")
    assert machine.show("User") == "ecd"
    eventually(lambda: machine.show("StatusText") == "serving 0 entries", 5.0, "it says so")
    pid = machine.show("MainPID")
    cli = [f"{ECD}-cli", "--address", "unix:///run/ecd/ecd.sock"]
    status = machine.run(*cli, "--json", "status")
    assert json.loads(status.stdout)["pid"] == int(pid)

    machine.run("sed", "-i", '$ a log_level = "debug"', "/run/settings/ecd.toml")
    assert machine.run("systemctl", "reload", "ecd").returncode == 0
    eventually(lambda: "log_level is debug now" in machine.log(), 5.0, "it reloads")
    assert machine.show("MainPID") == pid

    file = str(machine.place / "k.safetensors")
    save_file({"k": torch.arange(1000)}, file)
    assert machine.run(*cli, "put", "k", file).returncode == 0
    assert machine.run("systemctl", "restart", "ecd").returncode == 0
    assert machine.show("MainPID") != pid
    assert machine.run(*cli, "get", "k", "-o", file).returncode == 0, "a restart keeps the cache"
    assert torch.equal(load_file(file)["embedding"], torch.arange(1000))

    machine.run("kill", "-KILL", machine.show("MainPID"))
    eventually(lambda: machine.show("NRestarts") == "1", 10.0, "it comes back")
    eventually(lambda: machine.show("ActiveState") == "active", 20.0, "it serves")

    machine.run("kill", "-STOP", machine.show("MainPID"))
    eventually(lambda: machine.show("NRestarts") == "2", 40.0, "one that hangs is replaced")
    eventually(lambda: machine.show("ActiveState") == "active", 20.0, "it serves")

    assert machine.run("systemctl", "stop", "ecd").returncode == 0
    assert machine.show("ActiveState") == "inactive"
    cleared = machine.run(str(ECD), "clear", "--config", "/run/settings/ecd.toml")
    assert re.fullmatch(r"removed 6[45][.\d]* MiB\n", cleared.stdout), cleared.stderr
    assert not Path("/dev/shm/ecd-systemd-test").exists()
