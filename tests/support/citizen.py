"""A client that puts and gets all the time and compares every byte, until its stdin ends.

python citizen.py ADDRESS NUMBER

Prints what it counted as one line of JSON. What it did not find it puts anew: others may evict.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
import traceback

from ecd_client import Client, EcdError
from ecd_client.shared.index import AskDaemon

SIZES = (1, 700, 4096, 30_000, 300_000)
KEYS, GHOSTS = 60, 2
"""Keys that it puts, and others that it only looks for."""


def content(key: str) -> bytes:
    chance = random.Random(key)
    return chance.randbytes(chance.choice(SIZES))


def look(client: Client, key: str, counts: dict) -> None:
    """Through one of the ways there are."""
    match random.randrange(5):
        case 0:
            client.contains([key, f"not {key}"])
        case 1:
            client.hint(key)
            with contextlib.suppress(AskDaemon):  # what `hint` does where there are other nodes
                client._connection.session().index.row(client.namespace, key)
        case 2:
            compare(client.get_now(key)[0], key, counts)
        case 3:
            compare(client.get(key, 0.02), key, counts)
        case _:
            compare(client.get(key), key, counts)


def compare(item, key: str, counts: dict) -> None:
    counts["gets"] += 1
    if item is not None:
        with item:
            right = bytes(item.view) == content(key)
            if key.startswith("ghost"):  # what others say it is
                return
            counts["hits"] += 1
            counts["wrong"] += not right


def main() -> None:
    address, number = sys.argv[1:]
    random.seed(number)
    over = threading.Event()
    counts: dict = {"puts": 0, "gets": 0, "hits": 0, "wrong": 0, "refused": {}, "errors": []}
    slowest_s = 0.0
    keys = [f"citizen {number} key {key}" for key in range(KEYS)]
    ghosts = [f"ghost {key}" for key in range(GHOSTS)]
    with Client(address, namespace=f"citizen {number}") as client:
        threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
        for key in keys[::2]:  # there is something to compare from the start
            client.put_bytes(key, content(key), "uint8", (len(content(key)),))
        print("ready", flush=True)
        while not over.is_set() and len(counts["errors"]) < 5:
            key = random.choice(ghosts if random.random() < 0.2 else keys)
            started_s = time.monotonic()
            try:
                if random.random() < 0.2 and not key.startswith("ghost"):
                    data = content(key)
                    counts["puts"] += client.put_bytes(
                        key, data, "uint8", (len(data),), timeout=0.1
                    )
                else:
                    look(client, key, counts)
            except EcdError as error:
                why = f"{type(error).__name__}: {error}".replace(key, "KEY")
                counts["refused"][why] = counts["refused"].get(why, 0) + 1
                time.sleep(0.05)
            except Exception:
                counts["errors"].append(traceback.format_exc())
            slowest_s = max(slowest_s, time.monotonic() - started_s)
            time.sleep(0.0005)
    counts["slowest_s"] = round(slowest_s, 3)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
