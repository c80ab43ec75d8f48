"""A client that gets items and keeps them, one line of its input after the other.

python holder.py ADDRESS NAME

"get KEY" holds the item and says its digest, "missing" or the error; "again KEY" says the digest of
the item that it holds; "close KEY" closes it; "put KEY NBYTES" says how the put ended.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from ecd_client import Client, EcdError, Item


def main() -> None:
    address, name = sys.argv[1:]
    items: dict[str, Item] = {}
    with Client(address, namespace="n", name=name) as client:
        print("ready", flush=True)
        for line in sys.stdin:
            try:
                said = act(client, items, *line.split())
            except EcdError as error:
                said = f"{type(error).__name__}: {error}"
            print(said, flush=True)


def act(client: Client, items: dict[str, Item], verb: str, key: str, size: str = "0") -> str:
    match verb:
        case "get":
            item = client.get(key)
            if item is None:
                return "missing"
            items[key] = item
            return digest(item.view)
        case "again":
            return digest(items[key].view)
        case "close":
            items.pop(key).close()
            return "closed"
        case _:
            return str(client.put_bytes(key, bytes(int(size)), "uint8", (int(size),)))


def digest(data: bytes | memoryview) -> str:
    return sha256(data).hexdigest()


class Holder:
    """Such a client in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, *words: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return self.heard()

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def holder(address: str, name: str, prefix: tuple[str, ...] = ()) -> Iterator[Holder]:
    from support.processes import child

    command = [*prefix, sys.executable, str(Path(__file__)), address, name]
    about = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with child(command, **about) as process:
        started = Holder(process)
        assert started.heard() == "ready"
        yield started


if __name__ == "__main__":
    main()
