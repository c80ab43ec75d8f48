"""Pass hidden states from one stage of a pipeline to the next, in another process.

Needs a running daemon: `ecd serve`. The stages share no other channel than the request's name.
"""

import sys

import torch

from ecd_client import Client

REQUEST, STEPS, SHAPE = "request-1", 4, (32, 2048)


def states(step: int) -> torch.Tensor:
    """Stand in for a model: the hidden states of a step, [tokens, width]."""
    return torch.full(SHAPE, float(step)).bfloat16()


def thinker(client: Client) -> None:
    for step in range(STEPS):
        client.put(f"{REQUEST}/hidden/{step}", states(step))


def talker(client: Client) -> None:
    for step in range(STEPS):
        item = client.get(f"{REQUEST}/hidden/{step}", timeout=60.0)  # returns as it is stored
        assert item is not None, "the other stage has stored nothing in a minute"
        with item:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            own = item.to(device)  # a copy; `item.tensor` reads the pool in place
        print(f"step {step}: {tuple(own.shape)}, {own.dtype}, sum {own.float().sum():.0f}")


if __name__ == "__main__":
    stage = {"thinker": thinker, "talker": talker}[sys.argv[1]]
    with Client(namespace="my-pipeline", name=sys.argv[1]) as client:
        stage(client)
