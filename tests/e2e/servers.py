"""vLLM's own HTTP servers, and the proxy of its examples, as their users start them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import urllib.error
import urllib.request
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from e2e.engines import HERE, ROOT, START_S, Fork, end_of, last_words, python_of, shared_memory_of
from support.processes import GRACE_S, Command, child
from support.waiting import HANG_S, stopped, value_of

PROXY_VERSION = "0.32.0"
PROXY = "examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py"


def proxy_script() -> Path:
    """The example proxy out of vLLM's source distribution (45 MB), fetched once.

    pip hands out no source without asking it for its metadata, which is not needed and fails where
    its build tools are missing: what it had unpacked by then is all that is wanted.
    """
    script = ROOT / ".venvs" / f"vllm-{PROXY_VERSION}-examples" / Path(PROXY).name
    if not script.exists():
        script.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=script.parent) as unpacked:
            fetch = ["download", "-q", "--no-cache-dir", "--no-clean", "--no-deps", "-d", unpacked]
            fetch += ["--no-binary", "vllm", "--no-build-isolation", f"vllm=={PROXY_VERSION}"]
            ran = installing(
                [python_of(PROXY_VERSION), "-m", "pip", *fetch],
                env={**os.environ, "TMPDIR": unpacked},
            )
            for found in Path(unpacked).glob(f"*/*/{PROXY}"):
                shutil.copy(found, script.with_suffix(".new"))
                script.with_suffix(".new").rename(script)
    if not script.exists():
        said = f"vLLM's example proxy CANNOT BE HAD: {ran.stdout[-500:]}{ran.stderr[-1000:]}"
        if os.environ.get("ECD_REQUIRE_VLLM"):
            pytest.fail(said)
        pytest.skip(said)
    return script


def installing(command: Command, **about: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that fetches packages, for as long as their registry takes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with child(command, **pipes, **about) as process:
        out, err = process.communicate(timeout=START_S)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


_ports = count(20000 + 2000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))


def free_port() -> int:
    """A port that nobody is given by the kernel before it is bound, as one of `bind(0)` may be."""
    for port in _ports:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def describes(body: dict) -> bool:
    """Whether an encoder's answer describes every item: their puts were seen before it."""
    params = body.get("ec_transfer_params") or {}
    return bool(params) and all(each["metadata"] for each in params.values())


