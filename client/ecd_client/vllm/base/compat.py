"""The differences between vLLM 0.28 and 0.33; no other file asks which one runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.logger import init_logger
from vllm.multimodal.parse import DictEmbeddingItems

from ecd_client.errors import EcdError
from ecd_client.vllm.base.outputs import configs_in
from ecd_proto.placeholders import MAX_NUMBERS, Placeholder, may_be_said

if TYPE_CHECKING:
    from vllm.config import VllmConfig

try:  # since 0.32
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorPromMetrics,
        ECConnectorStats,
    )
except ImportError:  # nothing asks for stats then
    ECConnectorStats = ECConnectorPromMetrics = object

try:  # since 0.32
    from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
    from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache as ReceiverCache
    from vllm.multimodal.image import open_image
except ImportError:
    collect_ec_item_metadata = ReceiverCache = open_image = None

try:  # since 0.33
    from vllm.connections import MediaRequestDownloadBudget as DownloadBudget
    from vllm.multimodal.media import MediaDecodedBudget as DecodedBudget
except ImportError:
    DownloadBudget = DecodedBudget = None

__all__ = [
    "ASKS_OF_RUNNING",
    "CAN_FAIL_ONE_REQUEST",
    "CAN_LEAVE_OUT_MEDIA",
    "TELLS_WHAT_TO_SAVE",
    "ECConnectorPromMetrics",
    "ECConnectorStats",
    "PlaceholderMetadata",
    "collect_ec_item_metadata",
    "fail_by_itself",
    "keep_media",
    "media_budgets",
    "open_image",
    "reach_of_step",
    "takes_prefilled",
]

logger = init_logger(f"vllm.{__name__}")

MAX_FIELD_NUMBERS = 1 << 16
"""Most numbers of one field of all items of a request."""

CAN_FAIL_ONE_REQUEST = hasattr(ECConnectorBase, "take_unavailable_requests")
ASKS_OF_RUNNING = CAN_FAIL_ONE_REQUEST  # whether the scheduler asks the connector in every step
"""Whether the scheduler asks which requests the connector cannot serve."""
CAN_LEAVE_OUT_MEDIA = ReceiverCache is not None
"""Whether the server takes placeholder metadata as JSON, in place of an item's media."""
TELLS_WHAT_TO_SAVE = hasattr(ECConnectorBase, "start_save_caches")
"""Whether a producer's worker is shown its encoder cache at the beginning of each step."""

OF_ONE_REQUEST = {
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
    *("MooncakeConnector", "MoRIIOConnector"),
}
"""Connectors that bring the tokens of one request, which another engine has computed for this one.
The others bring those that any request had."""

ENCODERS_OWN = {
    *("pixel_values", "pixel_values_videos", "video_pixel_values", "patch_positions"),
    *("tgt_sizes", "video_tgt_sizes", "input_features", "input_audio_features", "audio_features"),
    *("feature_attention_mask", "chunk_counts"),
    *("audio_lens", "audio_token_len", "audio_num_chunks"),
}
"""Fields of processed items that nothing but the model's encoder reads."""
AUDIO_IN_VIDEO = "use_audio_in_video"
ASSUMED = {"second_per_grid_ts": 1.0, AUDIO_IN_VIDEO: 0.0}
"""Fields that some items have, and the value that models assume for items without the field."""


