"""Clients that put and get without end, to be killed at any moment.

    python crashing_client.py ADDRESS

Reads one seed a line, forks a client for it (torch is imported only once) and says its pid when
it works.
"""

import os
import random
import signal
import sys

import torch

from ecd_client import Client, EcdError

KEYS = 200


def say(line: str) -> None:
    """Write a line in one piece, whatever else writes to the pipe."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def work(address: str, seed: int) -> None:
    random.seed(seed)
    with Client(address) as client:
        say(str(os.getpid()))
        while True:
            number = random.randrange(KEYS)
            try:
                if random.random() < 0.6:
                    nbytes = random.randrange(1, 1 << 21)
                    client.put(f"k{number}", torch.full((nbytes,), number, dtype=torch.uint8))
                else:
                    item = client.get(f"k{number}", timeout=random.choice([0.0, 0.01]))
                    if item is not None:
                        if not (item.tensor == number).all():
                            say("wrong bytes")
                        if random.random() < 0.5:
                            item.close()
            except EcdError:
                pass  # a full pool: everything is leased


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            work(sys.argv[1], int(line))
