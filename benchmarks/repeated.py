"""Time to the first token of a medium that another engine has encoded, over HTTP.

    python benchmarks/repeated.py [--rounds N] [--kind KIND ...] [--output FILE.md]

A kind is a picture of a model with placeholder metadata (Qwen2.5-VL), one of a family without
(InternVL, Gemma 3, ...), a video of 16 frames (Qwen2.5-VL), or a recording of 30 s (Qwen2-Audio).
For each, vLLM's own API servers: three that have the medium first, with ecd's middleware, with
ecd's connector, and with vLLM's file-based example connector; and one for each way to get what
these have: ecd with its middleware, ecd's connector alone, the example connector, and nothing. Of
the families without metadata the first two ways are compared. Each round brings a new medium, which
the first ones get; then the others are asked for it, one after the other in random order. None of
these has seen it before, so no cache of vLLM's own has anything of it. The models are tiny and
random; the media are not, and the families' pictures become as many tiles and embeddings as those
of their real models. At last, how long the middleware has a request before vLLM gets it, and of
the kind `words` alone, at each door. Needs `make vllm`.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import wave
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from common import MIB, end_daemon, report, start_daemon
from PIL import Image
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from e2e.engines import make_model, output_of, result_of
from e2e.servers import Server, api_server

VERSION = "0.32.0"
MIDDLEWARE, CONNECTOR, EXAMPLE, NOTHING = (
    "ecd, with its middleware",
    "ecd's connector alone",
    "vLLM's ECExampleConnector",
    "nothing",
)
ALL_WAYS, BOTH = (MIDDLEWARE, CONNECTOR, EXAMPLE, NOTHING), (MIDDLEWARE, CONNECTOR)
SIZE = 1008, 756
FRAMES, RATE, FRAME = 16, 2.0, (448, 336)
SOUND_S, SAMPLES = 30, 16_000
FLAGS = "--middleware", "ecd_client.vllm.ReuseMiddleware"
READY = "that are stored are not preprocessed"
SAVE_S = 0.3
"""Between the encoders' answers and the first question: no save is waited for."""
SPINS_S = 1.2
"""vLLM's processes spin for a second after a message, and leave the next server too few cores."""


@dataclass(frozen=True)
class Kind:
    """Media of one kind: a name, a tiny model, the part that has one, and its bytes by number."""

    name: str
    model: str
    part: str
    media_type: str
    make: Callable[[Path, int], bytes]
    limits: str = '{"image": 1, "video": 0}'
    is_family: bool = False
    """Whether the model is one of `repeated_model.py`, and the ways that it is asked in are two."""

    @property
    def ways(self) -> tuple[str, ...]:
        return BOTH if self.is_family else ALL_WAYS

    def make_model(self, directory: Path) -> list[str]:
        """Write the model; returns the flags that its servers need."""
        if not self.is_family:
            make_model(VERSION, self.model, directory)
            return []
        script = str(Path(__file__).with_name("repeated_model.py"))
        template = directory.with_name("template.jinja")
        template.write_text(result_of(VERSION, script, self.model, str(directory)))
        flags = ["--load-format", "dummy", "--chat-template", str(template)]
        flags += ["--chat-template-content-format", "openai", "--max-model-len", "4096"]
        return [*flags, "--max-num-batched-tokens", "8192", "--skip-mm-profiling"]

    def content(self, directory: Path, number: int) -> list[dict[str, Any]]:
        """A part that has the medium, as a data: URL."""
        data = b64encode(self.make(directory, number)).decode()
        return [{"type": self.part, self.part: {"url": f"data:{self.media_type};base64,{data}"}}]


