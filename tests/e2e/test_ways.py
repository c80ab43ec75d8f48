"""Ways of running an engine: each answers as one without ecd, loads what others have, and stores.

docs/vllm-reference.md has the table of ways. Other files have those that fail otherwise: pipeline
stages and pooling (`test_layouts.py`), sleep (`test_identity.py`), three engines
(`test_two_nodes.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.chats import WIDTH, packed, tensor, uploaded
from e2e.engines import HERE, ROOT, SPREAD, VERSIONS, Engine, result_of
from e2e.servers import free_port
from e2e.shared import Engines, Pictures, Plain, tokens
from e2e.test_reuse import shown
from support.daemon import Daemon
from support.waiting import eventually

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.parametrize("version", VERSIONS[:1], indirect=True, scope="session"),
]

COUNTS = {"worker_extension_cls": "counting_worker.Counting"}
"""The log tells of each forward of the vision tower, in whatever process it is."""
V2 = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": ":".join(map(str, (HERE / "site", HERE.parent, ROOT / "client", ROOT / "proto"))),
}
"""vLLM's second model runner, whose kernels Triton's interpreter runs on a CPU."""
AHEAD = {"async_scheduling": True}
CUTS = {"max_num_batched_tokens": 32}
"""An item has 96 embeddings, so that it takes several steps."""
NGRAM = {
    "speculative_config": {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 3}
}
DRAFTS = {
    "speculative_config": {"method": "draft_model", "model": "drafter", "num_speculative_tokens": 3}
}
EAGLE = {"speculative_config": {"method": "eagle3", "model": "eagle", "num_speculative_tokens": 2}}
VIDEOS = {"limit_mm_per_prompt": {"image": 4, "video": 1}}
ADAPTS = {"enable_lora": True, "max_lora_rank": 8}


def video(new: Pictures) -> dict:
    return {"text": "what is in this picture?", "images": [], "videos": [new.image()]}


@dataclass(frozen=True)
class Way:
    engine: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    alike: Mapping[str, Any] = field(default_factory=dict)
    """What the encoder and the plain engine are told, too, to answer the same."""
    splits: Mapping[str, Any] = field(default_factory=dict)
    """What parts the work, so that sums are others; the plain engine is told, too."""
    request: Callable[[Pictures], dict] = Pictures.request
    encoder: Mapping[str, Any] = field(default_factory=dict)
    """What the encoder alone is told."""
    adapter: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ecd."""
    ranks: int = 1
    """Workers that load each item."""
    items: int = 2
    shows: str = ""
    """What the log says of an engine that runs so."""


TWO_RANKS = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}
WARMS_UP = {"ecd_harmless_calls": ["execute_dummy_batch"]}
QUICK = {
    "second runner, scheduled ahead, items cut": Way({**AHEAD, **CUTS}, V2, shows="Using V2 Model"),
    "draft model": Way(DRAFTS, shows="Loading drafter model"),
    "EAGLE, items cut": Way({**EAGLE, **CUTS}, shows="Using auxiliary layers"),
    "n-grams": Way(NGRAM, shows="method='ngram'"),
    "shared-memory processor cache": Way(
        {"mm_processor_cache_type": "shm"}, SPREAD, items=20, shows="'mm_processor_cache_type'"
    ),
}
SLOW = {
    "items cut": Way(CUTS),
    "scheduled ahead": Way(AHEAD),
    "second runner": Way(environ=V2, encoder={"environ": V2}, shows="Using V2 Model"),
    "second runner, draft model": Way(DRAFTS, V2, shows="Using V2 Model"),
    "EAGLE": Way(EAGLE, shows="Using auxiliary layers"),
    "second runner, EAGLE": Way(EAGLE, V2, shows="Using V2 Model"),
    "no prefix caching": Way({"enable_prefix_caching": False}),
    "tensor parallel": Way(splits=TWO_RANKS, ranks=2),
    "tensor parallel, encoder by data": Way(
        splits=TWO_RANKS, alike={"mm_encoder_tp_mode": "data"}, ranks=2
    ),
    "tensor parallel, second runner": Way(environ=V2, splits=TWO_RANKS, ranks=2),
    "pipeline": Way(splits=STAGES, extra=WARMS_UP),
    "pipeline, second runner": Way(environ=V2, splits=STAGES, extra=WARMS_UP),
    "pruned videos": Way(alike={"video_pruning_rate": 0.5, "environ": V2, **VIDEOS}, request=video),
    "language adapter": Way(splits=ADAPTS, adapter="language_adapter"),
}
WAYS = {**QUICK, **SLOW}


