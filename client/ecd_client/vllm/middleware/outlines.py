"""Has vLLM's processors say the outlines of items, and take them in place of processed media.

vLLM keeps what it has made of a medium in its cache of processed items, so that a request can bring
the medium's name alone. What is kept in ecd is given to vLLM as if it came from that cache.

vLLM names an item alike for all tenants. Two requests that mean different entries by one name get
no outline.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, TypeAlias

import torch
from vllm.logger import init_logger
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.processor import (
    PromptIndex,
    PromptIndexTargets,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
)

from ecd_client.vllm.base.compat import caches_as_vllm
from ecd_client.vllm.middleware.outline import Outline, Place, Update
from ecd_proto.placeholders import STEP, Placeholder

logger = init_logger(f"vllm.{__name__}")

Entry: TypeAlias = "tuple[str, str]"
"""The namespace and the stored name of an item."""
_PLACES = {"start": PromptIndexTargets.start, "end": PromptIndexTargets.end}


class Unwritable(ValueError):
    """Why items of this kind have no outline."""


class Outlines:
    """The outlines that one server's requests have vLLM take, and those that it is to make.

    vLLM preprocesses on a thread of its own.
    """

    def __init__(
        self,
        describe: Callable[[str, Any], Placeholder | None],
        store: Callable[[Entry, Outline], None],
    ) -> None:
        """`describe` has the fields of a processed item that say its place, None if none do.

        `store` stores the outline of an entry.
        """
        self._describe, self._store = describe, store
        self._lock = Lock()
        self._given: dict[str, list[Outline]] = defaultdict(list)
        self._wanted: dict[str, list[Entry]] = defaultdict(list)
        self.impossible: set[str] = set()
        """Modalities whose items have no outline, as one has shown."""

    @contextmanager
    def giving(self, outlines: Mapping[str, Outline]) -> Iterator[None]:
        """Have vLLM take these for items that a request brings by their names (mm_hash) alone."""
        with _within(self._lock, self._given, outlines):
            yield

    @contextmanager
    def wanting(self, entries: Mapping[str, Entry]) -> Iterator[None]:
        """Have the outlines of items with these names stored, if vLLM preprocesses them."""
        with _within(self._lock, self._wanted, entries):
            yield

    @property
    def are_needed(self) -> bool:
        return bool(self._given or self._wanted)

    def given(self, name: str) -> Outline | None:
        with self._lock:
            outline: Outline | None = _only(self._given.get(name, ()))
        return outline

    def note(self, name: str, item: Any, updates: Sequence[Any]) -> None:
        """Store the outline of an item that vLLM has preprocessed, if somebody wants it.

        The `item` is None where vLLM has it elsewhere.
        """
        with self._lock:
            entry = _only(self._wanted.get(name, ()))
        if entry is None or not updates:
            return
        modality = updates[0].modality
        try:
            placeholder = self._describe(modality, item)
            if placeholder is None:
                outline = outline_of(updates)
            else:
                outline = Outline(modality, placeholder=placeholder)
            self._store(entry, outline)
        except Unwritable as error:
            if modality not in self.impossible:
                self.impossible.add(modality)
                logger.warning("ecd: every %s is preprocessed each time: %s", modality, error)
        except Exception:  # the model's own code, too: this item is preprocessed again
            logger.debug("ecd: an outline is not stored", exc_info=True)

    def install(self) -> None:
        """Have this process's processors take items from outlines, and give theirs."""
        apply = BaseMultiModalProcessor._cached_apply_hf_processor
        find_missing = BaseMultiModalProcessor._get_cache_missing_items

        @functools.wraps(apply)
        def applied(processor: Any, inputs: Any, timing_ctx: Any) -> Any:
            if self.are_needed and caches_as_vllm(type(processor)):
                inputs = replace(inputs, cache=_Cache(inputs.cache, self, processor))
            return apply(processor, inputs, timing_ctx)

        @functools.wraps(find_missing)
        def found(processor: Any, cache: Any, mm_data_items: Any, mm_hashes: Any) -> Any:
            if isinstance(cache, _Cache):
                cache.take_bare(
                    {
                        name
                        for kind, names in mm_hashes.items()
                        for index, name in enumerate(names)
                        if mm_data_items[kind][index] is None
                    }
                )
            return find_missing(processor, cache, mm_data_items, mm_hashes)

        BaseMultiModalProcessor._cached_apply_hf_processor = applied
        BaseMultiModalProcessor._get_cache_missing_items = found


@contextmanager
def _within(lock: Lock, all_: dict[str, list[Any]], more: Mapping[str, Any]) -> Iterator[None]:
    with lock:
        for name, value in more.items():
            all_[name].append(value)
    try:
        yield
    finally:
        with lock:
            for name, value in more.items():
                all_[name].remove(value)
                if not all_[name]:
                    del all_[name]