def picture(directory: Path, number: int, size: tuple[int, int] = SIZE) -> bytes:
    """A JPEG of blocks of random colours with some noise."""
    generator = np.random.default_rng(number)
    width, height = size
    blocks = generator.integers(0, 256, (height // 12, width // 12, 3))
    pixels = blocks.repeat(12, axis=0).repeat(12, axis=1) + generator.normal(
        0, 12, (height // 12 * 12, width // 12 * 12, 3)
    )
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).resize(size)
    with BytesIO() as file:
        image.save(file, "JPEG", quality=85)
        return file.getvalue()


def video(directory: Path, number: int) -> bytes:
    """An MPEG-4, of those that are made at once."""
    return (directory / f"{number}.mp4").read_bytes()


def sound(directory: Path, number: int) -> bytes:
    """A WAV of noise."""
    noise = np.random.default_rng(number).integers(-8192, 8192, SOUND_S * SAMPLES, np.int16)
    with BytesIO() as file:
        with wave.open(file, "wb") as out:
            out.setparams((1, 2, SAMPLES, 0, "NONE", ""))
            out.writeframes(noise.tobytes())
        return file.getvalue()


KINDS = {
    "picture": Kind("a picture", "qwen2_5_vl", "image_url", "image/jpeg", picture),
    "video": Kind(
        *("a video of 16 frames", "qwen2_5_vl", "video_url", "video/mp4", video),
        json.dumps({"video": {"count": 1, "num_frames": FRAMES, "width": 448, "height": 336}}),
    ),
    "sound": Kind(
        *("a recording of 30 s", "qwen2_audio", "audio_url", "audio/wav", sound, '{"audio": 1}')
    ),
}
FAMILIES = {
    "internvl": "InternVL",
    "gemma3": "Gemma 3",
    "llama4": "Llama 4",
    "llava_next": "LLaVA-NeXT",
    "pixtral": "Pixtral",
    "idefics3": "Idefics 3",
    "glm4v": "GLM-4V",
}
"""Those without placeholder metadata, whose pictures come by outlines."""
KINDS |= {
    name: Kind(*(f"a picture, {called}", name, "image_url", "image/jpeg", picture), is_family=True)
    for name, called in FAMILIES.items()
}
CHAT = "/v1/chat/completions"
WORDS, SAID = "words", {"role": "user", "content": "what is what?"}
GENERATING: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [SAID]},
    f"{CHAT}/batch": {"messages": [[SAID]]},
    "/v1/completions": {"prompt": SAID["content"]},
    "/v1/responses": {"input": SAID["content"]},
    "/v1/messages": {"messages": [SAID], "max_tokens": 1},
}
POOLING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"messages": [SAID]},
    "/pooling": {"messages": [SAID]},
}
"""Doors of a server that generates, and of one that pools, and what a request there has."""
CHOICES = ", ".join([*KINDS, WORDS])
WORK = "media are preprocessed", "a video is decoded", "a sound is decoded"


def work(server: Server) -> tuple[int, int]:
    """Calls of the processor, and videos and sounds decoded."""
    text = server.text()
    calls, *decodes = map(text.count, WORK)
    return calls, sum(decodes)


def ask(server: Server, part: list[dict[str, Any]]) -> float:
    """Seconds until the first token."""
    content = [
        {"type": "text", "text": f"{random.random()}"},  # no prefix is known
        *part,
        {"type": "text", "text": "what is in this picture?"},
    ]
    started_s = time.perf_counter()
    server.stream(content, lines=2, max_tokens=1, logprobs=False)  # the role, then the token
    return time.perf_counter() - started_s


def start(directory: Path, model: Path, address: str, kind: Kind) -> dict[str, Server]:
    """The servers, by way; those that have a medium first by the way that they are first for."""
    more = kind.make_model(model)
    ecd = {"ecd_address": address}
    files = directory / "files"
    files.mkdir()

    def server(name: str, connector: str | None, role: str, *flags: str) -> Server:
        chosen = ["--limit-mm-per-prompt", kind.limits, *more, *flags]
        if connector is not None:
            transfer: dict[str, object] = {"ec_connector": connector, "ec_role": role}
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

    servers = {
        f"first, {MIDDLEWARE}": server("first", "EcdConnector", "ec_both", *FLAGS),
        MIDDLEWARE: server("middleware", "EcdConnector", "ec_consumer", *FLAGS),
        CONNECTOR: server("connector", "EcdConnector", "ec_consumer"),
    }
    if kind.is_family:  # vLLM's name of a picture is the middleware's, too
        return servers
    return servers | {
        f"first, {CONNECTOR}": server("ecd-encoder", "EcdConnector", "ec_producer"),
        f"first, {EXAMPLE}": server("example-encoder", "ECExampleConnector", "ec_producer"),
        EXAMPLE: server("example", "ECExampleConnector", "ec_consumer"),
        NOTHING: server("nothing", None, ""),
    }


def had_for_ms(server: Server, rounds: int, path: str, **body: Any) -> float:
    """How long the middleware has a request like this one, the first of which does not count."""
    for _ in range(rounds + 1):
        status, said = server.ask(path, **body)
        assert status == 200, said
    return median(server.had_for_s()[-rounds:]) * 1e3


def await_middleware(server: Server) -> None:
    while READY not in server.text():
        time.sleep(0.1)


