"""Helpers of all runners: a daemon, the machine's description, one table shown and written."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from ecd_client import Client, DaemonUnavailable
from ecd_proto.mapped_file import MappedFile

ROOT = Path(__file__).parent.parent
MEASURED = "<!-- A benchmark writes what is below. -->"
MIB = 1 << 20
SIZES = {"64 KiB": 64 << 10, "1 MiB": MIB, "8 MiB": 8 * MIB, "32 MiB": 32 * MIB}
PLAIN = "plain copy"
PLAIN_WRITER = f"{PLAIN}, writer"


def timed_us(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e6


def cpu_s(process: psutil.Process) -> float:
    """Seconds of all processors that the process has taken so far, without its children's."""
    return sum(process.cpu_times()[:2])


def shared_memory(nbytes: int) -> torch.Tensor:
    """Shared memory like a pool's, in small pages."""
    return torch.frombuffer(MappedFile.of_memory(nbytes).view(0, nbytes), dtype=torch.uint8)


def start_daemon(
    directory: Path, name: str, pool_bytes: int, **settings: str
) -> tuple[subprocess.Popen[bytes], str]:
    """A daemon of its own, serving, and its address."""
    address = f"unix://{directory}/{name}.sock"
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("ECD_")},
        "ECD_ADDRESS": address,
        "ECD_NAME": f"bench-{os.getpid()}-{name}",
        "ECD_HOST_POOL_BYTES": str(pool_bytes),
        "ECD_METRICS_ADDRESS": "127.0.0.1:0",
        "ECD_LOG_LEVEL": "warning",
        **settings,
    }
    daemon = subprocess.Popen([sys.executable, "-m", "ecd", "serve"], env=environment)
    with Client(address, connect_timeout=0.0) as client:
        try:
            client.wait_connected(60)
        except DaemonUnavailable:
            daemon.kill()
            raise
    return daemon, address


def end_daemon(daemon: subprocess.Popen[bytes]) -> None:
    """End the daemon with SIGINT, so that it leaves no pool for a next start."""
    daemon.send_signal(signal.SIGINT)
    daemon.wait()


@contextmanager
def redis_server(directory: Path, port: int) -> Iterator[Any]:
    """A Redis on this port of loopback that keeps nothing on disk, by a client of it."""
    from redis import Redis
    from redis.exceptions import ConnectionError

    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen([*command, "--dir", str(directory)], stdout=log, stderr=log)
    redis = Redis(port=port)
    try:
        while True:
            try:
                redis.ping()
                break
            except ConnectionError:
                time.sleep(0.05)
        yield redis
    finally:
        process.terminate()
        process.wait()


def processes() -> Any:
    """New processes without a copy of this one's threads, and with one copy of its modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__"])
    return context


def open_store(place: str, segment_bytes: int) -> Any:
    """A client of the master at `place` that gives the store so much memory."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 * MIB, "tcp", "", place)
    assert store.setup(*arguments) == 0
    return store


def machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(": ")[2]
            break
    return f"{os.cpu_count()} cores, {model}, Linux {platform.release()}, Python " + (
        f"{platform.python_version()}, torch {torch.__version__}"
    )


def show(out: Console, title: str, rows: list[list[str]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    out.print(table)


def report(
    title: str, rows: list[list[str]], output: Path | None, width: int, where: str = ""
) -> None:
    """Show one table and, if so wanted, write it as Markdown under the machine's description."""
    show(Console(highlight=False, width=width), title, rows)
    if output is not None:
        write_page(output, f"{machine()}{where}.\n{title}\n\n{markdown(rows)}")


def write_page(page: Path, text: str) -> None:
    """Replace what the page measured before. Its head, down to the mark, stays."""
    head, mark, _ = page.read_text().partition(MEASURED) if page.exists() else ("", "", "")
    when = f"Measured on {date.today()}, commit {commit()}.\n"
    page.write_text(f"{head}{mark}\n\n{when}{text}".lstrip())


def commit() -> str:
    """What is checked out, and whether it was changed."""
    describe = ["git", "describe", "--always", "--dirty"]
    said = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return said or "unknown"


def markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, f"| {' | '.join(['---'] * len(rows[0]))} |")
    return "\n".join(lines) + "\n"