class Server:
    """One process that serves HTTP. Starts at once, `wait_ready` waits."""

    def __init__(
        self,
        version: str,
        log: Path,
        command: list[str],
        spares: Sequence[int] = (1, 1),
        host: str = "127.0.0.1",
        **environ: str,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [*command, "--host", host, "--port", f"{self.port}"]
        with log.open("wb") as out:
            environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environ}
            self._process = Fork(version, command, out, spares=spares, **environ)

    def wait_ready(self) -> Server:
        state = ""
        for _ in range(round(START_S / HANG_S)):
            with contextlib.suppress(AssertionError):  # not within HANG_S
                state = value_of(self._state, "an answer or an end")
                break
        assert state == "answers", f"{state or 'not ready'}:\n{last_words(self.text())}"
        return self

    def _state(self) -> str:
        if not self.alive:
            return "ended"
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=HANG_S):
                return "answers"
        except OSError as error:
            return "answers" if getattr(error, "code", 0) == 401 else ""  # it wants a key

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def had_for_s(self) -> list[float]:
        """For each request, how long ecd's middleware had it before vLLM; where it is counted."""
        return [float(s) for s in re.findall(r"ecd had a request for (\S+) s", self.text())]

    def chat(
        self, content: list[dict], headers: dict[str, str] | None = None, **options: object
    ) -> tuple[int, dict]:
        """Status and body of a chat completion, greedy, with what the tokens are judged by."""
        try:
            with self.open(content, headers, options) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, {"error": error.read().decode()}

    def ask(self, path: str, **body: object) -> tuple[int, dict]:
        """Status and body of another request to this path."""
        try:
            with self._post(path, {"model": "tiny", **body}) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, {"error": error.read().decode()}

    def stream(self, content: list[dict], lines: int | None = None, **options: object) -> list[str]:
        """The lines of a streamed chat completion; only the first `lines`, and then it leaves."""
        with self.open(content, None, {"stream": True, **options}) as reply:
            said = (line.decode().strip() for line in reply)
            return list(itertools.islice(filter(None, said), lines))

    def samples(self) -> dict[str, float]:
        """The values on the engine's own /metrics, each by its name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as reply:
            lines = [line.rpartition(" ") for line in reply.read().decode().splitlines()]
        return {name: float(value) for name, _, value in lines if not name.startswith("#")}

    def sample(self, name: str) -> float:
        """The value of this name, that of all labels together."""
        return sum(value for each, value in self.samples().items() if each.split("{")[0] == name)

    def open(self, content: list[dict], headers: dict[str, str] | None, options: dict) -> Any:
        """The answer to a chat completion while it comes, as a file."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 6,
            "ignore_eos": True,
            "logprobs": True,
            **options,
        }
        return self._post("/v1/chat/completions", body, headers)

    def _post(self, path: str, body: dict, headers: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        return urllib.request.urlopen(request, timeout=START_S)

    def metrics(self) -> dict[str, float]:
        """The counters of ecd on the engine's own /metrics."""
        return {
            name.partition("_total{")[0]: value
            for name, value in self.all_metrics().items()
            if "_total{" in name
        }

    def all_metrics(self) -> dict[str, float]:
        """The same with their labels, and ecd's gauges."""
        prefix = "vllm:ecd_"
        samples = self.samples().items()
        return {name.removeprefix(prefix): v for name, v in samples if name.startswith(prefix)}

    @contextlib.contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """Have its engine, a process of its own, do nothing meanwhile; it answers for itself."""
        children = psutil.Process(self.pid).children(recursive=True)
        assert children, "it has no process but its own"
        with contextlib.ExitStack() as still:
            for each in children:
                # The server may be killed meanwhile.
                still.enter_context(contextlib.suppress(ProcessLookupError))
                still.enter_context(stopped(each.pid))
            yield

    def kill(self) -> None:
        """End all of its processes at once, with those that would remove what they shared."""
        shared = shared_memory_of(self.pid)
        end_of(self._process)
        for file in shared:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """SIGTERM, after which the last of its processes removes what the others shared."""
        if self.alive:
            shared = shared_memory_of(self.pid)
            os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            for file in shared:
                file.unlink(missing_ok=True)
        self.kill()


def api_server(
    version: str,
    log: Path,
    model: Path,
    role: str | None,
    flags: Sequence[str] = (),
    counting: bool = False,
    environ: Mapping[str, str] | None = None,
    kv: Path | None = None,
    processes: int = 1,
    host: str = "127.0.0.1",
    **extra: object,
) -> Server:
    """With `counting` its log tells of each time that media are preprocessed, and encoded.

    Engines with one directory `kv` share the KV of prompts, by vLLM's example connector. With
    `processes` it is the command `vllm serve`, which may start so many.
    """
    command = ["-m", "vllm.entrypoints.openai.api_server"]
    if processes > 1:
        command = [str(HERE / "several_servers.py")]
    if counting:
        command = [str(HERE / "counting_server.py")]
        flags = [*flags, "--worker-extension-cls", "counting_worker.Counting"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "8"]
    if "--gpu-memory-utilization" not in flags:  # or vLLM takes most of the memory for KV
        command += ["--kv-cache-memory-bytes", f"{64 << 20}"]
    command += ["--limit-mm-per-prompt", json.dumps({"image": 4, "video": 0})]
    if role is not None:
        transfer = {
            "ec_connector": "EcdConnector",
            "ec_connector_module_path": "ecd_client.vllm",
            "ec_role": role,
            "ec_connector_extra_config": extra,
        }
        command += ["--ec-transfer-config", json.dumps(transfer)]
    if role == "ec_producer":
        command += ["--no-enable-prefix-caching"]
    if kv is not None:
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(kv)},
        }
        command += ["--kv-transfer-config", json.dumps(transfer), "--block-size", "32"]
    spares = processes, 1
    return Server(version, log, [*command, *flags], spares, host, **(environ or {}))


def proxy(
    log: Path,
    encoders: Sequence[Server],
    decoders: Sequence[Server],
    prefills: Sequence[Server] = (),
) -> Server:
    command = [str(proxy_script())]
    for stage, servers in (("encode", encoders), ("prefill", prefills), ("decode", decoders)):
        if servers:
            command += [f"--{stage}-servers-urls", ",".join(server.url for server in servers)]
    return Server(PROXY_VERSION, log, command)


def picture_url(
    seed: int, width: int = 336, height: int = 224, *, transparent: bool = False
) -> str:
    """A picture of coarse blocks of random colours, one of them transparent, as a data: URL."""
    random = Random(seed)
    rows = [[random.randbytes(3) for _ in range(6)] for _ in range(6)]
    lines = [b"".join(block * (width // 6) for block in row) for row in rows]
    clear = rows[0][0] if transparent else b""
    return _png(width // 6 * 6, [line for line in lines for _ in range(height // 6)], clear)


def noise_url(seed: int, side: int = 592) -> str:
    """A square picture of random pixels, which no format makes smaller: 1 MiB of 592 a side."""
    random = Random(seed)
    return _png(side, [random.randbytes(3 * side) for _ in range(side)])


def _png(width: int, lines: list[bytes], clear: bytes = b"") -> str:
    """`clear` is the colour that is transparent."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    size = struct.pack(">IIBBBBB", width, len(lines), 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + line for line in lines))
    levels = b"".join(bytes((0, level)) for level in clear)
    more = chunk(b"tRNS", levels) if levels else b""
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + more + chunk(b"IDAT", pixels)
    return "data:image/png;base64," + b64encode(png + chunk(b"IEND", b"")).decode()
