"""No engine gets another picture's embedding, or another weight's (invariant 9)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from e2e.engines import NEXT, VERSIONS, Engine, installed, python_of, result_of
from e2e.shared import CONTRACT, Engines, Pictures, Plain
from ecd_client import Client
from ecd_client.vllm.base.identity.code_name import EQUAL_ON_CPUS
from ecd_client.vllm.base.identity.sources import FROM_A_SEED, FROM_THE_MODEL
from support.daemon import Daemon
from support.waiting import eventually

pytestmark = pytest.mark.timeout(600)

CHANGES_WEIGHTS = {
    *("apply_model", "checkpoint_prepare", "checkpoint_restore", "reset_weights"),
    *("start_weight_update", "start_draft_weight_update", "update_weights"),
    "finish_weight_update",
}
"""Calls of vLLM's front ends to its workers after which the weights may be others."""
FROM_ELSEWHERE = {"ipc_cache", "modelexpress", "tensorizer"}
"""Load formats that have weights from a server, or from where their own settings say."""
COUNTERS = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
FACTOR = -3.0


def said(reply: dict) -> list[tuple]:
    return [(output["tokens"], output["logprobs"]) for output in reply["outputs"]]


@pytest.fixture
def one(shared: Callable[..., Engine]) -> Engine:
    return shared("ec_both", enable_mm_embeds=True)


@pytest.fixture
def other(shared: Callable[..., Engine]) -> Engine:
    return shared("ec_both", 1, enable_mm_embeds=True)


@CONTRACT
def test_a_counter_is_nobodys_name(
    daemon: Daemon, start_engine: Callable[..., Engine], plain: Plain, new: Pictures
) -> None:
    """Two engines without caches count their pictures from 1, and share none of them."""
    with_kwargs = {"mm_processor_kwargs": {"max_pixels": 200704}}
    requests = [[*pictures, {**pictures[0], **with_kwargs}] for pictures in two(new)]
    expected = [plain.generate(asked) for asked in requests]
    assert said(expected[0]) != said(expected[1]), "two pictures must give two answers"
    before = daemon.status().counters
    engines = [start_engine("ec_both", **COUNTERS) for _ in requests]
    for engine, asked, right in zip(engines, requests, expected, strict=True):
        reply = engine.generate(asked)
        assert (said(reply), reply["encoded"]) == (said(right), 4)
        warnings = [line for line in engine.text().splitlines() if "nothing is shared" in line]
        assert len(warnings) == 1
        assert "--mm-processor-cache-gb" in warnings[0]
    after = daemon.status()
    assert after.entries == 0
    assert (after.counters.hits, after.counters.misses) == (before.hits, before.misses)


def two(new: Pictures) -> list[list[dict]]:
    return [new.requests(3), new.requests(3)]


@CONTRACT
def test_a_planted_uuid_reaches_nobody_who_refuses_uuids(
    daemon: Daemon,
    one: Engine,
    other: Engine,
    start_engine: Callable[..., Engine],
    plain: Plain,
    new: Pictures,
) -> None:
    mine, theirs = new.request(), new.request()
    right = plain.generate([mine])
    one.generate([mine])
    eventually(lambda: daemon.status().entries == 1)
    [entry] = daemon.entries()
    daemon.evict_all()
    planted = other.generate([{**theirs, "uuids": [entry.key.mm_hash]}])
    assert said(planted) != said(right)
    eventually(lambda: [e.key.mm_hash for e in daemon.entries()] == [entry.key.mm_hash])
    refuses = start_engine("ec_both", extra={"ecd_uuids": "refuse"})
    reply = refuses.generate([mine])
    assert (said(reply), reply["encoded"]) == (said(right), 1)
    assert "ecd_uuids is refuse" in refuses.text()
    assert entry.key.namespace in refuses.text(), "it was planted where the engine would look"


@pytest.fixture(scope="module")
def weighed(version: str, engines: Engines) -> Iterator[list[Engine]]:
    """Two engines whose weights change: the namespaces that others share are not theirs again."""
    extra = {"ecd_weights_run": "a run", "ecd_harmless_calls": ["get_kv_cache_spec"]}
    pair = [engines.start(version, "ec_both", extra=extra) for _ in range(2)]
    yield pair
    for engine in pair:
        engine.close()


