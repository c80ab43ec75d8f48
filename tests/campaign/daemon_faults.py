"""Faults of a daemon. Each acts on it, heals it, and says when that was."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from random import Random

from campaign.client_faults import stop_client
from campaign.kinds import healed, kind, little_memory, some_ms
from campaign.side import Side

NEWER = "import ecd_proto.shm.index as m; m.INDEX_VERSION += 1; "
KEPT = 8
MIB = 1 << 20


@kind("daemon: SIGKILL, warm restart", "daemon", 2, "outage")
def kill_daemon(side: Side, chance: Random) -> float:
    """What was put just before is there afterwards, if nothing was evicted in between."""
    keys = [f"kept {side.daemon.pid} {number}" for number in range(KEPT)]
    ask, evicted = side.world.replies.ask, evictions(side)
    put = [key for key in keys if ask(side.probe, "keep", 5.0, key=key, cost=1e6) is True]
    is_full = evictions(side) != evicted
    side.daemon.kill()
    serving_s = side.serve()
    side.works(f"{serving_s}")

    def is_kept(key: str) -> object:
        for _ in range(3):
            said = ask(side.probe, "kept", 9.0, key=key, wait_s=0.1, nodes=[])
            if isinstance(said, bool):
                break  # else its call was late
        return said

    said = {key: is_kept(key) for key in put}
    lost = {key: answer for key, answer in said.items() if answer is not True}
    if not is_full and evictions(side) == 0:
        side.world.counts["kept"] += len(put) - len(lost)
        if lost:
            side.world.violation("a put was lost", f"{lost}\n{side.last_lines()}")
    return serving_s


@kind("daemon: SIGTERM, warm restart", "daemon", 0.5, "outage")
def restart_daemon(side: Side, chance: Random) -> float:
    stop(side)
    return side.serve()


@kind("daemon: SIGKILL, cold restart", "daemon", 0.5, "outage")
def restart_cold(side: Side, chance: Random) -> float:
    side.daemon.kill()
    return side.serve("--cold")


@kind("daemon: another index version, and back", "daemon", 0.4, "outage")
def upgrade(side: Side, chance: Random) -> float:
    stop(side)
    side.serve(start=NEWER)
    some_ms(chance, 100, 400)
    stop(side)
    return side.serve()


@kind("daemon: SIGKILL while it starts", "daemon", 0.5, "outage")
def kill_starting(side: Side, chance: Random) -> float:
    side.daemon.kill()
    side.begin()
    some_ms(chance, 200, 900)
    side.daemon.kill()
    return side.serve()


@kind("daemon: killed for memory (cgroup)", "daemon", 0.5, "outage")
def daemon_out_of_memory(side: Side, chance: Random) -> float:
    process = side.daemon._process
    assert process is not None
    with (
        little_memory(process.pid, f"daemon-{side.name}"),
        contextlib.suppress(subprocess.TimeoutExpired),
    ):
        process.wait(1.0)
    side.daemon.kill()
    return side.serve()


@kind("daemon: SIGSTOP for 5 to 50 ms", "daemon", 60)
def stop_briefly(side: Side, chance: Random) -> float:
    os.kill(side.daemon.pid, signal.SIGSTOP)
    some_ms(chance, 5, 50)
    os.kill(side.daemon.pid, signal.SIGCONT)
    return healed()


@kind("daemon: SIGSTOP for 0.3 to 3 s", "daemon", 0.7, "outage")
def stop_long(side: Side, chance: Random) -> float:
    os.kill(side.daemon.pid, signal.SIGSTOP)
    some_ms(chance, 300, 3000)
    os.kill(side.daemon.pid, signal.SIGCONT)
    return healed()


@kind("daemon: no file descriptor left", "daemon", 30)
def no_descriptors(side: Side, chance: Random) -> float:
    """New clients come meanwhile, and are served afterwards."""
    pid, what = side.daemon.pid, resource.RLIMIT_NOFILE
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (len(os.listdir(f"/proc/{pid}/fd")), before[1]))
    comer = side.fork("comer", 1)
    some_ms(chance, 10, 150)
    resource.prlimit(pid, what, before)
    at_s = healed()
    side.works(f"{at_s}")
    side.kill(comer)
    return at_s


@kind("daemon: all evicted under load", "daemon", 50)
def evict_all(side: Side, chance: Random) -> float:
    side.daemon.evict_all()
    return healed()


@kind("daemon: pool squeezed to a quarter", "daemon", 30)
def squeeze(side: Side, chance: Random) -> float:
    seconds = chance.uniform(0.01, 0.1)
    side.world.replies.ask(side.probe, "squeeze", 12.0, nbytes=9 * MIB, seconds=seconds)
    return healed()


@kind("client: SIGSTOP for 2 s", "daemon", 0.3)
def stop_client_long(side: Side, chance: Random) -> float:
    """With the daemon's faults, as a daemon that starts waits for who reads what was left."""
    return stop_client(side, chance, 2000, 2001)


def evictions(side: Side) -> int:
    """So many since its start."""
    return sum(side.daemon.status().counters.evictions.values())


def stop(side: Side) -> None:
    """SIGTERM, and the daemon is gone within HANG_S."""
    try:
        code = side.daemon.terminate()
    except subprocess.TimeoutExpired:
        side.world.violation("daemon does not stop", side.last_lines())
        return side.daemon.kill()
    if code != 0:
        side.world.violation("daemon stops badly", f"code {code}\n{side.last_lines()}")
