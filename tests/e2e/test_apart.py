"""An engine says what it shares, and is told of one that stores where it does not look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.engines import VERSIONS, installed, result_of
from e2e.engines import Engine as Process
from e2e.shared import CONTRACT, POOL, Engines
from ecd_proto.engines import Engine
from support.cli import cli
from support.daemon import Daemon
from support.waiting import eventually

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon without other engines."""
    daemon = Daemon(tmp_path, POOL).start()
    yield daemon
    daemon.close()


def lines(engine: Process, text: str) -> list[str]:
    return [line for line in engine.text().splitlines() if text in line]


def test_a_consumer_is_told_in_what_the_engine_differs_that_stores(
    own_daemon: Daemon, start_engine: Callable[..., Process]
) -> None:
    flags = {"mm_processor_kwargs": {"max_pixels": 200704}, "dtype": "bfloat16"}
    consumer = start_engine("ec_consumer", daemon=own_daemon, **flags).wait_ready()
    encoder = start_engine(
        "ec_producer",
        daemon=own_daemon,
        limit_mm_per_prompt={"image": 1, "video": 1},
        extra={"ecd_modalities": ["image"]},
    ).wait_ready()
    assert lines(consumer, "this engine shares image and video")
    assert lines(encoder, "this engine shares image; not video, left out by ecd_modalities")

    differ = "differ in dtype (bfloat16 and float32), mm_processor_kwargs"
    eventually(lambda: lines(consumer, "finds nothing"), "the consumer is told")
    [told] = lines(consumer, "finds nothing")
    assert f"pid {encoder.pid} stores for the same model" in told
    assert f"{differ}: start both with the same dtype, mm_processor_kwargs" in told
    assert not lines(encoder, "finds nothing"), "it looks for nothing"

    found = cli(own_daemon, "doctor").stdout
    assert f"look  engines: pid {consumer.pid} finds nothing of what pid {encoder.pid}" in found
    assert differ in found
    shown = cli(own_daemon, "status").stdout
    assert "stores image; not video" in shown
    assert "loads image and video" in shown


SHARES = {
    "plain": "image and video",
    "name": "image and video",
    "images": "image; not video, left out by ecd_modalities",
    "one limit": "image; not video, left out by --limit-mm-per-prompt",
    "audio": "audio; not the audio of a session that streams",
    "no weights": "image and video; but with no other engine: its log says why",
}
WHY_NOTHING = {
    "no media": "--limit-mm-per-prompt or ecd_modalities leaves out image and video",
    "no modality": "--limit-mm-per-prompt or ecd_modalities leaves out image and video",
    "uuids": "ecd_uuids is refuse",
    "counters": "with --mm-processor-cache-gb 0",
    "whisper": "encoder-decoder models",
    "words": "the model takes no media",
}
DIFFER = {
    "name": [],
    "dtype": ["dtype"],
    "processor": ["load_format", "mm_processor_kwargs", "weights"],
    "versions": ["ecd_code_version", "ecd_weights_version"],
    "run": ["ecd_weights_version"],
    "namespace": ["ecd_namespace"],
}
"""The parts in which the namespaces of engines differ from that of the plain one."""
NO_ANSWER = "refused: ec_role is 'ec_producer', and vLLM answers no request of such an engine with"
ELSEWHERE = (
    "nothing: this engine's workers are on 2 machines, and the memory that its scheduler promises "
    "is on one of them"
)
UNKNOWN = (
    "nothing: the executor {} may have workers on other machines, or several schedulers that must "
    "decide alike"
)
SHARE = (
    "one worker",
    "tensor",
    "stages",
    "tensor and stages",
    "data",
    "pooling",
    "pooling in stages",
)
REFUSED = {
    "stages": "--pipeline-parallel-size 2; let ec_role be 'ec_both'",
    "tensor and stages": "--pipeline-parallel-size 2; let ec_role be 'ec_both'",
    "stages on machines": "--pipeline-parallel-size 2; let ec_role be 'ec_both'",
    "pooling": "the pooling runner; let ec_role be 'ec_both'",
    "pooling in stages": "the pooling runner; let ec_role be 'ec_both'",
}
"""The layouts that an `ec_producer` cannot have."""


@CONTRACT
def test_an_engine_says_what_it_shares_and_of_what_its_namespace_is_made(
    version: str, engines: Engines
) -> None:
    installed(version)
    kinds = "qwen2_5_vl", "qwen2_audio", "whisper", "drafter"
    models = [str(engines.model(VERSIONS[0], kind)) for kind in kinds]
    reply = result_of(version, "describe_sharing.py", *models)
    said = {name: Engine(**described) for name, described in reply["engines"].items()}
    assert {name: said[name].shares for name in SHARES} == SHARES
    for name, why in WHY_NOTHING.items():
        assert said[name].shares.startswith(f"nothing: {why}")
        assert (said[name].stores, said[name].loads) == (False, False)
    plain = said["plain"]
    assert (plain.stores, plain.loads) == (True, True)
    assert (said["one limit"].stores, said["one limit"].loads) == (True, False)
    assert {name: plain.differs_from(said[name]) for name in DIFFER} == DIFFER
    assert "weights" in plain.differs_from(said["no weights"])
    assert said["name"].model == "tiny"
    for each in said.values():
        assert Engine.of(each.message) == each, "its daemon takes it"
    assert reply["ways"] == {
        f"{layout}, {role}": line
        for layout, line in {
            **dict.fromkeys(SHARE, "image and video"),
            **dict.fromkeys(("machines", "stages on machines"), ELSEWHERE),
            "launcher": UNKNOWN.format("external_launcher"),
            "own executor": UNKNOWN.format("vllm.v1.executor.uniproc_executor.UniProcExecutor"),
        }.items()
        for role in ("ec_producer", "ec_consumer", "ec_both")
    } | {f"{layout}, ec_producer": f"{NO_ANSWER} {why}" for layout, why in REFUSED.items()}
    assert reply["ranks"] == 1, "those of data parallelism are one engine"
    assert reply["told"] == {
        "once for each": 2,
        "of one that loads": 0,
        "who looks for nothing": 0,
        "who shares with no other": 0,
    }