@CONTRACT
def test_weights_that_change_in_place_are_other_weights(
    daemon: Daemon, weighed: list[Engine], plain: Plain, new: Pictures
) -> None:
    one, other = weighed
    known, fresh, newer = new.requests(3)
    old = plain.generate([known, fresh])
    assert said(one.generate([known])) == said(old)[:1]
    one.do("scale", factor=FACTOR, then=["reset_encoder_cache"])
    right = plain.generate([known, fresh, newer], scaled=FACTOR)
    assert said(right)[0] != said(old)[0], "the weights must matter"
    changed = one.generate([known, fresh])
    assert (said(changed), changed["encoded"]) == (said(right)[:2], 2)
    # An engine with the old weights gets nothing of what the new ones made.
    assert said(other.generate([known, fresh])) == said(old)

    other.do("scale", factor=FACTOR, then=["reset_encoder_cache"])
    for engine in weighed:
        engine.do("version", version="step 2")
    assert said(one.generate([newer])) == said(right)[2:]
    eventually(lambda: any("version-" in entry.key.namespace for entry in daemon.entries()))
    reply = other.generate([newer])
    assert (said(reply), reply["encoded"]) == (said(right)[2:], 0), "told alike, they share"

    for engine in weighed:
        engine.do("scale", factor=1 / FACTOR, then=["sleep without weights", "wake_up"])
        engine.do("version", version="as they were")
    for _ in range(2):  # what has the same name again is shared again
        slept = new.requests(1)
        expected = plain.generate(slept)
        stored = len(daemon.entries())
        assert said(one.generate(slept)) == said(expected)
        eventually(lambda stored=stored: len(daemon.entries()) > stored)
        reply = other.generate(slept)
        assert (said(reply), reply["encoded"]) == (said(expected), 0)
        for engine in weighed:
            engine.do("scale", factor=1.0, then=["sleep without weights", "wake_up"])
            engine.do("version", version="as they were")


@CONTRACT
def test_engines_share_on_after_what_leaves_their_weights_alone(
    daemon: Daemon, weighed: list[Engine], new: Pictures
) -> None:
    one, other = weighed
    for engine in weighed:
        engine.do("version", version="awake")

    def encoded_after(calls: list[str]) -> int:
        known, stored = new.request(), len(daemon.entries())
        one.generate([known])
        eventually(lambda: len(daemon.entries()) > stored)
        other.do("reset", calls=calls)
        return other.generate([known])["encoded"]

    assert encoded_after(["sleep", "wake_up"]) == 0
    assert encoded_after(["wake_up"]) == 0
    assert encoded_after(["get_kv_cache_spec"]) == 0
    for calls in (
        ["sleep without weights", "wake_up"],
        ["sleep in vain", "sleep without weights", "wake_up"],
        ["sleep", "reset_encoder_cache", "wake_up"],
        ["sleep", "reload_weights", "wake_up"],
        ["sleep", "wake_up", "reset_encoder_cache"],
    ):
        assert encoded_after(calls) == 1, calls
        other.do("version", version="awake")
    assert encoded_after(["sleep", "wake_up"]) == 0


@CONTRACT
def test_a_version_of_a_run_without_a_name_is_this_engines_alone(
    daemon: Daemon, start_engine: Callable[..., Engine], new: Pictures
) -> None:
    engine = start_engine("ec_both")
    for version in ("1", "2", "1"):
        engine.do("version", version=version)
        engine.generate([new.request()])
    eventually(lambda: daemon.status().entries == 3)
    namespaces = {entry.key.namespace for entry in daemon.entries()}
    assert len(namespaces) == 3
    assert all("|private-" in namespace for namespace in namespaces)
    assert "ecd_weights_run" in engine.text()


@CONTRACT
def test_a_worker_that_alone_knows_of_new_weights_stores_nothing(
    daemon: Daemon, weighed: list[Engine], plain: Plain, new: Pictures
) -> None:
    """The engines share before."""
    one, other = weighed
    for engine in weighed:
        engine.do("version", version="before")
    known, fresh, newer = new.requests(3)
    right = plain.generate([fresh, newer])
    one.generate([known])
    eventually(lambda: daemon.status().entries == 1)
    assert other.generate([known])["encoded"] == 0
    one.do("scale", factor=FACTOR, then=["only the worker", "only the scheduler"])
    one.generate([fresh])
    assert said(other.generate([fresh])) == said(right)[:1]
    one.generate([newer])
    assert said(other.generate([newer])) == said(right)[1:]