def takes_prefilled(vllm_config: VllmConfig) -> bool:
    """Whether the engine takes tokens from another that has computed the same request."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_consumer:
        return False
    parts = transfer.kv_connector_extra_config.get("connectors", [])  # of a MultiConnector
    names = {transfer.kv_connector, *(part.get("kv_connector") for part in parts)}
    return not names.isdisjoint(OF_ONE_REQUEST)


def fail_by_itself(request: Any, cause: str) -> None:
    """Have the scheduler of vLLM 0.28 fail a request that it has not scheduled yet.

    That scheduler asks no connector for failed requests. But it ends a request whose grammar did
    not compile, alone and with FINISHED_ERROR, and reads neither the grammar nor the answer's form.
    """
    from vllm.v1.request import RequestStatus

    request.structured_output_request = SimpleNamespace(grammar=EcdError(cause))
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def reach_of_step(vllm_config: VllmConfig) -> tuple[int, int]:
    """How many tokens of a request one step looks for items in, and embeddings that it encodes.

    A drafter that has the model's hidden states reads further than the step computes, and an item
    that is larger than a step's tokens makes room for several small ones.
    """
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget  # of an engine core

    scheduler, drafts = vllm_config.scheduler_config, vllm_config.speculative_config
    tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if drafts is not None and drafts.use_eagle():
        tokens += drafts.num_speculative_tokens if drafts.use_multi_module_mtp() else 1
    if vllm_config.model_config.multimodal_config is None:
        return tokens, 0
    return tokens, MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY).encoder_compute_budget


class PlaceholderMetadata:
    """Finds the fields of an item that size its placeholder, such as `image_grid_thw`.

    A consumer that is sent only these and the item's name skips preprocessing.
    """

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._fields: dict[str, set[str]] = {}
        self._announces: dict[str, bool] = {}
        merges = (config.get("spatial_merge_size") for config in configs_in(model_config.hf_config))
        self._merge = next((merge for merge in merges if type(merge) is int and merge > 0), None)

    def is_all_of(self, feature: Any) -> bool:
        """Whether the request brought only metadata of an item, and nothing to encode."""
        return not feature.data or not _has_more(feature.data, self.fields_for(feature.modality))

    def of(self, mm_features: list[Any], stored: Mapping[str, bytes]) -> dict[str, Any] | None:
        """Describe the items by mm_hash, in the form of vLLM's own connectors since 0.32.

        `stored` has the metadata of the entries. An item whose entry has others, or none, gets
        none: consumers would refuse them. Without metadata the media travel on to the consumer. A
        request may not mix the two, so all items of a modality have metadata or none has; and no
        item has any where the audio of a video lies between its frames. vLLM 0.28 reads none from
        JSON.
        """
        if not mm_features:
            return None
        if collect_ec_item_metadata is None:
            items: dict[str, Any] = {}
            for index, feature in enumerate(mm_features):
                item = items.setdefault(feature.identifier, {"item_indices": [], "metadata": {}})
                item["item_indices"].append(index)
            return items
        items = collect_ec_item_metadata(mm_features, self)
        are_apart = not any(map(_is_interleaved, mm_features))
        for feature in mm_features:
            item = items[feature.identifier]
            said = are_apart and Placeholder.of(feature.modality, item["metadata"])
            is_told = said and said.is_of(stored.get(feature.identifier, b""))
            if not (said and is_told and self._may_announce(feature, said)):
                item["metadata"] = {}
        incomplete: set[str] = set()
        while (
            more := {
                feature.modality
                for feature in mm_features
                if not items[feature.identifier]["metadata"]
            }
            - incomplete
        ):  # a name may stand in two modalities
            incomplete |= more
            for feature in mm_features:
                if feature.modality in incomplete:
                    items[feature.identifier]["metadata"] = {}
        return items

    def packed(self, feature: Any) -> bytes:
        """The item's fields as its entry carries them; empty unless a consumer needs no others."""
        placeholder = self.of_item(feature)
        if placeholder is None or not self._may_announce(feature, placeholder):
            return b""
        return placeholder.stored

    def _may_announce(self, feature: Any, said: Placeholder) -> bool:
        """Whether an item's metadata do for a consumer in place of the item's media.

        Its server takes flat lists of numbers alone. Its model reads further fields of some items,
        for the times of a video; none but ENCODERS_OWN are known not to matter.
        """
        fields = said.fields
        return (
            self.announces(feature.modality)
            and fields.keys() == self.fields_for(feature.modality)
            and not any(isinstance(each, list) for value in fields.values() for each in value)
            and _is_all_said(feature, fields)
        )

    def announces(self, modality: str) -> bool:
        """Whether items of the modality can have metadata, and consumers' servers take them.

        MiniCPM-V 4.6 declares a field that its pictures lack, and MiniCPM-o asks for the media.
        """
        if modality not in self._announces:
            self._announces[modality] = bool(self.fields_for(modality)) and self._takes(modality)
        return self._announces[modality]

    @functools.cached_property
    def _processor(self) -> Any:
        """vLLM's processor of the model, whose own code may raise anything."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        return MULTIMODAL_REGISTRY.create_processor(self._model_config)

    @property
    def media(self) -> dict[str, bool] | None:
        """The model's modalities, and whether the engine's limits let requests bring each.

        With a limit of 0 they may bring metadata alone, if anything. None: not known.
        """
        config = self._model_config.multimodal_config
        try:
            supported = () if config is None else self._processor.info.supported_mm_limits
            return {
                modality: bool(config.enable_mm_embeds or config.get_limit_per_prompt(modality))
                for modality in sorted(supported)
            }
        except Exception:  # the model's own code
            logger.warning("the media that the model takes are not known", exc_info=True)
            return None

    def _takes(self, modality: str) -> bool:
        try:
            processor = self._processor
            made = processor._get_mm_fields_config({}, {})
            if not self.fields_for(modality) <= made.keys():
                return False
            if not CAN_LEAVE_OUT_MEDIA:
                return True
            kind = type(processor.info)
            consumers = type("Consumers", (kind,), {"allow_missing_mm_embeddings": True})
            parser = consumers(processor.info.ctx).get_data_parser()
            return bool(parser.allow_missing_mm_embeddings)
        except Exception:  # the model's own code
            logger.warning("no placeholder metadata for %s", modality, exc_info=True)
            return False

    def of_item(self, feature: Any) -> Placeholder | None:
        """The fields of a request's item. None: some are not known, or make no sense."""
        wanted = self.fields_for(feature.modality)
        if not wanted:
            return None
        try:
            data = {} if feature.data is None else feature.data.get_data()
            if any(_is_long(data[name]) for name in wanted if name in data):
                return None
            if collect_ec_item_metadata is None:
                fields = {
                    name: (value if value.ndim else value.reshape(1)).tolist()
                    for name, value in data.items()
                    if name in wanted and isinstance(value, torch.Tensor)
                }
            else:
                [item] = collect_ec_item_metadata([feature], self).values()
                fields = item["metadata"]
        except Exception:  # the model's own values: its consumers preprocess for themselves
            logger.warning("no placeholder metadata for an item", exc_info=True)
            return None
        return self.checked(feature.modality, fields)

    def of_bare(self, feature: Any) -> Placeholder | None:
        """The fields of an item without media. None, too: it has others, and its model reads them.

        vLLM's server for tokens sends all that stays on the CPU, of which an entry says nothing,
        and takes values of any form: a worker ends over those that a processor does not make.
        """
        placeholder = self.of_item(feature)
        if placeholder is None or not _is_all_said(feature, placeholder.fields):
            return None
        if not all(
            element.data is None or isinstance(element.data, torch.Tensor)
            for name, element in feature.data.items()
            if name in ASSUMED or name.endswith("_grid_thw")
        ):
            return None
        return placeholder

    def needs_fields(self, modality: str) -> bool:
        """Whether an item without media has to say how it is placed, or its tokens are others."""
        return bool(self.fields_for(modality) or self._model_config.uses_mrope)

    def checked(
        self, modality: str, fields: Any, embeddings: int | None = None
    ) -> Placeholder | None:
        """The fields that somebody says an item has. None: they are others, or make no sense.

        `embeddings` is the number that the item has, if it is known.
        """
        placeholder = Placeholder.of(modality, fields)
        if (
            placeholder is None
            or placeholder.fields.keys() != self.fields_for(modality)
            or not placeholder.fits(self._merge, embeddings)
        ):
            return None
        return placeholder

    def fields_for(self, modality: str) -> set[str]:
        """The names of a processed item's fields that are metadata."""
        if modality not in self._fields:
            self._fields[modality] = set()
            try:
                parser = self._processor.info.data_parser
                self._fields[modality] = parser.placeholder_metadata_fields(modality)
            except Exception:  # the model's own code: its consumers preprocess for themselves
                logger.warning("no placeholder metadata for %s", modality, exc_info=True)
        return self._fields[modality]


