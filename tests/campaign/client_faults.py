"""Faults of client processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from campaign.clients import THREADS, Client
from campaign.kinds import healed, kind, little_memory, some_ms
from campaign.side import Side


@kind("client: SIGKILL", "clients", 10)
def kill_client(side: Side, chance: Random) -> float:
    return replace(side, chance, lambda client: client.signal(signal.SIGKILL))


@kind("client: SIGKILL, a forked child lives on", "clients", 4)
def kill_parent(side: Side, chance: Random) -> float:
    seconds = chance.uniform(0.2, 1.0)

    def act(client: Client) -> None:
        side.world.replies.ask(client, "orphan", 5.0, seconds=seconds)
        client.signal(signal.SIGKILL)

    return replace(side, chance, act)


@kind("client: killed for memory (cgroup)", "clients", 4)
def client_out_of_memory(side: Side, chance: Random) -> float:
    def act(client: Client) -> None:
        with little_memory(client.pid, f"client-{side.name}"):
            until_s = time.monotonic() + 0.3
            while Path(f"/proc/{client.pid}").exists() and time.monotonic() < until_s:
                time.sleep(0.005)
            client.signal(signal.SIGKILL)

    return replace(side, chance, act)


@kind("client: SIGSTOP for 5 to 100 ms", "clients", 10)
def stop_client(side: Side, chance: Random, least: float = 5, most: float = 100) -> float:
    client = chance.choice(side.clients)
    client.is_stopped, from_s = True, time.monotonic()
    client.signal(signal.SIGSTOP)
    some_ms(chance, least, most)
    client.signal(signal.SIGCONT)
    client.is_stopped, client.stopped_s = False, time.monotonic()
    side.world.stops.append((client.name, from_s, client.stopped_s))
    return client.stopped_s


@kind("client: forks amid its requests", "clients", 4)
def fork_client(side: Side, chance: Random) -> float:
    client = chance.choice(side.clients)
    code = side.world.replies.ask(client, "fork", 15.0)
    if code != 0:
        side.world.violation("a forked child", f"{client.name}: {code}")
    return healed()


@kind("client: closes amid its requests", "clients", 5)
def close_client(side: Side, chance: Random) -> float:
    client = chance.choice(side.clients)
    if side.world.replies.ask(client, "reopen", 15.0) is None and client in side.clients:
        side.world.violation("a client does not close", client.name)
    return healed()


def replace(side: Side, chance: Random, act: Callable[[Client], None]) -> float:
    """Another client takes the place of one that the act ends."""
    client = chance.choice(side.clients)
    side.expected_ends.add(client.pid)
    some_ms(chance, 0, 10)
    act(client)
    at_s = healed()
    side.clients[side.clients.index(client)] = side.fork("client", THREADS)
    side.bury(client)
    return at_s
