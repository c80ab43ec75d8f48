"""What `gpu.py` measures of vLLM: that engines share, and the time to the first token.

One engine for each way in which it may get an embedding; vLLM's Mooncake connector is no such way,
as it only moves outputs from one engine to another. Ways are compared as `ttft.py` compares
them, with one difference: each engine is compared with its own encoder cache, asked for the same
picture a moment later, as two processes differ by more than ways do.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gpu_common import GIB, NEAR, POOL_BYTES, Row, daemon_of

from ecd_client.session.channel import open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

ROOT = Path(__file__).parents[1]
VERSION = "0.32.0"
PICTURES, SIZE = 8, (896, 896)
TURNS = 40
"""Of each way, after one for each picture that is not counted."""
SAVE_S = 1.0
"""Between an engine's last answer and the next one's first request: its saves are over then."""
MOST = 1.01
"""First token with a copy in the device pool, of that with vLLM's own encoder cache."""
MODEL = os.environ.get("ECD_BENCH_MODEL")
"""A directory with a Qwen2.5-VL; without it a tiny one of random weights is made."""


class Way(NamedTuple):
    """Where an engine's embeddings come from."""

    pool: str | None
    environ: dict[str, str]
    extra: dict[str, bool]
    encodes: bool
    """Whether no engine before this one has put the pictures there."""
    most: float | None = None
    rival: dict[str, Any] | None = None
    """vLLM's setting of another connector."""

    @property
    def has_outputs(self) -> bool:
        """Whether an engine that has forgotten an output finds it in its connector."""
        return self.pool is not None or self.rival is not None


CPU_CONNECTOR = {
    "ec_connector": "ECCPUConnector",
    "ec_role": "ec_both",
    "ec_connector_extra_config": {"ec_cpu_bytes": POOL_BYTES},
}


WAYS = {
    "no ecd": Way(None, {}, {}, encodes=True),
    "vLLM's CPU connector": Way(
        None, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, {}, encodes=True, rival=CPU_CONNECTOR
    ),
    "the host pool, not pinned": Way("host", {"ECD_PIN": "off"}, {}, encodes=True),
    "the host pool, pinned": Way("host", {}, {}, encodes=False),
    "the device pool": Way("device", {}, {}, encodes=True, most=MOST),
    "views of the device pool": Way("device", {}, {"ecd_device_views": True}, False, MOST),
}
"""In the order in which their engines are asked first."""


def vllm() -> list[Row]:
    """All engines answer alike, and each loads what it does not encode itself; their times."""
    python = python_of_vllm()
    if python is None:
        return [Row("vLLM", "left out: no vLLM for CUDA in this environment or .venvs")]
    sys.path.append(str(ROOT / "tests"))
    from e2e import engines as e2e

    e2e.python_of = lambda version: python
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _, host = stack.enter_context(daemon_of(POOL_BYTES))
        _, device = stack.enter_context(daemon_of(POOL_BYTES, **NEAR))
        addresses = {"host": host, "device": device}
        model = MODEL or str(e2e.make_model(VERSION, "qwen2_5_vl", directory / "model"))
        engines = {}
        for number, (name, way) in enumerate(WAYS.items()):
            setup: dict[str, Any] = {
                "model": model,
                "engine": {
                    "gpu_memory_utilization": 0.12,
                    "kv_cache_memory_bytes": GIB,
                    "enable_prefix_caching": False,
                },
            }
            if way.pool is not None:
                extra = {"ecd_address": addresses[way.pool], **way.extra}
                setup |= {"role": "ec_both", "extra": extra}
            elif way.rival is not None:
                setup["connector"] = way.rival
            environ = {
                "VLLM_CACHE_ROOT": str(directory),
                **way.environ,
            }
            log = directory / f"engine-{number}.log"
            engines[name] = engine = e2e.Engine(VERSION, log, setup, **environ)
            stack.callback(engine.close)
            engine.wait_ready()  # one by one: each looks how much memory the others leave
        return [_sharing(engines, device), *_first_tokens(engines)]


