"""The unit file and the daemon beneath it: notifications, watchdog, reload, logs, real systemd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ecd.base.clock import Clock
from ecd.ops.service_manager import ServiceManager
from ecd.settings.config import RELOADABLE
from ecd_client import Client
from ecd_client.errors import EntryTooLarge
from ecd_proto.v1 import cache_pb2 as pb
from support.daemon import Daemon, changed
from support.nodes import LET_OTHERS_IN, SEEN
from support.processes import child, run
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
ECD = Path(sys.executable).with_name("ecd")


MakeDaemon = Callable[..., Daemon]
TALKATIVE = changed(
    "from ecd.ops.service_manager import ServiceManager as Manager",
    "ready, say = Manager.ready, Manager.say",
    "Manager.ready = lambda self: (ready(self), print('ready:', self._is_ready_told, flush=True))",
    "Manager.say = lambda self, status: (say(self, status), print('said', flush=True))",
)
"""A daemon whose log has what it tried to tell its manager."""
BLOCKABLE = changed(
    "import signal",
    "block = lambda *_: (print('blocked', flush=True), signal.pause())",
    "signal.signal(signal.SIGUSR1, block)",
    "signal.signal(signal.SIGUSR2, lambda *_: None)",
)
"""A daemon whose event loop stands still from SIGUSR1 to SIGUSR2."""


class Manager:
    """A socket where systemd would listen for notifications."""

    def __init__(self, directory: Path) -> None:
        self.address = str(directory / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self.heard: list[str] = []

    def hear(self, timeout_s: float = 0.0) -> str | None:
        """The next message; None: there was none for so long."""
        self._socket.settimeout(timeout_s)
        try:
            self.heard.append(self._socket.recv(4096).decode().strip())
        except (BlockingIOError, TimeoutError):
            return None
        return self.heard[-1]

    def wait_for(self, message: str) -> None:
        eventually(lambda: self.hear() == message, message)

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


@pytest.fixture
def supervised(make_daemon: MakeDaemon, manager: Manager) -> MakeDaemon:
    """Make a daemon that has this manager."""

    def make(command: tuple[str, ...], watchdog_us: str = "900000") -> Daemon:
        daemon = make_daemon(NOTIFY_SOCKET=manager.address, WATCHDOG_USEC=watchdog_us)
        daemon.command = command
        return daemon

    return make


def test_ready_is_said_once_the_pool_is_populated(manager: Manager, supervised: MakeDaemon) -> None:
    daemon = supervised(changed("import ecd.daemon", "ecd.daemon.PROGRESS_S = 0.0"))
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


def test_a_manager_that_reads_late_learns_that_it_serves(
    manager: Manager, supervised: MakeDaemon
) -> None:
    daemon = supervised(TALKATIVE)
    manager.fill()
    daemon.start()
    eventually(lambda: "ready: False" in daemon.text(), "it could not say so")
    manager.wait_for("READY=1")


@pytest.mark.parametrize(("watchdog_us", "period_s"), [("900000", 0.3), ("30000000", 5.0)])
def test_the_watchdog_hears_of_the_loop_as_often_as_it_wants(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, watchdog_us: str, period_s: float
) -> None:
    """Three times, or every STATUS_PERIOD_S for the status line's sake."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", watchdog_us)
    heard_by_pause = []

    class Heard(Clock):
        async def sleep(self, seconds: float) -> None:
            said = list(iter(manager.hear, None))
            heard_by_pause.append((seconds, said))
            if len(heard_by_pause) == 3:
                raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ServiceManager(Heard()).keep_alive(lambda: "serving"))
    says = ["STATUS=serving", "WATCHDOG=1"]
    assert heard_by_pause == [
        (pytest.approx(period_s), said) for said in (["READY=1", *says], says, says)
    ]