@CONTRACT
def test_weights_that_change_on_disk_are_other_weights(
    daemon: Daemon,
    start_engine: Callable[..., Engine],
    model_of: Callable[[str], Path],
    plain: Plain,
    new: Pictures,
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_of("qwen2_5_vl"), model)
    known = new.requests(1)
    old, right = plain.generate(known), plain.generate(known, scaled=FACTOR)
    first = start_engine("ec_both", model=model)
    assert said(first.generate(known)) == said(old)

    [file] = model.glob("*.safetensors")
    weights = load_file(file)
    [norm] = [name for name in weights if name.endswith("visual.merger.ln_q.weight")]
    weights[norm] = weights[norm] * FACTOR
    save_file(weights, file, {"format": "pt"})
    first.do("reset", calls=["reload_weights", "reset_encoder_cache"])
    again = first.generate(known)
    assert (said(again), again["encoded"]) == (said(right), 1)
    first.close()
    again = start_engine("ec_both", model=model).generate(known)
    assert (said(again), again["encoded"]) == (said(right), 1)


@CONTRACT
def test_an_entry_that_no_encoder_of_this_engine_made_is_a_miss(
    daemon: Daemon, one: Engine, plain: Plain, version: str, new: Pictures
) -> None:
    """Of another width, or another dtype."""
    one.generate([new.request()])
    eventually(lambda: daemon.status().entries == 1, "its own entry")
    [entry] = daemon.entries()
    planted = [
        torch.zeros(96, 132),
        torch.zeros(96, 128, dtype=torch.int8),
    ]
    requests = [new.named() for _ in planted]
    right = plain.generate([{"text": r["text"], "images": r["images"]} for r in requests])
    before = one.metrics().get("mismatches", 0)
    with Client(daemon.address, namespace=entry.key.namespace) as client:
        for request, tensor in zip(requests, planted, strict=True):
            assert client.put(request["uuids"][0], tensor)
    reply = one.generate(requests)
    assert (said(reply), reply["encoded"]) == (said(right), 2)
    if version != "0.28.0":
        assert one.metrics()["mismatches"] == before + 2


UNRELATED = {
    "ModelConfig": """
        model model_weights revision dtype quantization
        runner convert tokenizer tokenizer_revision seed hf_config hf_text_config
        allowed_local_media_path allowed_media_domains max_model_len spec_target_max_model_len
        allow_deprecated_quantization enforce_eager enable_return_routed_experts
        return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel disable_sliding_window
        disable_cascade_attn skip_tokenizer_init enable_prompt_embeds served_model_name hf_token
        generation_config override_generation_config enable_sleep_mode sleep_mode_backend
        enable_cumem_allocator logits_processors io_processor_plugin renderer_num_workers
        pooler_config multimodal_config is_submodel_config word_embeddings_untied_by_checkpoint
        enable_trace_replay sleep_preserve_parameter_names sleep_mode_offload_cudagraph
        enable_nccl_comm_suspend
    """,
    "MultiModalConfig": """
        language_model_only limit_per_prompt enable_mm_embeds mm_processor_cache_gb
        mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings
        skip_mm_profiling mm_tensor_ipc allow_missing_mm_embeddings mm_ipc_gpu_memory_gb
    """,
    "LoadConfig": """
        download_dir safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location
    """,
}
"""Fields of vLLM's configuration that change no embedding, or stand in the namespace by name.

A field that is neither here nor in CHANGING of `ecd_client.vllm.base.identity.identity` has to be
put into one.
"""


DESCRIBED = pytest.mark.parametrize("version", [*VERSIONS, NEXT], indirect=True, scope="session")


@pytest.fixture(scope="module")
def described(engines: Engines) -> Callable[[str], dict]:
    """The fields and namespaces that engines of a version have, read without their weights."""
    made: dict[str, dict] = {}

    def describe(version: str) -> dict:
        if version not in made:
            installed(version)
            kinds = "qwen2_5_vl", "whisper"
            models = (str(engines.model(VERSIONS[0], kind)) for kind in kinds)
            made[version] = result_of(version, "describe_identity.py", *models)
        return made[version]

    return describe