def words(rounds: int, progress: Console) -> str:
    """How long the middleware has requests without media, at each door."""
    took = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        daemon, address = start_daemon(directory, "ecd", 64 * MIB)
        stack.callback(end_daemon, daemon)
        progress.print("words alone: starting two servers ...")
        model = make_model(VERSION, "qwen2_5_vl", directory / "model")
        pooling = "--runner", "pooling", "--convert", "embed"
        for doors, flags in ((GENERATING, ()), (POOLING, pooling)):
            log, chosen = directory / f"{len(doors)}.log", [*FLAGS, *flags]
            server = api_server(
                VERSION, log, model, "ec_both", chosen, counting=True, ecd_address=address
            )
            stack.callback(server.close)
            server.wait_ready()
            await_middleware(server)
            for path, body in doors.items():
                took.append(f"{had_for_ms(server, rounds, path, **body):.3f} ms at {path}")
    return f"Words alone by door: {', '.join(took)}."


def measure(kind: Kind, rounds: int, progress: Console) -> tuple[list[list[str]], str]:
    """The rows of one kind of media, and how long the middleware has its requests."""
    took: dict[str, list[float]] = defaultdict(list)
    done: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        daemon, address = start_daemon(directory, "ecd", 512 * MIB)
        stack.callback(end_daemon, daemon)
        progress.print(f"{kind.name}: starting its servers ...")
        if kind.make is video:
            said = map(str, (rounds + 2, RATE, FRAMES, *FRAME))
            output_of(VERSION, "clips.py", str(directory), *said)
        servers = start(directory, directory / "model", address, kind)
        for server in servers.values():
            stack.callback(server.close)
        for server in servers.values():
            server.wait_ready()
        for way, server in servers.items():
            if way.endswith(MIDDLEWARE):
                await_middleware(server)
        first = [servers.pop(way) for way in list(servers) if way.startswith("first")]
        for number in range(rounds + 2):
            progress.print(f"{kind.name} {number} ...")
            part = kind.content(directory, number)
            for server in first:
                status, body = server.chat(part, max_tokens=1)
                assert status == 200, body
            time.sleep(SAVE_S)
            for way in random.sample(list(servers), len(servers)):
                before = work(servers[way])
                time.sleep(SPINS_S)
                took_s = ask(servers[way], part)
                if number >= 2:  # the first ones warm the servers up
                    took[way].append(took_s)
                    for at, now in enumerate(work(servers[way])):
                        done[way][at] += now - before[at]
        middleware = servers[MIDDLEWARE]
        words_ms = had_for_ms(middleware, rounds, CHAT, **GENERATING[CHAT], max_tokens=1)
        before, held = work(middleware), kind.content(directory, rounds + 1)
        talk = [{"role": "user", "content": held}]
        held_ms = had_for_ms(middleware, rounds, CHAT, messages=talk, max_tokens=1)
        assert work(middleware) == before, "it was not held"
    alone = took[CONNECTOR]
    rows = [
        [
            kind.name if way == MIDDLEWARE else "",
            way,
            f"{median(took[way]) * 1e3:.1f} ms",
            f"{median(a / b for a, b in zip(took[way], alone, strict=True)):.2f}x",
            *(f"{count / rounds:.0f}" for count in done[way]),
        ]
        for way in kind.ways
    ]
    nbytes = len(held[0][kind.part]["url"])
    return rows, (
        f"Before vLLM, the middleware of {kind.model} has words alone for {words_ms:.3f} ms, and "
        f"{kind.name} ({nbytes / MIB:.2f} MiB in the request) for {held_ms:.1f} ms."
    )


def main(
    rounds: Annotated[int, typer.Option(help="Media of each kind.")] = 20,
    kind: Annotated[list[str] | None, typer.Option(help=f"Only these: {CHOICES}.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    if unknown := {*(kind or ())} - {*KINDS, WORDS}:
        raise typer.BadParameter(f"no such kind: {', '.join(sorted(unknown))}")
    progress = Console(stderr=True)
    rows = [["", "", "first token", "ratio", "calls of the processor", "decodes"]]
    had: Sequence[str] = []
    for name in kind or [*KINDS, WORDS]:
        if name == WORDS:
            had = [*had, words(rounds, progress)]
            continue
        more, said = measure(KINDS[name], rounds, progress)
        rows += more
        had = [*had, said]
    report(
        f"Time to the first token of media that another engine has encoded; medians of {rounds}. "
        f"A picture has {SIZE[0]}x{SIZE[1]} pixels, a frame {FRAME[0]}x{FRAME[1]}. Ratios one by "
        f"one, to the connector alone. Decodes are of videos and sounds. {' '.join(had)}",
        rows,
        output,
        width=140,
        where=f", vLLM {VERSION}",
    )


if __name__ == "__main__":
    typer.run(main)