def refuse_undeclared(model_config: Any) -> None:
    """Have this process refuse what a client may not say of an item that it sends without media.

    vLLM's parser takes all fields of a processor's output. A worker ends over values that no
    processor made, and the API server over fields that make its prompt larger than its memory.
    """
    if (
        not CAN_LEAVE_OUT_MEDIA
        or getattr(DictEmbeddingItems, "_ecd_refuses", False)
        or getattr(model_config, "is_multimodal_raw_input_only_model", False)
    ):
        return
    DictEmbeddingItems._ecd_refuses = True
    begin = DictEmbeddingItems.__init__
    takes = inspect.signature(begin)

    @functools.wraps(begin)
    def checked(self: Any, *arguments: Any, **named: Any) -> None:
        said = takes.bind(self, *arguments, **named).arguments
        data, modality, required = said["data"], said["modality"], said["required_fields"]
        embeds = {f"{modality}_embeds"} & {*required, *said.get("optional_fields", ())}
        refused = [
            str(name)
            for name, value in data.items()
            if name not in embeds and not (name in required and may_be_said(name, _in_lists(value)))
        ]
        if refused:
            shown = ", ".join(sorted(refused))[:200]
            raise ValueError(f"an {modality} without its media may not come with such {shown}")
        begin(self, *arguments, **named)

    DictEmbeddingItems.__init__ = checked


