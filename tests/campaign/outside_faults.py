"""Garbage, and faults of the network, Redis and the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

from campaign.kinds import KINDS, Kind, healed, kind, other_end, some_ms
from campaign.side import LIAR, TOKEN, Side
from support.lying_peer import LIES, OTHER_LIES
from support.processes import child

LIAR_SCRIPT = Path(__file__).parents[1] / "support" / "lying_peer.py"


# -- garbage ---------------------------------------------------------------------------------------


@kind("garbage in a session's page", "garbage", 3)
def spoil_page(side: Side, chance: Random) -> float:
    seed = str(chance.random())
    side.world.replies.ask(side.probe, "vandalize", 15.0, seed=seed, acts=8)
    return healed()


@kind("garbage on the socket", "garbage", 6)
def spoil_socket(side: Side, chance: Random) -> float:
    side.world.replies.ask(side.probe, "spoil_socket", 5.0, seed=str(chance.random()), node="")
    return healed()


@kind("garbage on the port for peers", "garbage", 6)
def spoil_peer_port(side: Side, chance: Random) -> float:
    node, seed = side.node.peer, str(chance.random())
    side.world.replies.ask(side.probe, "spoil_socket", 5.0, seed=seed, node=node)
    return healed()


@kind("a peer that lies", "garbage", 1)
def lie(side: Side, chance: Random) -> float:
    """It runs beside the second node, and the clients of the first ask it."""
    world = side.world
    asking, beside, *_ = world.sides
    lies = [*LIES, *(lie for lie in OTHER_LIES if lie != "dies with the lease")]
    node, number = f"{LIAR}:{chance.randrange(20000, 22000)}", chance.randrange(1000)
    ports = f"{22000 + 10 * number}-{22015 + 10 * number}"
    with child(
        [*beside.node.prefix, sys.executable, str(LIAR_SCRIPT), node, ports, chance.choice(lies)],
        env={**os.environ, "ECD_PEER_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() == b"ready\n":
            said = world.replies.ask(asking.probe, "believe", 9.0, node=node)
            world.counts[f"lies: {said if said in ('hit', 'miss') else 'refused'}"] += 1
    return healed()


# -- the network -----------------------------------------------------------------------------------


@kind("network: link down", "network", 1, "across")
def link_down(side: Side, chance: Random) -> float:
    side.node.cable(up=False)
    some_ms(chance, 20, 400)
    side.node.cable(up=True)
    return healed()


@kind("network: partition in one direction", "network", 2, "across")
def partition(side: Side, chance: Random) -> float:
    """What this node sends to one other is lost."""
    other = other_end(side, chance)
    side.node.drop(other.node, dropped=True)
    some_ms(chance, 20, 400)
    side.node.drop(other.node, dropped=False)
    return healed()


def shaped(side: Side, chance: Random, rate: str, limit: str) -> float:
    side.node.throttle(rate, limit)
    some_ms(chance, 50, 300)
    side.node.run("tc", "qdisc", "del", "dev", "eth0", "root")
    return healed()


@kind("network: packets lost", "network", 2, "across")
def lose(side: Side, chance: Random) -> float:
    """The sender's queue holds six packets: TCP loses some in every round trip."""
    return shaped(side, chance, "500mbit", "9kb")


@kind("network: throttled to 20 Mbit/s", "network", 1, "across")
def throttle(side: Side, chance: Random) -> float:
    return shaped(side, chance, "20mbit", "1mb")


@kind("network: delayed by a full queue", "network", 1, "across")
def delay(side: Side, chance: Random) -> float:
    """At 2 Mbit/s a queue of 256 kB is a second long."""
    return shaped(side, chance, "2mbit", "256kb")


# -- Redis -----------------------------------------------------------------------------------------


@kind("Redis: emptied", "redis", 3, "redis")
def empty_redis(side: Side, chance: Random) -> float:
    side.world.redis.ask("flushall")
    return healed()


@kind("Redis: SIGSTOP", "redis", 2, "redis")
def stop_redis(side: Side, chance: Random) -> float:
    side.world.redis.stop()
    some_ms(chance, 10, 500)
    side.world.redis.go_on()
    return healed()


@kind("Redis: killed and started empty", "redis", 1, "redis")
def kill_redis(side: Side, chance: Random) -> float:
    side.world.redis.kill()
    some_ms(chance, 0, 300)
    side.world.redis.start()
    return healed()


# -- the disk --------------------------------------------------------------------------------------


def disk_fault(name: str, fault: str, weight: float = 2.0) -> None:
    def act(side: Side, chance: Random) -> float:
        path = side.world.directory / f"faults-{side.name}" / fault
        path.touch()
        some_ms(chance, 20, 200)
        path.unlink()
        return healed()

    KINDS.append(Kind(f"disk: {name}", "disk", weight, "local", act))


disk_fault("reads fail (EIO)", "fail-read")
disk_fault("writes fail (EIO)", "fail-write")
disk_fault("writes are refused (ENOSPC)", "full-write")
disk_fault("renames are refused (ENOSPC)", "full-rename")
disk_fault("removals are refused (EROFS)", "fail-remove")
disk_fault("reads take 0.2 s more", "slow-read")
disk_fault("writes take 0.2 s more", "slow-write")
disk_fault("reads hang", "hang-read")
disk_fault("writes hang", "hang-write")


@kind("disk: the file system is full", "disk", 2)
def fill_disk(side: Side, chance: Random) -> float:
    ballast = side.world.path_on(side, str(side.world.directory / f"disk-{side.name}" / "ballast"))
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        free = shutil.disk_usage(ballast.parent).free
        os.posix_fallocate(file.fileno(), 0, max(free, 1))
    some_ms(chance, 20, 200)
    ballast.unlink()
    return healed()
