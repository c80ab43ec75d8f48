"""Client processes as the campaign knows them, and their answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

from campaign.content import Ledger
from support.waiting import HANG_S

CLIENTS, THREADS = 6, 2
"""Of all nodes together, and threads of each."""


class Client:
    """A client process as the campaign knows it."""

    def __init__(self, name: str, pid: int, threads: int, directory: Path) -> None:
        self.name, self.pid, self.threads, self._directory = name, pid, threads, directory
        self.ledger = Ledger(directory / f"{name}.ledger")
        self.stopped_s = 0.0
        """When it was last seen stopped."""
        self.is_stopped = False

    def ask(self, number: int, do: str, about: dict[str, object]) -> None:
        message = json.dumps({"id": number, "do": do, "with": about}).encode()
        path = str(self._directory / f"{self.name}.sock")
        deadline_s = time.monotonic() + HANG_S
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            while True:
                try:
                    to.connect(path)
                    to.send(message)
                    return
                except FileNotFoundError:  # it is only just starting
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.002)

    def signal(self, what: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, what)


class Replies:
    """Answers of clients, by the number of the question."""

    def __init__(self, directory: Path) -> None:
        self._numbers, self._waiting = itertools.count(1), dict[int, queue.Queue[Any]]()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(directory / "replies.sock"))
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            reply = json.loads(self._socket.recv(65536))
            waiting = self._waiting.pop(reply["id"], None)
            if waiting is not None:
                waiting.put(reply["said"])

    def ask(self, client: Client, do: str, within_s: float, **about: object) -> Any:
        """None: it has not answered, or is gone."""
        number, answer = next(self._numbers), queue.Queue[Any]()
        self._waiting[number] = answer
        try:
            client.ask(number, do, about)
            return answer.get(timeout=within_s)
        except (OSError, queue.Empty):
            return None
        finally:
            self._waiting.pop(number, None)