def told(settings: dict[str, Any], model_of: Callable[[str], Path]) -> dict[str, Any]:
    """The settings, with the directory of a drafter in place of its kind."""
    drafts = dict(settings.get("speculative_config", {}))
    if "model" in drafts:
        drafts["model"] = str(model_of(drafts["model"]))
    return {**settings, "speculative_config": drafts} if drafts else settings


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.night) for name in SLOW)]
)
def test_a_way(
    name: str,
    version: str,
    daemon: Daemon,
    engines: Engines,
    shared: Callable[..., Engine],
    start_engine: Callable[..., Engine],
    model_of: Callable[[str], Path],
    new: Pictures,
) -> None:
    way = WAYS[name]
    stored, fresh = ([way.request(new) for _ in range(way.items)] for _ in range(2))
    again = [{**request, "text": "what is what?"} for request in stored]
    if way.adapter:
        for request in (*stored, *fresh, *again):
            request["adapter"] = str(model_of(way.adapter))
    plain = Plain(engines, version, **shaped(way.alike, way.splits))
    right = [plain.generate(asked) for asked in (stored, fresh, again)]
    assert len(set(map(tuple, tokens(right[0])))) > 1, "answers must depend on the items"

    alone = shaped(way.alike)
    consumer = shared("ec_consumer", **alone)
    encoder = shared("ec_producer", **shaped(way.alike, way.encoder))
    encoder.generate(bare(stored), max_tokens=1)
    eventually(lambda: daemon.status().entries == way.items, "every item stored")
    how = shaped(way.alike, way.splits, way.engine, environ=way.environ)
    engine = start_engine("ec_both", **told(how, model_of), **COUNTS, extra=way.extra).wait_ready()
    assert way.shows in engine.text()

    def forwards() -> int:
        return engine.text().count("pictures are encoded")

    before, puts = forwards(), daemon.status().counters.puts
    same(engine.generate(stored), right[0])
    same(engine.generate(again), right[2])
    assert forwards() == before
    eventually(lambda: daemon.status().leases == 0, "leases of finished requests")
    counted = engine.metrics()
    assert counted["hits"] >= way.items
    assert counted["loads"] == counted["hits"] * way.ranks
    assert counted.get("misses", 0) == counted.get("failures", 0) == 0
    same(engine.generate(fresh), right[1])
    assert forwards() > before
    eventually(lambda: daemon.status().entries == 2 * way.items, "what is new is stored")
    assert daemon.status().counters.puts == puts + way.items
    expected = Plain(engines, version, **alone).generate(bare(fresh))
    assert not way.adapter or tokens(expected) != tokens(right[1])
    same(answer := consumer.generate(bare(fresh)), expected)
    assert answer["encoded"] == 0


