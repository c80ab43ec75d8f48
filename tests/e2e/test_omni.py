"""Two thinkers of vLLM-Omni share what their encoders make: of pictures, sounds and videos."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import kept_warm, require, result_of
from e2e.servers import Server
from support.daemon import Daemon
from support.waiting import eventually

pytestmark = pytest.mark.timeout(600)

MODEL = "qwen3_omni"
IMPORTED = "vllm_omni.entrypoints.cli.serve", "vllm_omni.worker.gpu_ar_worker"
CHAT = """{% set shown = {
  "image": "<|vision_start|><|image_pad|><|vision_end|>",
  "video": "<|vision_start|><|video_pad|><|vision_end|>",
  "audio": "<|audio_start|><|audio_pad|><|audio_end|>"} -%}
{% for part in messages[0].content %}{{ shown.get(part.type) or part.text }}{% endfor %}"""
THINKER = {
    "stage_id": 0,
    "load_format": "dummy",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 64 << 20,
}
PIPELINE = "qwen3_omni_moe_thinker_only"
ASKED = "A", "B", "S", "V", "ASV"
"""Two pictures, a sound, a video, and one of each kind in one request; by names of the matrix."""


class Thinker:
    """vLLM-Omni's server of one stage, the thinker of Qwen3-Omni, with ecd's connector."""

    def __init__(self, log: Path, model: Path, address: str) -> None:
        transfer = {
            "ec_connector": "EcdConnector",
            "ec_connector_module_path": "ecd_client.vllm",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"ecd_address": address},
        }
        deploy, chat = log.with_suffix(".json"), log.with_suffix(".jinja")
        deploy.write_text(json.dumps({"pipeline": PIPELINE, "stages": [THINKER]}))
        chat.write_text(CHAT)
        command = ["-m", "vllm_omni.entrypoints.cli.main", "serve", str(model), "--omni"]
        command += ["--deploy-config", str(deploy), "--served-model-name", "tiny"]
        command += ["--stage-overrides", json.dumps({"0": {"ec_transfer_config": transfer}})]
        command += ["--chat-template", str(chat), "--chat-template-content-format", "openai"]
        self._server = Server("omni", log, command)

    def answer(self, parts: list[dict[str, Any]]) -> list[int]:
        shown = [{"type": "text", "text": "so "}, *parts, {"type": "text", "text": " what is it?"}]
        asked = {"messages": [{"role": "user", "content": shown}], "modalities": ["text"]}
        how = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, body = self._server.ask("/v1/chat/completions", **asked, **how)
        assert status == 200, body
        return body["choices"][0]["token_ids"]

    def encoded(self) -> int:
        """How often its encoders have run."""
        return self._server.text().count("media are encoded")

    def wait_ready(self) -> None:
        self._server.wait_ready()

    def close(self) -> None:
        self._server.kill()  # its own end takes seconds


@pytest.fixture
def media(tmp_path: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """The matrix's media as parts of a chat, beside the model."""
    require("vllm-omni")
    with kept_warm(*IMPORTED):
        yield result_of("omni", "models/write.py", MODEL, str(tmp_path / MODEL), *"ABSVW")


@pytest.fixture
def thinkers(media: object, daemon: Daemon, tmp_path: Path) -> Iterator[list[Thinker]]:
    with ExitStack() as started:
        logs = tmp_path / "first.log", tmp_path / "second.log"
        both = [Thinker(log, tmp_path / MODEL, daemon.address) for log in logs]
        for each in both:
            started.callback(each.close)
        for each in both:
            each.wait_ready()
        yield both


def test_a_thinker_answers_by_what_another_encoded(
    thinkers: list[Thinker], media: dict[str, dict[str, Any]], daemon: Daemon
) -> None:
    asked = [[media[item] for item in items] for items in ASKED]
    first, second = thinkers
    started = first.encoded(), second.encoded()
    right = list(map(first.answer, asked))
    assert len(set(map(tuple, right))) == len(ASKED), "media do not matter"
    assert first.encoded() > started[0]
    eventually(lambda: daemon.status().entries == 4, "every item is stored")
    before = daemon.status().counters
    assert list(map(second.answer, asked)) == right
    assert second.encoded() == started[1]
    after = daemon.status().counters
    assert (after.hits - before.hits, after.misses - before.misses) == (4, 0)

    second.answer([media["W"]])
    assert second.encoded() == started[1] + 1, "what nobody has is encoded"
    eventually(lambda: daemon.status().leases == 0, "every load is over")
