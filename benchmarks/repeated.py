"""Time to the first token of a picture that another engine has encoded, over HTTP.

    python benchmarks/repeated.py [--rounds N] [--size 1008x756] [--output FILE.md]

vLLM's own API servers: two that encode, one for ecd and one for vLLM's file-based example
connector; and one for each way to get what these have: ecd with its middleware, ecd's connector
alone, the example connector, and nothing. Each round brings a new picture, a JPEG, which the
encoders get first; then the others are asked for it, one after the other in random order. None of
these has seen it before, so no cache of vLLM's own has anything of it. The models are tiny and
random, the pictures are not. At last, how long the middleware has a request before vLLM gets it.
Needs `make vllm`.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from base64 import b64encode
from collections import defaultdict
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from common import MIB, end_daemon, report, start_daemon
from PIL import Image
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from e2e.engines import make_model
from e2e.servers import Server, api_server, noise_url

VERSION = "0.32.0"
MIDDLEWARE, CONNECTOR, EXAMPLE, NOTHING = (
    "ecd, with its middleware",
    "ecd's connector alone",
    "vLLM's ECExampleConnector",
    "nothing",
)
SAVE_S = 0.3
"""Between the encoders' answers and the first question: no save is waited for."""
SPINS_S = 1.2
"""vLLM's processes spin for a second after a message, and leave the next server too few cores."""


def picture(size: tuple[int, int], seed: int) -> str:
    """A JPEG of blocks of random colours with some noise, as a data: URL."""
    generator = np.random.default_rng(seed)
    width, height = size
    blocks = generator.integers(0, 256, (height // 12, width // 12, 3))
    pixels = blocks.repeat(12, axis=0).repeat(12, axis=1) + generator.normal(
        0, 12, (height // 12 * 12, width // 12 * 12, 3)
    )
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).resize(size)
    with BytesIO() as file:
        image.save(file, "JPEG", quality=85)
        return "data:image/jpeg;base64," + b64encode(file.getvalue()).decode()


def ask(server: Server, url: str) -> float:
    """Seconds until the first token."""
    content = [
        {"type": "text", "text": f"{random.random()}"},  # no prefix is known
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "what is in this picture?"},
    ]
    started_s = time.perf_counter()
    server.stream(content, lines=2, max_tokens=1, logprobs=False)  # the role, then the token
    return time.perf_counter() - started_s


def start(directory: Path, model: Path, address: str) -> dict[str, Server]:
    """The servers, by way; those that encode by the connector's name."""
    ecd = {"ecd_address": address}
    files = directory / "files"
    files.mkdir()

    def server(name: str, connector: str | None, role: str, *flags: str) -> Server:
        chosen = list(flags)
        if connector is not None:
            transfer = {"ec_connector": connector, "ec_role": role}
            if connector == "EcdConnector":
                transfer["ec_connector_module_path"] = "ecd_client.vllm"
                transfer["ec_connector_extra_config"] = ecd
            else:
                transfer["ec_connector_extra_config"] = {"shared_storage_path": str(files)}
            chosen += ["--ec-transfer-config", json.dumps(transfer)]
        if role == "ec_producer":
            chosen += ["--no-enable-prefix-caching"]
        log = directory / f"{name}.log"
        return api_server(VERSION, log, model, None, chosen, counting=True)

    flags = ("--middleware", "ecd_client.vllm.ReuseMiddleware")
    return {
        "EcdConnector": server("ecd-encoder", "EcdConnector", "ec_producer"),
        "ECExampleConnector": server("example-encoder", "ECExampleConnector", "ec_producer"),
        MIDDLEWARE: server("middleware", "EcdConnector", "ec_consumer", *flags),
        CONNECTOR: server("connector", "EcdConnector", "ec_consumer"),
        EXAMPLE: server("example", "ECExampleConnector", "ec_consumer"),
        NOTHING: server("nothing", None, ""),
    }


def had_for_ms(server: Server, content: list[dict], rounds: int) -> float:
    """How long the middleware has a request like this one, the first of which does not count."""
    for _ in range(rounds + 1):
        status, body = server.chat(content, max_tokens=1)
        assert status == 200, body
    return median(server.had_for_s()[-rounds:]) * 1e3


def main(
    rounds: Annotated[int, typer.Option(help="Pictures.")] = 30,
    size: Annotated[str, typer.Option(help="Of a picture.")] = "1008x756",
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    progress = Console(stderr=True)
    took: dict[str, list[float]] = defaultdict(list)
    width, height = map(int, size.split("x"))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        daemon, address = start_daemon(directory, "ecd", 512 * MIB)
        stack.callback(end_daemon, daemon)
        progress.print("starting six servers ...")
        model = make_model(VERSION, "qwen2_5_vl", directory / "model")
        servers = start(directory, model, address)
        for server in servers.values():
            stack.callback(server.close)
        for server in servers.values():
            server.wait_ready()
        encoders = [servers.pop(name) for name in ("EcdConnector", "ECExampleConnector")]
        seen = dict.fromkeys(servers, 0)
        for number in range(rounds + 2):
            progress.print(f"picture {number} ...")
            url = picture((width, height), number)
            for encoder in encoders:
                status, body = encoder.chat(_shown(url), max_tokens=1)
                assert status == 200, body
            time.sleep(SAVE_S)
            for way in random.sample(list(servers), len(servers)):
                before = servers[way].text().count("media are preprocessed")
                time.sleep(SPINS_S)
                took_s = ask(servers[way], url)
                if number >= 2:  # the first ones warm the servers up
                    took[way].append(took_s)
                    after = servers[way].text().count("media are preprocessed")
                    seen[way] += after - before
        middleware, large = servers[MIDDLEWARE], _shown(noise_url(0))
        assert encoders[0].chat(large, max_tokens=1)[0] == 200
        time.sleep(SAVE_S)
        words_ms = had_for_ms(middleware, [{"type": "text", "text": "what is what?"}], rounds)
        before = middleware.text().count("media are preprocessed")
        picture_ms = had_for_ms(middleware, large, rounds)
        assert middleware.text().count("media are preprocessed") == before, "it was not held"
    alone = took[CONNECTOR]
    rows = [["", "first token", "ratio", "calls of the processor"]]
    rows += [
        [
            way,
            f"{median(took[way]) * 1e3:.1f} ms",
            f"{median(a / b for a, b in zip(took[way], alone, strict=True)):.2f}x",
            f"{seen[way] / rounds:.0f}",
        ]
        for way in (MIDDLEWARE, CONNECTOR, EXAMPLE, NOTHING)
    ]
    report(
        f"Time to the first token of a picture of {size} that another engine has encoded; medians "
        f"of {rounds}. Ratios picture by picture, to the connector alone. The middleware has words "
        f"alone for {words_ms:.3f} ms before vLLM, and a held picture of 1 MiB for "
        f"{picture_ms:.1f} ms.",
        rows,
        output,
        width=120,
        where=f", vLLM {VERSION}",
    )


def _shown(url: str) -> list[dict]:
    return [{"type": "image_url", "image_url": {"url": url}}]


if __name__ == "__main__":
    typer.run(main)