@DESCRIBED
def test_somebody_has_classified_every_field_of_the_configuration(
    version: str, described: Callable[[str], dict]
) -> None:
    for config, fields in described(version)["fields"].items():
        known = {*UNRELATED[config].split(), *described(version)["changing"][config]}
        assert set(fields) <= known, f"{config}: do these change an encoder's output?"


@DESCRIBED
def test_somebody_has_classified_every_call_of_vllms_own_to_its_workers(
    version: str, described: Callable[[str], dict]
) -> None:
    """Those of its servers and its engine's front ends; one is taken for new weights."""
    [vllm] = python_of(version).parents[1].glob("lib/*/site-packages/vllm")
    files = [file for part in ("entrypoints", "v1/engine") for file in (vllm / part).rglob("*.py")]
    call = re.compile(r'(?<!def )collective_rpc\(\s*"(\w+)"')
    calls = {name for file in files for name in call.findall(file.read_text())}
    assert "update_weights" in calls
    assert calls <= CHANGES_WEIGHTS | set(described(version)["harmless"])


@DESCRIBED
def test_somebody_has_said_where_every_load_format_has_its_weights_from(
    version: str, described: Callable[[str], dict]
) -> None:
    formats = set(described(version)["load formats"])
    assert formats <= FROM_THE_MODEL | FROM_ELSEWHERE | {FROM_A_SEED}


@DESCRIBED
def test_the_namespace_holds_what_changes_embeddings_and_not_where_work_is_done(
    version: str, described: Callable[[str], dict]
) -> None:
    namespaces = described(version)["namespaces"]
    measured = described(version)["code"]
    assert measured.startswith(f"vllm-{version}-"), "versions share by no accident"
    code = EQUAL_ON_CPUS.get(measured, measured)
    same = {name for name, namespace in namespaces.items() if namespace == namespaces["plain"]}
    assert same == {"plain", "device", "device of images", "limits", "empty media"}
    assert len(set(namespaces.values())) == len(namespaces) - len(same) + 1
    assert namespaces["version"].endswith("|version-7")
    assert namespaces["code"] == namespaces["plain"].replace(code, "7")
    assert "|dummy-" in namespaces["dummy weights"]
    assert "|private-" in namespaces["weights written meanwhile"]
    assert described(version)["whisper"].startswith("encoder-decoder")


@DESCRIBED
def test_equal_flags_give_each_role_one_namespace(
    version: str, described: Callable[[str], dict]
) -> None:
    """On GPUs, where vLLM gives an encode-only engine another processor's device and a decoder."""
    plain = described(version)["namespaces"]["plain"]
    assert described(version)["by role"] == {
        role: [plain, plain] for role in ("ec_producer", "ec_consumer", "ec_both")
    }
    parted = {*described(version)["parted"]}
    assert ("MultiModalConfig.media_io_kwargs" in parted) == (version != "0.28.0")
    known = {f"{config}.{name}" for config, names in UNRELATED.items() for name in names.split()}
    assert parted - {"MultiModalConfig.media_io_kwargs"} <= known, "what parts roles by now?"


@DESCRIBED
def test_an_engine_that_shares_nothing_says_why_and_what_helps(
    version: str, described: Callable[[str], dict]
) -> None:
    reasons = described(version)["reasons"]
    assert reasons.pop("one machine") == reasons.pop("no processor cache") == "None"
    helps = {
        "two machines": "an engine on each machine",
        "ray": "--distributed-executor-backend mp",
        "external_launcher": "--distributed-executor-backend mp",
        "raw inputs": "takes its inputs raw",
        "counters": "or give --enable-prefix-caching",
        "counters of an encoder": "or let ec_role be ec_both",
    }
    assert {name: helps[name] in reason for name, reason in reasons.items()} == dict.fromkeys(
        helps, True
    ), reasons


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen2_audio"])
def test_versions_of_vllm_share_only_where_their_embeddings_are_equal(
    kind: str, engines: Engines
) -> None:
    """A picture and a video, or a sound, encoded by each, under one name or under two."""
    model = engines.model(VERSIONS[0], kind)
    made: dict[str, dict] = {}
    for version in VERSIONS:
        installed(version)
        result = result_of(version, "encoded_bytes.py", str(model))
        name = EQUAL_ON_CPUS.get(result["code"], result["code"])
        assert made.setdefault(name, result["made"]) == result["made"], f"{result['code']}: {name}"
