"""No engine gets another picture's embedding, or another weight's (invariant 9)."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from e2e.engines import VERSIONS, Engine, installed, make_model, result_of
from ecd_client import Client
from support.daemon import Daemon, eventually

pytestmark = pytest.mark.timeout(600)

seeds = itertools.count(5000)
SIZE = (336, 224)
COUNTERS = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
FACTOR = -3.0


def picture() -> list[int]:
    """A new picture of the one size: its embeddings fit wherever another's do."""
    return [*SIZE, next(seeds)]


def ask(image: list[int], **more: object) -> dict:
    return {"text": "what is in this picture?", "images": [image], **more}


def said(reply: dict) -> list[tuple]:
    return [(output["tokens"], output["logprobs"]) for output in reply["outputs"]]


@pytest.fixture(scope="module")
def started(shared_daemon: Daemon) -> Daemon:
    return shared_daemon.start()


@pytest.fixture(scope="module")
def one(started: Daemon, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine("ec_both")


@pytest.fixture(scope="module")
def other(started: Daemon, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine("ec_both")


def test_a_counter_is_nobodys_name(
    started: Daemon, start_engine: Callable[..., Engine], plain: Engine
) -> None:
    cat, dog = picture(), picture()
    with_kwargs = {"mm_processor_kwargs": {"max_pixels": 200704}}
    requests = [[ask(image), ask(image, **with_kwargs)] for image in (cat, dog)]
    expected = [plain.generate(asked) for asked in requests]
    assert said(expected[0]) != said(expected[1]), "two pictures must give two answers"
    before = started.status().entries
    for asked, right in zip(requests, expected, strict=True):
        engine = start_engine("ec_both", **COUNTERS)  # each counts from 1
        assert said(engine.generate(asked)) == said(right)
        warnings = [line for line in engine.text().splitlines() if "nothing is shared" in line]
        assert len(warnings) == 1
        assert "--mm-processor-cache-gb" in warnings[0]
        engine.close()
    assert started.status().entries == before


def do(engine: Engine, **command: object) -> None:
    engine.send(command)
    engine.receive()


def test_a_planted_uuid_reaches_nobody_who_refuses_uuids(
    started: Daemon,
    one: Engine,
    other: Engine,
    start_engine: Callable[..., Engine],
    plain: Engine,
) -> None:
    mine, theirs = picture(), picture()
    right = plain.generate([ask(mine)])
    started.evict_all()
    one.generate([ask(mine)])
    eventually(lambda: started.status().entries == 1)
    [entry] = started.entries()
    started.evict_all()
    planted = other.generate([ask(theirs, uuids=[entry.key.mm_hash])])
    assert said(planted) != said(right)
    eventually(lambda: [e.key.mm_hash for e in started.entries()] == [entry.key.mm_hash])
    refuses = start_engine("ec_both", extra={"ecd_uuids": "refuse"})
    reply = refuses.generate([ask(mine)])
    assert (said(reply), reply["encoded"]) == (said(right), 1)
    assert "ecd_uuids is refuse" in refuses.text()
    assert entry.key.namespace in refuses.text(), "it was planted where the engine would look"
    refuses.close()


def test_weights_that_change_in_place_are_other_weights(
    started: Daemon, one: Engine, other: Engine, plain: Engine
) -> None:
    known, new, newer = picture(), picture(), picture()
    old = plain.generate([ask(known), ask(new)])
    assert said(one.generate([ask(known)])) == said(old)[:1]
    for engine in (plain, one):
        do(engine, do="scale", factor=FACTOR, then=["reset_encoder_cache"])
    right = plain.generate([ask(known), ask(new), ask(newer)])
    assert said(right)[0] != said(old)[0], "the weights must matter"
    changed = one.generate([ask(known), ask(new)])
    assert (said(changed), changed["encoded"]) == (said(right)[:2], 2)
    # An engine with the old weights gets nothing of what the new ones made.
    assert said(other.generate([ask(known), ask(new)])) == said(old)

    do(other, do="scale", factor=FACTOR, then=["reset_encoder_cache"])
    for engine in (one, other):
        do(engine, do="version", version="step 2")
    assert said(one.generate([ask(newer)])) == said(right)[2:]
    eventually(lambda: any("version-" in entry.key.namespace for entry in started.entries()))
    shared = other.generate([ask(newer)])
    assert (said(shared), shared["encoded"]) == (said(right)[2:], 0), "told alike, they share"

    do(plain, do="scale", factor=1 / FACTOR, then=["reset_encoder_cache"])
    for engine in (one, other):
        do(engine, do="scale", factor=1 / FACTOR, then=["sleep", "wake_up"])
        do(engine, do="version", version="as they were")
    for _ in range(2):  # what has the same name again is shared again
        slept = picture()
        expected = plain.generate([ask(slept)])
        stored = len(started.entries())
        assert said(one.generate([ask(slept)])) == said(expected)
        eventually(lambda stored=stored: len(started.entries()) > stored)
        shared = other.generate([ask(slept)])
        assert (said(shared), shared["encoded"]) == (said(expected), 0)
        for engine in (one, other):
            do(engine, do="scale", factor=1.0, then=["sleep", "wake_up"])
            do(engine, do="version", version="as they were")


def test_a_worker_that_alone_knows_of_new_weights_stores_nothing(
    started: Daemon, one: Engine, other: Engine, plain: Engine
) -> None:
    new, newer = picture(), picture()
    right = plain.generate([ask(new), ask(newer)])
    one.generate([ask(picture())])  # a step, with which it knows its namespace
    do(one, do="scale", factor=FACTOR, then=["only the worker", "only the scheduler"])
    one.generate([ask(new)])
    assert said(other.generate([ask(new)])) == said(right)[:1]
    one.generate([ask(newer)])
    assert said(other.generate([ask(newer)])) == said(right)[1:]
    do(one, do="scale", factor=1 / FACTOR, then=["reset_encoder_cache"])


def test_weights_that_change_on_disk_are_other_weights(
    started: Daemon,
    start_engine: Callable[..., Engine],
    model_of: Callable[[str], Path],
    plain: Engine,
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_of("qwen2_5_vl"), model)
    known = picture()
    old = plain.generate([ask(known)])
    do(plain, do="scale", factor=FACTOR, then=["reset_encoder_cache"])
    right = plain.generate([ask(known)])
    do(plain, do="scale", factor=1 / FACTOR, then=["reset_encoder_cache"])
    first = start_engine("ec_both", model=model)
    assert said(first.generate([ask(known)])) == said(old)

    [file] = model.glob("*.safetensors")
    weights = load_file(file)
    [norm] = [name for name in weights if name.endswith("visual.merger.ln_q.weight")]
    weights[norm] = weights[norm] * FACTOR
    save_file(weights, file, {"format": "pt"})
    do(first, do="reset", calls=["reload_weights", "reset_encoder_cache"])
    again = first.generate([ask(known)])
    assert (said(again), again["encoded"]) == (said(right), 1)
    first.close()
    restarted = start_engine("ec_both", model=model)
    again = restarted.generate([ask(known)])
    assert (said(again), again["encoded"]) == (said(right), 1)
    restarted.close()


@pytest.mark.parametrize(
    "stored",
    [torch.zeros(96, 132, dtype=torch.bfloat16), torch.zeros(96, 128, dtype=torch.int8)],
    ids=["another width", "another dtype"],
)
def test_an_entry_that_no_encoder_of_this_engine_made_is_a_miss(
    started: Daemon, one: Engine, plain: Engine, version: str, stored: torch.Tensor
) -> None:
    image, uuid = picture(), f"planted-{next(seeds)}"
    right = plain.generate([ask(image)])
    before = one.metrics().get("mismatches", 0)
    entries = started.status().entries
    one.generate([ask(picture())])
    eventually(lambda: started.status().entries == entries + 1, what="its own entry")
    namespace = max(started.entries(), key=lambda entry: entry.age_s * -1).key.namespace
    with Client(started.address, namespace=namespace) as client:
        assert client.put(uuid, stored)
    reply = one.generate([ask(image, uuids=[uuid])])
    assert (said(reply), reply["encoded"]) == (said(right), 1)
    if version != "0.28.0":
        assert one.metrics()["mismatches"] == before + 1


UNRELATED = {
    "ModelConfig": """
        model model_weights revision dtype quantization
        runner convert tokenizer tokenizer_mode tokenizer_revision seed hf_config hf_text_config
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

A field that is neither here nor in `ecd_client.vllm.identity.CHANGING` has to be put into one.
"""


@pytest.fixture(scope="session")
def described(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict]:
    """The fields and namespaces that engines of a version have, read without their weights."""
    made: dict[str, dict] = {}
    models: list[str] = []

    def describe(version: str) -> dict:
        if version not in made:
            installed(version)
            for kind in () if models else ("qwen2_5_vl", "whisper"):
                models.append(str(make_model(version, kind, tmp_path_factory.mktemp(kind) / kind)))
            made[version] = result_of(version, "describe_identity.py", *models)
        return made[version]

    return describe


def test_somebody_has_classified_every_field_of_the_configuration(
    version: str, described: Callable[[str], dict]
) -> None:
    for config, fields in described(version)["fields"].items():
        known = {*UNRELATED[config].split(), *described(version)["changing"][config]}
        assert set(fields) <= known, f"{config}: do these change an encoder's output?"


def test_the_namespace_holds_what_changes_embeddings_and_not_where_work_is_done(
    version: str, described: Callable[[str], dict]
) -> None:
    namespaces = described(version)["namespaces"]
    same = {name for name, namespace in namespaces.items() if namespace == namespaces["plain"]}
    assert same == {"plain", "device", "device of images", "limits"}
    assert len(set(namespaces.values())) == len(namespaces) - len(same) + 1
    assert namespaces["version"].endswith("|version-7")
    assert "|dummy-" in namespaces["dummy weights"]
    assert "|private-" in namespaces["weights written meanwhile"]
    assert described(version)["whisper"].startswith("encoder-decoder")


def test_versions_of_vllm_share_where_their_embeddings_are_equal(
    described: Callable[[str], dict],
) -> None:
    first, *others = ({**described(version)["namespaces"]} for version in VERSIONS)
    assert all(each["plain"] == first["plain"] for each in others)
