"""Readers that verify every byte while the daemon evicts and reuses as fast as it can.

    python tests/support/pin_stress.py [--gets 20000] [--without STEP]

Four processes get and put; some are stopped for a while and some killed at random, and all fork
children that use and end what their parents have. Every step of
the scheme is slowed down at random places, the same in every run, so that what can go wrong does.
With a step taken out, the run must find wrong bytes: that it does is what makes the other runs
worth something. Prints one line of JSON; exits with 0 if no byte was wrong and nothing leaked.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # not this directory, which has a redis.py

from support.waiting import HANG_S

STEPS = (
    "announce",
    "recheck",
    "hide",
    "scan",
    "lock",
    "claim",
    "regrant",
    "fork",
    "still",
    "starts",
)
KEYS = 48
SIZES = (4096, 16384, 65536, 262144)
POOL = "2MiB"
WORKERS = 4


def pause() -> None:
    """Mostly none; now and then long enough for others to evict and write."""
    chance = random.random()
    if chance < 0.02:
        time.sleep(random.random() * 0.02)
    elif chance < 0.2:
        time.sleep(0)


# -- the daemon ------------------------------------------------------------------------------------


def run_daemon(without: str) -> None:
    from ecd.__main__ import main
    from ecd.core.model.board import Portion
    from ecd.memory.shared_index import SharedIndex
    from ecd.rpc.cache.sessions import SessionStreams
    from ecd_proto.shm.rows import ROW_BYTES

    def write_in_pieces(self, start: int, row: bytes) -> None:
        pieces = list(range(0, ROW_BYTES, 8))
        random.shuffle(pieces)
        for piece in pieces:
            self._rows[start + piece : start + piece + 8] = row[piece : piece + 8]

    finished_puts = SharedIndex.finished_puts

    def finished_late(self, page: int):
        """Leave others time to read puts that are not listed yet."""
        if random.random() < 0.3:
            time.sleep(random.random() * 0.003)
        return finished_puts(self, page)

    SharedIndex._write = write_in_pieces
    SharedIndex.finished_puts = finished_late
    if without == "scan":
        SharedIndex.pinned = lambda self, live, starts: iter([Portion(set(), is_last=True)])
    if without == "starts":
        pinned = SharedIndex.pinned
        SharedIndex.pinned = lambda self, live, starts: pinned(self, live)
    if without == "lock":
        SessionStreams._take_back = lambda self, session, pause_s: self._live.close_session(session)
    if without == "claim":
        SharedIndex._begun = staticmethod(lambda *pages: [[] for _ in pages])
    if without == "hide":
        hide, show, late = SharedIndex.hide, SharedIndex.show, []

        def show_then_hide(self, info) -> None:
            show(self, info)
            while late:
                hide(self, *late.pop())

        SharedIndex.show = show_then_hide
        SharedIndex.hide = lambda self, *hidden: late.append(hidden)
    sys.argv = ["ecd", "serve"]
    main()


# -- a client --------------------------------------------------------------------------------------


def be_child(client, item) -> None:
    """Use and end what is the parent's, and end in one of all ways."""
    from ecd_client import EcdError

    signal.alarm(5)
    random.seed(os.getpid())
    pause()
    content = b"\xff" * SIZES[1]
    uses = (
        item.close,
        item.__del__,
        lambda: item.view,
        lambda: [client.get(str(number)) for number in range(KEYS)],
        lambda: client.put_bytes(f"child {os.getpid()}", content, "int8", (len(content),)),
        client.close,
    )
    for use in random.sample(uses, 3):
        with contextlib.suppress(EcdError):
            use()
        pause()
    match random.randrange(4):
        case 0:
            os._exit(0)
        case 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case 2:
            time.sleep(0.5)
    sys.exit(0)


def fork(by_multiprocessing: bool, client, item, longest_s: float) -> None:
    if by_multiprocessing:
        multiprocessing.get_context("fork").Process(target=be_child, args=(client, item)).start()
    elif os.fork() == 0:
        be_child(client, item)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    time.sleep(random.random() * longest_s)


