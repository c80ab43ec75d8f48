"""`make demo`: a daemon, a process that puts, a process that gets, and what happened.

The tensors are what a vision encoder makes of a 1024x1024 image for a 7B model: 1369 embeddings
of 3584 bfloat16 each, 9.8 MB.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from ecd_client import Client

SHAPE = (1369, 3584)
IMAGES = 8
SAY = {"flush": True}


def image(number: int) -> torch.Tensor:
    """The encoder output of one image."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SHAPE, generator=generator).to(torch.bfloat16)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()[:16]


def timed_ms(action) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def produce(address: str) -> None:
    outputs = [image(number) for number in range(IMAGES)]
    target = torch.empty_like(outputs[0])
    with Client(address, namespace="demo", name="producer") as client:
        time.sleep(0.5)  # a real engine connected long ago, and has its page tables filled
        copies = [timed_ms(lambda t=tensor: target.copy_(t)) for tensor in outputs]
        puts = [
            timed_ms(lambda n=number, t=tensor: client.put(f"image-{n}", t, cost=0.2))
            for number, tensor in enumerate(outputs)
        ]
    print(f"producer {os.getpid()}: put {IMAGES} embeddings of {outputs[0].nbytes:,} bytes", **SAY)
    print(f"  plain copy {median(copies):7.2f} ms each", **SAY)
    print(f"  put        {median(puts):7.2f} ms each", **SAY)


def consume(address: str) -> None:
    with Client(address, namespace="demo", name="consumer") as client:
        time.sleep(0.5)
        views, copies, same = [], [], 0
        for number in range(IMAGES):
            started = time.perf_counter()
            with client.get(f"image-{number}", timeout=10.0) as item:
                _ = item.tensor  # the pool's own memory: nothing is copied
                views.append((time.perf_counter() - started) * 1e3)
                copies.append(timed_ms(item.to))
                same += digest(item.tensor) == digest(image(number))
    print(f"consumer {os.getpid()}: got {IMAGES} embeddings from the other process", **SAY)
    print(f"  get, zero copy {median(views):7.2f} ms each", **SAY)
    print(f"  private copy   {median(copies):7.2f} ms each, if one is wanted", **SAY)
    print(f"  {same} of {IMAGES} are byte for byte what the producer encoded", **SAY)
    if same != IMAGES:
        sys.exit(1)


def main() -> None:
    if len(sys.argv) == 3:
        {"produce": produce, "consume": consume}[sys.argv[1]](sys.argv[2])
        return
    with tempfile.TemporaryDirectory(prefix="ecd-demo-") as directory:
        address = f"unix://{directory}/ecd.sock"
        pool_bytes = min(512 << 20, shutil.disk_usage("/dev/shm").free // 4)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ECD_")} | {
            "ECD_ADDRESS": address,
            "ECD_NAME": Path(directory).name,
            "ECD_HOST_POOL_BYTES": str(pool_bytes),
            "ECD_METRICS_ADDRESS": "127.0.0.1:0",
        }
        print(f"starting a daemon with a pool of {pool_bytes >> 20} MiB: ecd serve", **SAY)
        daemon = subprocess.Popen([sys.executable, "-m", "ecd", "serve"], env=environment)
        try:
            Client(address, connect_timeout=60.0).close()
            for role in ("produce", "consume"):
                subprocess.run([sys.executable, __file__, role, address], check=True)
            print("ecd-cli status", **SAY)
            status = [sys.executable, "-m", "ecd_client.cli.main", "status"]
            subprocess.run(status, env=environment, check=True)
            told = subprocess.run([*status, "--json"], env=environment, stdout=subprocess.PIPE)
            counters = json.loads(told.stdout)["counters"]
            assert int(counters["hits"]) == int(counters["puts"]) == IMAGES, counters
        finally:
            daemon.send_signal(signal.SIGINT)  # nothing stays for a next start
            daemon.wait()


if __name__ == "__main__":
    main()