def shaped(*settings: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict:
    """The settings of an engine of this file."""
    made: dict[str, Any] = {}
    for each in settings:
        made |= each
    spreads = SPREAD if made.keys() & {"tensor_parallel_size", "pipeline_parallel_size"} else {}
    return {**made, "environ": {**spreads, **made.get("environ", {}), **(environ or {})}}


def bare(requests: list[dict]) -> list[dict]:
    """The requests without their adapters."""
    return [{k: v for k, v in each.items() if k != "adapter"} for each in requests]


def same(answer: dict, right: dict) -> None:
    assert tokens(answer) == tokens(right)
    for one, other in zip(answer["outputs"], right["outputs"], strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)


def test_what_a_user_brings_is_neither_stored_nor_looked_up(
    version: str,
    daemon: Daemon,
    engines: Engines,
    shared: Callable[..., Engine],
    start_engine: Callable[..., Engine],
    new: Pictures,
) -> None:
    """`scheduler_seams.py` has embeddings of a prompt: a tiny vocabulary has no mark for them."""
    takes = {"enable_mm_embeds": True}
    grid = packed(torch.tensor([1, 16, 24]))
    brought = uploaded("of a user", packed(tensor(96, WIDTH)), grid)
    url = shown(new.url())
    asked, picture = (
        [{"messages": [{"role": "user", "content": [part, url[1]]}]}] for part in (brought, url[0])
    )
    plain = Plain(engines, version, **takes)
    right = [plain.generate(each) for each in (asked, picture)]
    shared("ec_producer").generate(picture)
    eventually(lambda: daemon.status().entries == 1, "the picture stored")
    engine = start_engine("ec_both", **takes).wait_ready()
    for each, expected in zip((asked, picture), right, strict=True):
        same(answer := engine.generate(each), expected)
        assert answer["encoded"] == 0
    counted = engine.metrics()
    assert (counted["hits"], counted["loads"]) == (1, 1), "the picture alone"
    assert counted.get("misses", 0) == counted.get("saves", 0) == 0
    assert daemon.status().entries == 1
    eventually(lambda: daemon.status().leases == 0, "leases of finished requests")


@pytest.mark.night
def test_items_of_a_towers_adapter_are_the_engines_own(
    version: str,
    daemon: Daemon,
    engines: Engines,
    shared: Callable[..., Engine],
    start_engine: Callable[..., Engine],
    model_of: Callable[[str], Path],
    new: Pictures,
) -> None:
    """A name says nothing of an adapter's weights."""
    told = {**ADAPTS, "enable_tower_connector_lora": True}
    requests = new.requests(2)
    adapted = [{**each, "adapter": str(model_of("tower_adapter"))} for each in requests]
    plain = Plain(engines, version, **told)
    right = [plain.generate(asked) for asked in (adapted, requests)]
    assert tokens(right[0]) != tokens(right[1]), "the adapter must matter"
    shared("ec_producer").generate(requests, max_tokens=1)
    eventually(lambda: daemon.status().entries == 2, "both stored")
    engine = start_engine("ec_consumer", **told).wait_ready()
    same(answer := engine.generate(adapted), right[0])
    assert answer["encoded"] == 2
    assert engine.metrics().get("loads", 0) == 0
    same(answer := engine.generate(requests), right[1])
    assert (answer["encoded"], engine.metrics()["loads"]) == (0, 2)
    eventually(lambda: daemon.status().leases == 0, "leases of finished requests")


@pytest.mark.night
def test_a_session_loads_what_comes_later(
    version: str,
    daemon: Daemon,
    shared: Callable[..., Engine],
    model_of: Callable[[str], Path],
    new: Pictures,
) -> None:
    requests = new.requests(2)
    told = str(model_of("qwen2_5_vl")), json.dumps([each["images"][0] for each in requests])
    right = result_of(version, "streaming.py", told[0], "", told[1])
    shared("ec_producer").generate(requests, max_tokens=1)
    eventually(lambda: daemon.status().entries == 2, "both stored")
    found = result_of(version, "streaming.py", told[0], daemon.address, told[1])
    assert found["tokens"] == right["tokens"]
    assert len(found["tokens"]) == 8
    assert (found["counted"]["hits"], found["counted"]["loads"]) == (2, 2)
    assert found["counted"].get("misses", 0) == 0
    assert daemon.status().entries == 2
    eventually(lambda: daemon.status().leases == 0, "leases of the session")


@pytest.mark.night
def test_an_engine_that_an_external_launcher_starts_shares_nothing_and_says_why(
    version: str,
    daemon: Daemon,
    engines: Engines,
    shared: Callable[..., Engine],
    start_engine: Callable[..., Engine],
    new: Pictures,
) -> None:
    requests = new.requests(2)
    right = Plain(engines, version).generate(requests)
    shared("ec_producer").generate(requests, max_tokens=1)
    eventually(lambda: daemon.status().entries == 2, "both stored")
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ = {**launched, "MASTER_PORT": str(free_port())}
    how = {"distributed_executor_backend": "external_launcher", "environ": environ}
    engine = start_engine("ec_both", **how).wait_ready()
    assert "nothing is shared: the executor external_launcher may have" in engine.text()
    puts = daemon.status().counters.puts
    same(answer := engine.generate([*requests, *requests]), {"outputs": right["outputs"] * 2})
    assert answer["encoded"] == 2
    assert engine.metrics().get("loads", 0) == 0
    assert daemon.status().counters.puts == puts