def test_the_watchdog_hears_nothing_of_a_blocked_loop(
    manager: Manager, supervised: MakeDaemon
) -> None:
    daemon = supervised(BLOCKABLE, watchdog_us="9000").start()
    manager.wait_for("WATCHDOG=1")
    os.kill(daemon.pid, signal.SIGUSR1)
    eventually(lambda: "blocked" in daemon.text())
    while manager.hear():
        pass
    assert manager.hear(0.3) is None, "it says that it runs, and does not"
    os.kill(daemon.pid, signal.SIGUSR2)
    manager.wait_for("WATCHDOG=1")


def test_a_daemon_whose_manager_went_away_serves_on(
    manager: Manager, supervised: MakeDaemon
) -> None:
    daemon = supervised(TALKATIVE, watchdog_us="90000").start()
    manager.close()
    os.unlink(manager.address)
    said = daemon.text().count("said")
    eventually(lambda: daemon.text().count("said") > said + 1, "it goes on saying so")
    assert daemon.status().state == pb.StatusReply.STATE_SERVING
    assert "Traceback" not in daemon.text()


def test_hangup_reloads_what_can_be_and_names_the_rest(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "ecd.toml"
    file.write_text('zone = "a"\n')
    daemon = make_daemon(
        ECD_PEER_ADDRESS="127.0.94.1:9465",
        ECD_PEERS="127.0.94.2:9465",
        ECD_ENGINE_PORTS="28000-28031",
    )
    daemon.command = (*Daemon.command, "--config", str(file))

    def reload(settings: str | None, *expected: str) -> None:
        if settings is None:
            file.unlink()
        else:
            file.write_text(settings)
        os.kill(daemon.pid, signal.SIGHUP)
        for line in expected:
            eventually(lambda line=line: line in daemon.text(), line)

    daemon.start()
    reload('zone = "a"\n', "no setting has changed")
    reload('zone = "a"\nfetch_timeout_s = 1.5\n', "fetch_timeout_s is 1.5 now")
    late = "zone changed: the next start takes it over"
    reload('zone = "b"\n', "fetch_timeout_s is 5.0 now", late)
    reload("lease_ttl_s = 0.0\n", "the settings stay as they are: lease_ttl_s")
    reload("nonsense", "Expected '='")
    reload(None, f"no such file: {file}")
    with Client(daemon.address) as client:
        assert client.get("nobody has it") is None


def test_a_reload_says_that_a_smaller_pool_is_a_cold_start(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "ecd.toml"
    file.write_text('host_pool_bytes = "16MiB"\n')
    daemon = make_daemon()
    daemon.prefix = "env", "-u", "ECD_HOST_POOL_BYTES"
    daemon.command = (*Daemon.command, "--config", str(file))
    daemon.start()
    file.write_text('host_pool_bytes = "32MiB"\n')
    os.kill(daemon.pid, signal.SIGHUP)
    said = (
        "host_pool_bytes changed: the next start takes it over; if the pool is smaller than it was"
    )
    eventually(lambda: said in daemon.text(), said)


def test_a_hangup_ends_no_daemon_that_has_no_file(make_daemon: MakeDaemon) -> None:
    """A terminal that closes sends one, also to what was started by nohup."""
    daemon = make_daemon().start()
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: "SIGHUP changes nothing: there is no --config" in daemon.text())
    with Client(daemon.address) as client:
        assert client.put_bytes("k", b"1", "uint8", (1,))
    assert daemon.terminate() == 0
    assert "ecd.daemon: stopping: SIGTERM" in daemon.text()


def test_settings_of_a_pipe_are_read_once(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    serve = shlex.join([*Daemon.command, "--config", "/dev/stdin"])
    daemon.command = ("bash", "-c", f"exec {serve} < <(echo \"zone = 'west'\")")
    daemon.start()
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: "there is no --config that can be read again" in daemon.text())


def test_lines_carry_their_severity_to_the_journal(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ECD_MISSPELT="1")
    daemon.log.touch()
    there = daemon.log.stat()
    daemon._settings["JOURNAL_STREAM"] = f"{there.st_dev}:{there.st_ino}"
    lines = daemon.start().text().splitlines()
    assert "<4>ecd: ECD_MISSPELT is not a setting of ecd: see `ecd config`" in lines
    assert any(line.startswith("<6>ecd.daemon: serving on ") for line in lines)


def test_lines_are_json_where_that_is_wanted(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ECD_LOG_FORMAT="json").start()
    lines = [json.loads(line) for line in daemon.text().splitlines()]
    [serving] = [line for line in lines if line["message"].startswith("serving on ")]
    assert serving["level"] == "INFO"
    assert serving["logger"] == "ecd.daemon"
    assert datetime.fromisoformat(serving["time"]).utcoffset() == timedelta(0), "RFC 3339"


def test_json_lines_have_fields_for_peers_and_entries(make_daemon: MakeDaemon) -> None:
    nobody = "127.0.94.2:9465"
    daemon = make_daemon(
        ECD_LOG_FORMAT="json",
        ECD_PEER_ADDRESS="127.0.94.1:9465",
        ECD_ENGINE_PORTS="30032-30063",
        ECD_PEERS=nobody,
        ECD_SLOW_LOG_S="0",
    ).start()

    def line(text: str) -> dict[str, object]:
        eventually(lambda: text in daemon.text(), text)
        lines = [each for each in daemon.text().splitlines() if each.startswith("{")]
        return next(each for each in map(json.loads, lines) if text in str(each["message"]))

    with Client(daemon.address, namespace="n") as client:
        with pytest.raises(EntryTooLarge):
            client.put_bytes("large", bytes(65 << 20), "uint8", (65 << 20,))
        client.put_bytes("k", b"1", "uint8", (1,))
    refused, away, slow = (line(text) for text in ("is refused", f"peer {nobody}: ", "slow: "))
    assert (refused["namespace"], refused["nbytes"]) == ("n", 65 << 20)
    assert (away["level"], away["peer"]) == ("WARNING", nobody)
    assert {"kind", "seconds", "namespace", "mm_hash", "nbytes", "peer"} <= slow.keys()


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
    checked = run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert not re.search(r"ecd\.service|devices\.conf", checked.stderr), checked.stderr
    exposed = run(
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
        shown = run(
            [ECD, "config", "--json", "--config", file],
            env={**os.environ, "ECD_PEER_TOKEN": "sixteen letters or more"},
            capture_output=True,
            text=True,
        )
        assert shown.returncode == 0, shown.stderr
    settings = json.loads(shown.stdout)
    assert settings["namespace_quotas"]["value"]
    assert settings["peers"]["value"]


def test_the_shipped_settings_list_what_a_reload_applies() -> None:
    listed = re.search(r"reload ecd`:\n# (.+)\.\n", (UNITS / "ecd.toml").read_text())
    assert listed is not None
    assert tuple(listed[1].split(", ")) == RELOADABLE


def test_its_user_and_its_directory_are_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for tool, file in (("systemd-sysusers", "sysusers"), ("systemd-tmpfiles", "tmpfiles")):
        create = ["--create"] if file == "tmpfiles" else []
        command = [tool, f"--root={tmp_path}", *create, UNITS / f"ecd.{file}.conf"]
        made = run(command, capture_output=True, text=True)
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
cp "$PLACE/ecd.toml" "$PLACE/sitecustomize.py" /run/settings
for file in passwd group; do mount --bind "$PLACE/$file" /etc/$file; done
export container=ecd-test SYSTEMD_UNIT_PATH="$PLACE/units"
exec /lib/systemd/systemd --system --unit=multi-user.target --show-status=no
"""
BLOCKED_BY_SIGUSR1 = """
import os, signal, socket
def block(*_):
    to_manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    to_manager.sendto(b"WATCHDOG_USEC=1000000", os.environ["NOTIFY_SOCKET"])
    signal.pause()
signal.signal(signal.SIGUSR1, block)
"""
"""A signal stops the event loop, and its watchdog waits for a second from then on."""


class Machine:
    """systemd as the first process of namespaces of its own, with our unit and nothing else."""

    def __init__(self, place: Path, life: contextlib.ExitStack) -> None:
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
            "Environment=PYTHONPATH=/run/settings\n"
            "RestartSec=0.1\nTimeoutStartSec=60\n"
        )
        (place / "sitecustomize.py").write_text(BLOCKED_BY_SIGUSR1)
        (place / "ecd.toml").write_text(
            'name = "systemd-test"\nhost_pool_bytes = "64MiB"\nmetrics_address = "127.0.0.1:0"\n'
            'peer_address = "127.0.84.1:9465"\nengine_ports = "31000-31031"\n'
        )
        (place / "passwd").write_text(
            Path("/etc/passwd").read_text() + "ecd:x:993:993::/:/bin/sh\n"
        )
        (place / "group").write_text(Path("/etc/group").read_text() + "ecd:x:993:\n")
        (place / "boot").write_text(BOOT)
        log = life.enter_context((place / "systemd.log").open("w"))
        self._process = life.enter_context(
            child(
                [*("unshare", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child"),
                 *("--mount-proc", "sh", place / "boot")],
                env={"PATH": os.environ["PATH"], "PLACE": str(place), "SEEN": SEEN},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        eventually(lambda: self.systemctl("is-active", "multi-user.target"), "it is up")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command beside its first process."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        first = children.read_text().split()
        target = ["nsenter", "--target", first[0] if first else "-", "--all"]
        return run([*target, *command], capture_output=True, text=True)

    def systemctl(self, *arguments: str) -> str:
        """Run systemctl; returns its answer, empty if it fails."""
        done = self.run("systemctl", *arguments)
        return done.stdout.strip() if done.returncode == 0 else ""

    def show(self, what: str) -> str:
        return self.systemctl("show", "ecd", "--value", f"--property={what}")

    def log(self) -> str:
        return (self.place / "ecd.log").read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with contextlib.ExitStack() as life:
        life.callback(shutil.rmtree, "/dev/shm/ecd-systemd-test", ignore_errors=True)
        machine = Machine(tmp_path, life)
        yield machine
        machine.systemctl("stop", "ecd")


def test_systemd_runs_the_unit(machine: Machine) -> None:
    started = machine.run("systemctl", "start", "ecd")
    assert started.returncode == 0, started.stderr + machine.show("Result")
    assert machine.show("User") == "ecd"
    eventually(lambda: machine.show("StatusText") == "serving 0 entries", "it says so")
    pid = machine.show("MainPID")
    cli = [f"{ECD}-cli", "--address", "unix:///run/ecd/ecd.sock"]
    status = machine.run(*cli, "--json", "status")
    assert json.loads(status.stdout)["pid"] == int(pid)

    machine.run("sed", "-i", '$ a log_level = "debug"', "/run/settings/ecd.toml")
    assert machine.run("systemctl", "reload", "ecd").returncode == 0
    eventually(lambda: "log_level is debug now" in machine.log(), "it reloads")
    assert machine.show("MainPID") == pid

    file = str(machine.place / "k.safetensors")
    save_file({"k": torch.arange(1000)}, file)
    assert machine.run(*cli, "put", "k", file).returncode == 0
    assert machine.run("systemctl", "restart", "ecd").returncode == 0
    assert machine.show("MainPID") != pid
    assert machine.run(*cli, "get", "k", "-o", file).returncode == 0, "a restart keeps the cache"
    assert torch.equal(load_file(file)["embedding"], torch.arange(1000))

    machine.run("kill", "-KILL", machine.show("MainPID"))
    eventually(lambda: machine.show("NRestarts") == "1", "it comes back")
    eventually(lambda: machine.show("ActiveState") == "active", "it serves")

    machine.run("kill", "-USR1", machine.show("MainPID"))
    eventually(lambda: machine.show("NRestarts") == "2", "one whose loop is blocked is replaced")
    eventually(lambda: machine.show("ActiveState") == "active", "it serves")

    assert machine.run("systemctl", "stop", "ecd").returncode == 0
    assert machine.show("ActiveState") == "inactive"
    cleared = machine.run(str(ECD), "clear", "--config", "/run/settings/ecd.toml")
    assert re.fullmatch(r"removed .*ecd-systemd-test, 6[45][.\d]* MiB\n", cleared.stdout), (
        cleared.stderr
    )
    assert not Path("/dev/shm/ecd-systemd-test").exists()
