"""A client on one node, driven by a test: one JSON command a line in, one answer a line out.

python node_client.py ADDRESS
"""

import json
import random
import sys
import time
from pathlib import Path

from ecd_client import Client, EcdError

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # not this directory, which has a redis.py

from support.waiting import HANG_S


def content(nbytes: int, seed: int) -> bytes:
    """The bytes that a seed stands for."""
    return random.Random(seed).randbytes(nbytes)


def put(client: Client, key: str, nbytes: int, seed: int, cost: float = 0.0) -> bool:
    return client.put_bytes(key, content(nbytes, seed), "uint8", (nbytes,), cost=cost)


def get(client: Client, command: dict) -> dict:
    started = time.monotonic()
    timeout = command["timeout"]
    [found] = client.get_async(
        [command["key"]],
        timeout,
        only_if_written=True,
        nodes=[command["nodes"]],
    )
    item = found.result(timeout + 5)
    seconds = time.monotonic() - started
    if item is None:
        return {"found": False, "seconds": seconds}
    with item:
        right = item.view == content(item.nbytes, command["seed"])
    return {"found": True, "right": right, "seconds": seconds}


def answer(client: Client, command: dict) -> dict:
    match command["do"]:
        case "put":
            about = command["key"], command["nbytes"], command["seed"], command.get("cost", 0.0)
            return {"stored": put(client, *about)}
        case "get":
            return get(client, command)
        case "get_many":
            nodes = [command["nodes"]] * len(command["keys"])
            founds = client.get_async(command["keys"], command["timeout"], nodes=nodes)
            items = [found.result() for found in founds]
            for item in items:
                if item is not None:
                    item.close()
            return {"found": [item is not None for item in items]}
        case "offer":
            client.offer(command["keys"], command["nodes"])
            return {}
        case unknown:
            raise ValueError(unknown)


def main() -> None:
    with Client(sys.argv[1], connect_timeout=HANG_S) as client:
        print("ready", flush=True)
        for line in sys.stdin:
            client.wait_connected(HANG_S)
            try:
                reply = answer(client, json.loads(line))
            except EcdError as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