def _request(seed: int) -> dict[str, Any]:
    return {"text": "what is in this picture?", "images": [[*SIZE, seed]]}


def _sharing(engines: dict[str, Any], address: str) -> Row:
    """Each engine answers for all pictures, one engine after the other.

    `address` is that of the daemon with the device pool, which has copies of them after that.
    """
    tokens, encoded = [], {}
    for name, engine in engines.items():
        answers = [engine.generate([_request(n)], max_tokens=8) for n in range(PICTURES)]
        tokens.append([each["outputs"][0]["tokens"] for each in answers])
        encoded[name] = sum(each["encoded"] for each in answers)
        time.sleep(SAVE_S)
    expected = [PICTURES * way.encodes for way in WAYS.values()]
    is_equal = all(each == tokens[0] for each in tokens)
    counters = {name: engines[name].metrics() for name, way in WAYS.items() if way.pool}
    pinned = [each.get("pinned_bytes", 0) > 0 for each in counters.values()]
    with open_channel(address) as channel:
        status = pb_grpc.CacheStub(channel).Status(pb.StatusRequest(), timeout=10.0)
    copies = status.counters.copies
    return Row(
        f"vLLM: pictures of {PICTURES} that engines encode, one engine after the other",
        f"{_listed(encoded.values())}, tokens {'equal' if is_equal else 'DIFFER'}, "
        f"{sum(pinned)} of {len(pinned)} have pinned the host pool, {copies} copies on the device",
        "; ".join(WAYS),
        f"{_listed(expected)}, equal, {len(pinned) - 1}, {PICTURES}",
        is_equal
        and list(encoded.values()) == expected
        and pinned == [False, True, True, True]
        and copies == PICTURES,
        {"counters": counters},
    )


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, numbers))


def _first_tokens(engines: dict[str, Any]) -> list[Row]:
    """Turns in random order: a picture that an engine has to get, then once more from its cache."""
    from ttft import ratio

    size = "x".join(map(str, SIZE))
    took: dict[str, dict[str, dict[str, list[float]]]] = {
        name: {"got": {size: []}, "cached": {size: []}} for name in engines
    }
    for turn in range(-PICTURES, TURNS):
        for name in random.sample(list(engines), len(engines)):
            for kind in ("got", "cached"):
                answer = _ask(engines[name], turn % PICTURES, is_cached=kind == "cached")
                is_encoded = kind == "got" and not WAYS[name].has_outputs
                assert answer["encoded"] == is_encoded, (name, kind, answer)
                if turn >= 0:  # the first time warms up
                    took[name][kind][size].append(answer["seconds"])
    rows = []
    for name, kinds in took.items():
        got, cached = kinds["got"][size], kinds["cached"][size]
        found = median(one / other for one, other in zip(got, cached, strict=True))
        most = WAYS[name].most
        rows.append(
            Row(
                f"vLLM: first token, picture of {size}, {name}",
                f"{median(got) * 1e3:.2f} ms, {ratio(kinds, [size], ('got', 'cached'))} of",
                f"that engine's own encoder cache: {median(cached) * 1e3:.2f} ms",
                "" if most is None else f"<= {most:.2f}",
                None if most is None else found <= most,
                {"seconds": kinds},
            )
        )
    return rows


def _ask(engine: Any, seed: int, is_cached: bool) -> dict[str, Any]:
    """Ask for the first token; without `is_cached` the engine has no embedding of its own."""
    engine.send({"do": "reset", "calls": []} if is_cached else {"do": "forget"})
    engine.receive()
    return engine.generate([_request(seed)], max_tokens=1)


def python_of_vllm() -> Path | None:
    """The Python of an environment that has a vLLM for CUDA."""
    ask = "from vllm.platforms import current_platform as p; raise SystemExit(not p.is_cuda())"
    for python in (Path(sys.executable), ROOT / f".venvs/vllm-{VERSION}/bin/python"):
        if (
            python.exists()
            and not subprocess.run([python, "-c", ask], capture_output=True).returncode
        ):
            return python
    return None