class _Cache:
    """vLLM's cache of processed items for one request, or none; with outlines in it."""

    def __init__(self, cache: Any, outlines: Outlines, processor: Any) -> None:
        self._cache, self._outlines, self._processor = cache, outlines, processor
        self._light: dict[str, Outline] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def take_bare(self, names: set[str]) -> None:
        """Note items that came by their names alone."""
        found = {name: self._outlines.given(name) for name in names}
        self._light = {name: outline for name, outline in found.items() if outline is not None}

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        had = [False] * len(mm_hashes) if self._cache is None else self._cache.is_cached(mm_hashes)
        return [name in self._light or each for name, each in zip(mm_hashes, had, strict=True)]

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        if self._cache is not None and mm_hash not in self._light:
            self._cache.touch_sender_cache_item(mm_hash)

    def release_sender_touches(self) -> None:
        if self._cache is not None:
            self._cache.release_sender_touches()

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        outline = self._light.get(mm_hash)
        if outline is not None:
            item = item_of(outline)
            return item, updates_of(outline, item, self._processor)
        taken = mm_item
        if self._cache is not None:
            taken = self._cache.get_and_update_item(mm_item, mm_hash)
        item, updates = mm_item or (None, taken[1])
        self._outlines.note(mm_hash, item, updates)
        return taken


def outline_of(updates: Sequence[Any]) -> Outline:
    """The outline that vLLM's updates for one item say. Raises Unwritable."""
    said = []
    for update in updates:
        target, content = _target_said(update.target), update.content
        if target is None or not isinstance(content.full, list):
            raise Unwritable("its place in a prompt cannot be written down")
        embeds = content.is_embed
        mask = None if embeds is None else bytes(embeds(content.full).to(torch.uint8).tolist())
        said.append(Update(update.mode.value, target, content.full, mask))
    outline = Outline(updates[0].modality, tuple(said))
    if not outline.embeddings:
        raise Unwritable("how many embeddings it has depends on the prompt")
    return outline


def item_of(outline: Outline) -> Any:
    """The processed item without what its encoder reads."""
    fields = {} if outline.placeholder is None else outline.placeholder.fields
    on_cpu = MultiModalBatchedField(keep_on_cpu=True)
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=_as_made(name, value), field=on_cpu)
            for name, value in fields.items()
        }
    )


def _as_made(name: str, value: list[Any]) -> torch.Tensor:
    """A field as a processor makes it, or vLLM's server of metadata in JSON."""
    if name == STEP:
        return torch.tensor(value[0], dtype=torch.float32)
    return torch.tensor(value, dtype=torch.float64 if isinstance(value[0], float) else torch.int64)


def updates_of(outline: Outline, item: Any, processor: Any) -> list[Any]:
    """vLLM's updates for the item, which gives them the item's index."""
    kind = outline.modality
    if outline.placeholder is not None:
        items = processor.info.parse_mm_data({kind: [None]}, validate=False)
        all_ = processor._get_mm_prompt_updates(items, {}, MultiModalKwargsItems({kind: [item]}))
        [updates] = all_[kind]
        return list(updates)
    return [
        ResolvedPromptUpdate(
            modality=kind,
            item_idx=0,
            mode=UpdateMode(update.mode),
            target=_target(update.target),
            content=PromptUpdateDetails(update.full, _embeds(update.embeds)),
        )
        for update in outline.updates
    ]


def _only(values: Sequence[Any]) -> Any:
    """The value, if all are the same; else None."""
    return values[0] if values and all(value == values[0] for value in values) else None


def _target_said(target: Any) -> list[int] | Place | None:
    """The target of an update. None: it is a place that nobody can write down."""
    if isinstance(target, list):
        return target
    if not isinstance(target, PromptIndex):
        return None
    probes: Any = [([], 0), ([-1, -2], 0), ([-1, -2], 1)]
    places = [target.get_match_index(list(prompt), start) for prompt, start in probes]
    if places == [0, 0, 0]:
        return "start"
    return "end" if places == [0, 2, 2] else None


def _target(target: list[int] | Place) -> Any:
    return target if isinstance(target, list) else _PLACES[target]()


def _embeds(mask: bytes | None) -> Callable[[list[int]], torch.Tensor] | None:
    if mask is None:
        return None

    def embeds(full: list[int]) -> torch.Tensor:
        if len(full) != len(mask):
            raise ValueError("the tokens of an item are not those of its outline")
        return torch.tensor(list(mask), dtype=torch.bool)

    return embeds