def run_worker(address: str, without: str, seed: int) -> None:
    import ecd_client.forks
    import ecd_client.session.session
    import ecd_client.shared.index
    from ecd_client import Client, EcdError
    from ecd_client.shared.claims import ClaimReader
    from ecd_client.shared.index import IndexReader
    from ecd_client.shared.puts import PutWriter

    random.seed(seed)
    counts = dict.fromkeys(("gets", "early", "puts", "misses", "wrong", "broken", "forks"), 0)

    class SlowIndex(IndexReader):
        def _pin_claimed(self, record: bytes, is_use: bool):
            found = super()._pin_claimed(record, is_use)
            counts["early"] += found is not None
            return found

        def _announce(self, named: int) -> int:
            pause()
            if named >> 63 and random.random() < 0.3:  # a put is the last to be evicted
                time.sleep(random.random() * 0.15)
            pin = super()._announce(named)
            if without == "announce":
                self._words[pin] = 0
            pause()
            return pin

    ecd_client.session.session.IndexReader = SlowIndex
    if without == "fork":
        ecd_client.forks.add = lambda made, last=False: None
    if without == "still":
        ClaimReader.is_still = lambda self, claim: True
    if without == "recheck":
        ecd_client.shared.index.row_mark = lambda row: b""
    write = PutWriter.write
    find_piece = PutWriter._find_piece
    is_granted = PutWriter._is_granted

    def slow_write(self, claim, copy_to):
        def slow_copy(pool, extent) -> None:
            pause()
            copy_to(pool, extent)
            pause()

        return write(self, claim, slow_copy)

    def slow_find_piece(self, nbytes: int) -> tuple[int, int] | None:
        piece = find_piece(self, nbytes)
        for _ in range(5):  # the window is small
            pause()
        return piece

    def slow_is_granted(self, number: int, grant: int) -> bool:
        pause()
        return is_granted(self, number, grant) or without == "regrant"

    PutWriter.write = slow_write
    PutWriter._find_piece = slow_find_piece
    PutWriter._is_granted = slow_is_granted
    told, longest_s = time.monotonic(), 0.1
    if without == "fork":
        longest_s = 2.0  # what was read a moment ago is the last to be evicted
    with Client(address, namespace="stress", connect_timeout=HANG_S) as client:
        while True:
            number = random.randrange(KEYS)
            content = bytes([number]) * SIZES[number % len(SIZES)]
            try:
                item = client.get(str(number))
                if item is None:
                    counts["misses"] += 1
                    shape = (len(content),)
                    counts["puts"] += client.put_bytes(str(number), content, "int8", shape)
                else:
                    with item:
                        if random.random() < 0.002:  # the stream breaks, the reader goes on
                            counts["broken"] += 1
                            item._hold.session.abandon()
                            time.sleep(0.05)
                        if random.random() < 0.05:
                            counts["forks"] += 1
                            fork(seed % 2 == 0, client, item, longest_s)
                        for _ in range(2):
                            counts["wrong"] += item.view.tobytes() != content
                            pause()
                    counts["gets"] += 1
            except EcdError:
                time.sleep(0.01)  # full of what others hold, or between two sessions
            if time.monotonic() - told > 0.2 or counts["wrong"]:
                told = time.monotonic()
                print(json.dumps(counts), flush=True)


# -- the run ---------------------------------------------------------------------------------------


class Worker:
    def __init__(self, stack: contextlib.ExitStack, address: str, without: str) -> None:
        """`stack` ends its processes and all children of theirs, which may outlive them."""
        self._stack = stack
        self.command = [sys.executable, __file__, "--worker", address, "--without", without]
        self.counts: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        from support.processes import child

        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        seed = str(random.randrange(1 << 30))
        command = [*self.command, "--seed", seed]
        self.process = self._stack.enter_context(child(command, stdout=self.output))

    def collect(self) -> dict[str, int]:
        self.output.seek(0)
        lines = [line for line in self.output.read().splitlines() if line.endswith("}")]
        return json.loads(lines[-1]) if lines else {}

    def count(self, name: str) -> int:
        return self.counts.get(name, 0) + self.collect().get(name, 0)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for name, count in self.collect().items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.output.close()


def run(gets: int, without: str) -> dict:
    """Until the workers have got so many, or without a step the first wrong byte."""
    from support.daemon import Daemon
    from support.waiting import stopped

    found: dict[str, object] = {"without": without, "stopped": 0, "killed": 0}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        daemon = Daemon(Path(directory), POOL)
        daemon.command = (sys.executable, __file__, "--daemon", "--without", without)
        stack.callback(daemon.close)
        daemon.start()
        workers = [Worker(stack, daemon.address, without) for _ in range(WORKERS)]
        while sum(worker.count("gets") for worker in workers) < gets:
            time.sleep(0.5)
            for ended in workers if without else ():
                if ended.process.poll() is not None:  # as a child has spoilt its page
                    ended.end()
                    ended.start()
            worker = random.choice(workers)
            if random.random() < 0.15:
                worker.end()
                worker.start()
                found["killed"] += 1
            elif random.random() < 0.2:
                with stopped(worker.process.pid):
                    time.sleep(1.0)
                found["stopped"] += 1
            if without and any(worker.count("wrong") for worker in workers):
                break
        for worker in workers:
            worker.end()
            for name, count in worker.counts.items():
                found[name] = found.get(name, 0) + count
        status = daemon.status()
        found["put_calls"] = daemon.calls("Put")
        found["evictions"] = sum(status.counters.evictions.values())
        if not without:
            daemon.check_nothing_leaked()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gets", type=int, default=20_000)
    parser.add_argument("--without", default="", choices=("", *STEPS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker")
    parser.add_argument("--daemon", action="store_true")
    given = parser.parse_args()
    if given.daemon:
        run_daemon(given.without)
    elif given.worker:
        run_worker(given.worker, given.without, given.seed)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        found = run(given.gets, given.without)
        print(json.dumps(found))
        sys.exit(1 if found.get("wrong") else 0)


if __name__ == "__main__":
    main()
