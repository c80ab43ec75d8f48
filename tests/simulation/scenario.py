"""What happens in one simulated run: the cluster, its weather and actions, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

from ecd.core.model.types import Key
from simulation.network import Weather

KINDS = {
    "put": 24,
    "get": 50,
    "make": 14,
    "burst": 5,
    "fetch under fire": 15,
    "move": 5,
    "offer": 6,
    "evict": 6,
    "evict all": 2,
    "locate": 2,
    "client dies": 4,
    "cold restart": 5,
    "warm restart": 5,
    "die": 2,
    "start": 3,
    "pause": 4,
    "cut": 4,
    "heal": 3,
    "redis empty": 4,
    "redis down": 2,
    "lie": 1,
}
"""How often each kind of action is drawn, as weights."""
SIZES = (300, 1500, 5000, 12_000, 20_000, 40_000, 70_000, 130_000)
"""Bytes of the entries, by their keys: some come with their lease, some are read in pieces."""

NAMESPACE = "n"


@cache
def bytes_of(key: int) -> bytes:
    """The bytes that are committed for a key."""
    return Random(key).randbytes(SIZES[key])


def key_of(number: int) -> Key:
    return Key(NAMESPACE, f"k{number}")


FIRE = (
    *("cold restart", "cold restart", "cold restart", "cold restart", "warm restart", "die"),
    *("evict all", "move", "pause", "cut"),
)
"""What comes over a node while it is being read."""


class Action(NamedTuple):
    """One thing that happens; what a kind does not need it ignores."""

    at_s: float
    kind: str
    node: int
    other: int
    key: int
    seconds: float
    choice: float  # in [0, 1): decides the rest

    def __str__(self) -> str:
        return (
            f"{self.at_s:8.4f} s  {self.kind} node={self.node} other={self.other} key={self.key} "
            f"seconds={self.seconds:.3f} choice={self.choice:.3f}"
        )


@dataclass(frozen=True)
class Scenario:
    seed: int
    nodes: int
    directory: str  # none, static, redis
    pool_bytes: int
    lease_ttl_s: float
    fetch_timeout_s: float
    has_values: bool  # the eviction policy: by value, else LRU
    weather: Weather
    redis_lost: float
    disk_s: tuple[float, float] | None  # how long an operation of the disk takes; None: no disk
    disk_failures: float
    actions: tuple[Action, ...]
    readers_per_entry: int
    links: int = 2048
    """Links of peers that a daemon takes."""


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = Random(seed)
    nodes = rng.randint(2, 5)
    pace_s = rng.choice((0.002, 0.02, 0.2))
    disk_s = rng.choice((*[None] * 9, (0.0005, 0.003), (0.01, 0.2), (0.1, 3.0)))
    keys = rng.choice((2, 5, len(SIZES))) if disk_s is None else len(SIZES)
    actions, at_s = [], 0.05
    first_key = rng.randrange(len(SIZES))
    # Swarm testing (Groce et al., ISSTA 2012): each run favours some kinds and leaves others out.
    weights = [rng.choice((0, 1, 1, 3)) * weight for weight in KINDS.values()]
    weights = [weight or 1 for weight in weights[:2]] + weights[2:]
    for _ in range(rng.choice((6, 15, 30))):
        at_s += rng.expovariate(1 / pace_s)
        [kind] = rng.choices(list(KINDS), weights)
        if len(actions) < (nodes if disk_s is None else 3 * nodes):
            kind = "put"
        node, other = rng.randrange(nodes), rng.randrange(nodes)
        key = (first_key + rng.randrange(keys)) % len(SIZES)
        seconds = rng.choice((0.01, 0.1, 1.0, 2.0)) * rng.uniform(0.5, 2.0)
        actions.append(Action(at_s, kind, node, other, key, seconds, rng.random()))
    bad = rng.random() < 0.6
    weather = Weather(
        delay_s=rng.choice(((0.0, 0.0002), (0.0001, 0.002), (0.001, 0.05))),
        spike_s=rng.choice((0.0, 0.3, 2.0)),
        spikes=rng.choice((0.0, 0.05, 0.3)) * bad,
        breaks=rng.choice((0.0, 0.02, 0.1)) * bad,
        rogue=rng.choice((0.0, 0.0, 0.0, 0.1)) * bad,
        failed_reads=rng.choice((0.0, 0.1, 0.4)) * bad,
        hung_reads=rng.choice((0.0, 0.02, 0.2)) * bad,
        bytes_per_s=rng.choice((1e9, 1e6, 1e5)),
    )
    return Scenario(
        seed,
        nodes,
        rng.choice(("none", "static", "redis", "redis")),
        rng.choice((160, 240, 512) if disk_s is None else (140, 160)) << 10,
        rng.choice((0.2, 1.0) if weather.rogue else (0.2, 1.0, 60.0)),
        rng.choice((0.3, 1.0, 5.0)),
        rng.random() < 0.5,
        weather,
        rng.choice((0.0, 0.1, 0.3)),
        disk_s,
        rng.choice((0.0, 0.1)),
        tuple(actions),
        rng.choice((1, 1, 2)),
        rng.choice((1, *[2048] * 7)),
    )
