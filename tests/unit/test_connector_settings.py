"""The connector's settings are checked as an engine starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ecd_client.errors import InvalidArgument
from ecd_client.vllm.base.omni import KNOWN, why_model_shares_nothing
from ecd_client.vllm.base.settings import Settings


def settings(
    *, encodes_only: bool = False, model: dict[str, Any] | None = None, **extra: Any
) -> Settings:
    transfer = SimpleNamespace(ec_connector_extra_config=extra, is_encode_only=encodes_only)
    config: Any = SimpleNamespace(
        ec_transfer_config=transfer,
        lora_config=None,
        model_config=SimpleNamespace(runner_type="generate", **(model or {})),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    return Settings.of(config)


def test_names_and_calls_are_taken() -> None:
    told = settings(ecd_weights_run="7f3a", ecd_code_version="8", ecd_harmless_calls=["a", "b"])
    assert (told.weights_run, told.code_version) == ("7f3a", "8")
    assert told.harmless_calls == {"a", "b"}
    assert settings().harmless_calls == frozenset()


@pytest.mark.parametrize("key", ["ecd_weights_version", "ecd_weights_run", "ecd_code_version"])
@pytest.mark.parametrize("value", ["", 1, True, ["a"], {}])
def test_a_name_is_a_string(key: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{key} is .*must be a string"):
        settings(**{key: value})


@pytest.mark.parametrize("key", ["ecd_namespace", "ecd_weights_run", "ecd_code_version"])
def test_a_name_is_text(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the {key} .* is not text"):
        settings(**{key: "half a \ud83d"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("ecd_namespace", value) for value in (5, "", "two\nlines", "\x1b[31mred")),
        *(("ecd_on_unavailable", value) for value in ([], {}, True, "wait")),
        *(
            ("ecd_load_timeout_s", value)
            for value in (True, "2", "2h", 0, -1.0, float("nan"), 10**400)
        ),
        *(("ecd_uuids", value) for value in ([], True, "no")),
        *(("ecd_announce_node", value) for value in (1, "true", [])),
    ],
)
def test_a_value_of_another_kind_is_refused(key: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=key):
        settings(**{key: value})


def test_a_time_is_seconds_or_a_duration() -> None:
    assert settings(ecd_load_timeout_s=5).load_timeout_s == 5.0
    assert settings(ecd_load_timeout_s="2m").load_timeout_s == 120.0


@pytest.mark.parametrize("value", ["reload_weights", [""], [1], {"a": 1}, None, True])
def test_harmless_calls_are_a_list_of_names(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="ecd_harmless_calls is"):
        settings(ecd_harmless_calls=value)


@pytest.mark.parametrize("value", ["image", ["picture"], [1], {"image": 1}, True, [["image"]]])
def test_modalities_are_a_list_of_known_ones(value: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"ecd_modalities is .*audio, image, video, vision_chunk$"
    ):
        settings(ecd_modalities=value)


def test_what_is_left_out_and_what_streams_stays_with_the_engine() -> None:
    def private(told: Settings, is_streaming: bool) -> list[str]:
        kinds = "audio", "image", "video", "vision_chunk"
        return [each for each in kinds if told.keeps_private(each, is_streaming=is_streaming)]

    assert private(settings(), False) == []
    assert private(settings(), True) == ["audio"]
    assert private(settings(ecd_modalities=["image", "audio"]), False) == ["video", "vision_chunk"]
    assert "vision_chunk" not in private(settings(ecd_modalities=["vision_chunk"]), False)
    assert len(private(settings(ecd_modalities=[]), False)) == 4


@pytest.mark.parametrize("key", ["address", "on_unavailable", "ecd-address", "ECD_NAMESPACE"])
def test_a_key_that_is_not_known_is_named(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"unknown in ec_connector_extra_config: {key}; know"):
        settings(**{key: "unix:///tmp/a.sock"})


def test_a_stage_of_vllm_omni_does_not_begin_what_it_cannot_end() -> None:
    stage = {"model_stage": "thinker"}
    assert settings(model=stage).on_unavailable == "encode"
    assert settings(encodes_only=True).on_unavailable == "encode"
    with pytest.raises(InvalidArgument, match="answers no request of such an engine with vLLM-Om"):
        settings(encodes_only=True, model=stage)
    with pytest.raises(InvalidArgument, match="vLLM-Omni answers no request that a connector fail"):
        settings(ecd_on_unavailable="fail", model=stage)


def test_of_vllm_omni_only_models_share_that_were_looked_at() -> None:
    def why(name: str, module: str, stage: str | None = "thinker") -> str | None:
        return why_model_shares_nothing(type(name, (), {"__module__": module}), stage)

    omni = "vllm_omni.model_executor.models.some"
    assert why(KNOWN[0], omni) is None
    assert why(KNOWN[0], omni, None) is None, "in a server of plain vLLM"
    assert "give the connector to the thinker" in (why(KNOWN[0], omni, "talker") or "")
    assert "vLLM-Omni's GlmImage is not known" in (why("GlmImage", omni) or "")
    assert "vLLM-Omni's GlmImage is not known" in (why("GlmImage", omni, None) or "")
    assert why("GlmImage", "vllm.model_executor.models.some") is None
    assert why("GlmImage", "vllm_omnivore.some") is None