def _in_lists(value: Any) -> Any:
    """A field's tensor, or its list of tensors, as lists; None if it is long."""
    if isinstance(value, torch.Tensor):
        return None if value.numel() > MAX_FIELD_NUMBERS else value.tolist()
    if isinstance(value, list | tuple) and len(value) <= MAX_FIELD_NUMBERS:
        return [_in_lists(each) if isinstance(each, torch.Tensor) else each for each in value]
    return None


def keep_media(metadata: PlaceholderMetadata) -> None:
    """Have this engine core's cache of processed items keep none that came without its media.

    vLLM 0.32 puts such an item in the place of the whole one of its name. A server whose own cache
    has seen the media sends them no more, so that the engine would have nothing to encode.
    """
    if ReceiverCache is None or getattr(ReceiverCache, "_ecd_keeps_media", False):
        return
    ReceiverCache._ecd_keeps_media = True
    update = ReceiverCache.get_and_update_item
    fields = set().union(*map(metadata.fields_for, ("image", "video", "audio")))

    def kept(cache: Any, mm_item: Any, mm_hash: str) -> Any:
        if mm_item is not None and not _has_more(mm_item, fields):
            return mm_item
        return update(cache, mm_item, mm_hash)

    ReceiverCache.get_and_update_item = kept


def media_budgets() -> dict[str, Any]:
    """How many bytes one request may download and decode, as vLLM's media connectors take it."""
    if DecodedBudget is None:
        return {}
    return {"decoded_budget": DecodedBudget(), "download_budget": DownloadBudget()}


def _is_long(value: Any) -> bool:
    """Whether a field has more numbers than one may have, so that it is not looked at."""
    count = value.numel() if isinstance(value, torch.Tensor) else len(value)
    return count > MAX_NUMBERS


def _is_all_said(feature: Any, fields: Collection[str]) -> bool:
    """Whether the model's language part reads no more of an item than these fields."""
    return all(
        name in fields or name in ENCODERS_OWN or _is_assumed(name, element.data)
        for name, element in (feature.data or {}).items()
    )


def _is_assumed(name: str, value: Any) -> bool:
    """Whether an item's field is absent, or says what its model takes it to be without it."""
    if value is None:
        return True
    if name not in ASSUMED:
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and bool(value == ASSUMED[name])
    return isinstance(value, int | float) and value == ASSUMED[name]


def _is_interleaved(feature: Any) -> bool:
    """Whether an item is a video whose audio lies between its frames in the prompt."""
    element = (feature.data or {}).get(AUDIO_IN_VIDEO)
    return element is not None and not _is_assumed(AUDIO_IN_VIDEO, element.data)


def _has_more(data: Any, fields: set[str]) -> bool:
    """Whether a processed item has something besides these fields that an encoder could read.

    None that stays on the CPU: vLLM says AUDIO_IN_VIDEO of each video of Qwen2.5-Omni, with media
    or without, and its server for tokens sends all such fields without the media.
    """
    return any(
        element.data is not None and name not in fields and not element.field.keep_on_cpu
        for name, element in data.items()
    )
