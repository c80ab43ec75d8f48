"""Placeholder metadata of items: its fields, and which requests may bring only these."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.logger import init_logger

from ecd_client.vllm.base.compat import (
    CAN_LEAVE_OUT_MEDIA,
    ReceiverCache,
    caches_as_vllm,
    collect_ec_item_metadata,
    is_mistrals,
    strip_covered_mm_data,
)
from ecd_client.vllm.base.fields import (
    ASSUMED,
    AUDIO_IN_VIDEO,
    GRID,
    TIMES,
    has_more,
    is_all_said,
    is_assumed,
    is_interleaved,
    is_long,
    is_made,
)
from ecd_client.vllm.base.outputs import configs_in
from ecd_proto.placeholders import STEP, Placeholder

logger = init_logger(f"vllm.{__name__}")


class PlaceholderMetadata:
    """Finds the fields of an item that size its placeholder, such as `image_grid_thw`.

    A consumer that receives only these and the item's name skips preprocessing.
    """

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._fields: dict[str, set[str]] = {}
        self._announces: dict[str, bool] = {}
        merges = (config.get("spatial_merge_size") for config in configs_in(model_config.hf_config))
        self._merge = next((merge for merge in merges if type(merge) is int and merge > 0), None)

    def is_all_of(self, feature: Any) -> bool:
        """Whether the request brought only metadata of an item, and nothing to encode."""
        return not feature.data or not has_more(feature.data, self.fields_for(feature.modality))

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
        items = collect_ec_item_metadata(mm_features, NoFields)  # which looks at no data
        said: dict[str, Mapping[str, Any]] = {}
        are_apart = not any(map(is_interleaved, mm_features))
        for feature in mm_features:
            placeholder = self._announced(feature, stored) if are_apart else None
            fields = {} if placeholder is None else placeholder.fields
            said[feature.identifier] = said.get(feature.identifier, fields) and fields
        incomplete: set[str] = set()
        while (
            more := {each.modality for each in mm_features if not said[each.identifier]}
            - incomplete
        ):  # a name may stand in two modalities
            incomplete |= more
            for feature in mm_features:
                if feature.modality in incomplete:
                    said[feature.identifier] = {}
        for identifier, item in items.items():
            item["metadata"] = dict(said[identifier])
        return items

    def _announced(self, feature: Any, stored: Mapping[str, bytes]) -> Placeholder | None:
        """The fields of an item, if its entry has the same and a consumer needs no others."""
        if not (metadata := stored.get(feature.identifier)):
            return None
        said = self.of_item(feature)
        if said is None or not said.is_of(metadata) or not self._says_all(feature, said):
            return None
        return said if self.is_taken(feature.modality, said) else None

    def packed(self, feature: Any) -> bytes:
        """The item's fields as its entry carries them; empty unless a consumer needs no others."""
        placeholder = self.of_item(feature)
        if placeholder is None or not self._says_all(feature, placeholder):
            return b""
        return placeholder.stored

    def _says_all(self, feature: Any, said: Placeholder) -> bool:
        """Whether an item's metadata do for a consumer in place of the item's media.

        Its server takes flat lists of numbers alone. Its model reads further fields of some items;
        none but ENCODERS_OWN are known not to matter.
        """
        return (
            self.announces(feature.modality)
            and not any(isinstance(each, list) for value in said.fields.values() for each in value)
            and is_all_said(feature, said.fields)
        )

    def is_taken(self, modality: str, said: Placeholder) -> bool:
        """Whether a consumer's server takes these metadata in a request: no step between frames."""
        return STEP not in said.fields and said.fields.keys() == self.fields_for(modality)

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

    @functools.cached_property
    def _made(self) -> Mapping[str, Any]:
        """How the processor makes each field of its items. Raises what the model's code does."""
        made: Mapping[str, Any] = self._processor._get_mm_fields_config({}, {})
        return made

    def front_end(self) -> str:
        """A digest of what makes prompts of media: vLLM, transformers, and the tokenizer."""
        tokens = sorted(self._processor.info.get_tokenizer().get_vocab().items())
        versions = vllm.__version__, version("transformers")
        return sha256(repr((versions, tokens)).encode()).hexdigest()

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
            if not self.fields_for(modality) <= self._made.keys():
                return False
            if not CAN_LEAVE_OUT_MEDIA:
                return True
            processor = self._processor
            kind = type(processor.info)
            consumers = type("Consumers", (kind,), {"allow_missing_mm_embeddings": True})
            parser = consumers(processor.info.ctx).get_data_parser()
            return bool(parser.allow_missing_mm_embeddings)
        except Exception:  # the model's own code
            logger.warning("no placeholder metadata for %s", modality, exc_info=True)
            return False

    def of_item(self, feature: Any, embeddings: int | None = None) -> Placeholder | None:
        """The fields of a request's item. None: some are unknown or malformed.

        `embeddings` is as in `checked`.
        """
        wanted = self.fields_for(feature.modality)
        if not wanted:
            return None
        try:
            data = {} if feature.data is None else feature.data.get_data()
            if any(is_long(data[name]) for name in wanted if name in data):
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
            step = data.get(STEP)
            if isinstance(step, torch.Tensor) and step.numel() == 1 and not is_assumed(STEP, step):
                fields[STEP] = [step.item()]
        except Exception:  # the model's own values: its consumers preprocess for themselves
            logger.warning("no placeholder metadata for an item", exc_info=True)
            return None
        return self.checked(feature.modality, fields, embeddings)

    def of_bare(self, feature: Any) -> Placeholder | None:
        """The fields of an item without media. None, too: it has others, and its model reads them.

        vLLM's server for tokens sends all that stays on the CPU, of which an entry says nothing,
        and takes values of any form: a worker ends over those that a processor does not make.
        """
        # A worker ends over positions that do not fit the item's place.
        is_whole = not self._is_pruned(feature.modality)
        embeddings = feature.mm_position.get_num_embeds() if is_whole else None
        placeholder = self.of_item(feature, embeddings)
        if placeholder is None or not is_all_said(feature, placeholder.fields):
            return None
        elements = feature.data or {}
        if not all(
            element.data is None or is_made(name, element.data)
            for name, element in elements.items()
            if name in ASSUMED or name.endswith(GRID)
        ):
            return None
        # Once an item's tokens are cached, vLLM keeps all but such fields from the worker.
        stay = {name for name, element in elements.items() if element.field.keep_on_cpu}
        must_stay = strip_covered_mm_data is not None and self._places_by_fields()
        if must_stay and not placeholder.fields.keys() <= stay:
            return None
        return placeholder

    def fits_entry(self, modality: str) -> bool:
        """Whether a server takes all metadata of such items from an entry, or of most of them."""
        return self.announces(modality) and not self.fields_for(modality) & {TIMES, STEP}

    def needs_outline(self, modality: str) -> bool:
        """Whether such items may have an outline that says what their entries do not."""
        may_lack = not self.fits_entry(modality) or self._has(STEP, modality)
        return may_lack and self.can_outline(modality)

    def _has(self, field: str, modality: str) -> bool:
        """Whether such items may have the field."""
        try:
            made = self._made
            return field in made and made[field].modality == modality
        except Exception:  # the model's own code
            return field in self.fields_for(modality)

    def can_promise(self, modality: str) -> bool:
        """Whether an encoder's answer can say what an engine needs to do without such a medium."""
        return self.announces(modality) and not self._is_pruned(modality)

    def can_outline(self, modality: str) -> bool:
        """Whether an outline of an item (`middleware.outlines`) can take its place.

        An item's positions follow from its tokens, or from fields that are metadata. Mistral's
        tokenizer needs the medium itself, and Qwen's Omni models a field of each video.
        """
        follows = self.announces(modality) or not (
            self._places_by_fields() or self.fields_for(modality)
        )
        try:
            return (
                follows
                and not self._has(AUDIO_IN_VIDEO, modality)
                and not self._is_pruned(modality)
                and not is_mistrals(self._model_config)
                and caches_as_vllm(type(self._processor))
            )
        except Exception:  # the model's own code
            logger.warning("no outlines of %s", modality, exc_info=True)
            return False

    def of_outline(self, modality: str, data: Any) -> Placeholder | None:
        """The fields from which an item's place follows, if any. Raises ValueError: from others."""
        if not self.fields_for(modality):
            return None
        feature = SimpleNamespace(identifier="", modality=modality, data=data)
        placeholder = self.of_item(feature)
        if placeholder is None or not is_all_said(feature, placeholder.fields):
            raise ValueError("it has other fields than an outline can have")
        return placeholder

    @property
    def reads_times(self) -> bool:
        """Whether the model reads how far the frames of a video are apart."""
        return self._has(STEP, "video")

    def must_say(self, feature: Any) -> bool:
        """Whether an item without media has to say how it is placed.

        Without that its tokens are others, or a worker ends as it looks where they stand.
        """
        return self._places_by_fields() or bool(feature.data and self.fields_for(feature.modality))

    def _is_pruned(self, modality: str) -> bool:
        """Whether fewer embeddings stand for an item than its fields say."""
        if modality != "video":
            return False
        return bool(getattr(self._model_config.multimodal_config, "video_pruning_rate", None))

    def _places_by_fields(self) -> bool:
        """Whether the model's positions (M-RoPE, XD-RoPE) follow from items' fields."""
        config = self._model_config
        return bool(config.uses_mrope or getattr(config, "uses_xdrope_dim", 0))

    def checked(
        self, modality: str, fields: Any, embeddings: int | None = None
    ) -> Placeholder | None:
        """The fields that somebody says an item has. None: they are others, or make no sense.

        `embeddings` is the number that the item has, if it is known.
        """
        wanted, placeholder = self.fields_for(modality), Placeholder.of(modality, fields)
        if not wanted or placeholder is None or not placeholder.fits(self._merge, embeddings):
            return None
        said = placeholder.fields.keys()
        is_known = said == wanted or (said == wanted | {STEP} and self._has(STEP, modality))
        return placeholder if is_known else None

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
        if mm_item is not None and not has_more(mm_item, fields):
            return mm_item
        return update(cache, mm_item, mm_hash)

    ReceiverCache.get_and_update_item = kept


class NoFields:
    """Names no field of any item as metadata."""

    @staticmethod
    def fields_for(modality: str) -> set[str]:  # noqa: ARG004
        return set()
