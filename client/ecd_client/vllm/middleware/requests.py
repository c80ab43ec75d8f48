"""The media of requests with messages: found, missing, or left to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

from vllm.logger import init_logger

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.vllm.base.hints import DECODING, hints_in, names_items
from ecd_client.vllm.base.identity.identity import PRIVATE
from ecd_client.vllm.base.identity.shared_namespace import SeenNamespace
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.base.names import stored_name
from ecd_client.vllm.base.settings import Settings
from ecd_client.vllm.middleware.entries import MediaEntries
from ecd_client.vllm.middleware.fetching import MediaFetcher
from ecd_client.vllm.middleware.hop.headers import Headers
from ecd_client.vllm.middleware.hop.protocol import MAX_BODY_BYTES
from ecd_client.vllm.middleware.media import (
    AUDIO,
    FORMATS,
    INPUT_AUDIO,
    KINDS,
    READ_BY_KEY,
    VIDEO,
    FoundMedium,
    Look,
    Medium,
    MissingMedium,
    Promise,
    may_stand_together,
)
from ecd_client.vllm.middleware.naming import Names
from ecd_client.vllm.middleware.outline import Outline
from ecd_client.vllm.middleware.outlines import Outlines
from ecd_proto.placeholders import Placeholder

logger = init_logger(f"vllm.{__name__}")

MAX_MEDIA = 64
"""Most media that are looked up for one request."""
MAX_URL = MAX_BODY_BYTES - (1 << 16)
"""Longest URL in a call of an encoder, whose middleware reads no larger body."""
REMOTE_WAIT_S = 0.05
"""How long a request waits for media that are being written, or that other nodes may have."""
URL_MARK, SOUND_MARK = b'_url"', b"input_audio"
"""One of these is in each body that has media. Each that is looked for takes its time."""
_UNNAMED = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields of a request that change its media's names."""
_PLAIN = frozenset(("text", "input_text", "output_text", "refusal", "thinking"))
"""Types of parts that may stand beside media."""


class Requests:
    """Finds the media of requests in ecd."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        namespace: SeenNamespace,
        model_config: Any,
        metadata: PlaceholderMetadata,
        models: list[str],
        names: Names,
        kinds: Collection[str],
        outlined: Collection[str],
        *,
        only_encodes: bool,
        has_encoder: bool,
        sent: Collection[str],
    ) -> None:
        """`models` are the names that requests may give, `namespace` is the engine's.

        Requests with media of other `kinds` pass as they came; those of `outlined` kinds may need
        their outlines. Media of `sent` kinds go to encoders: a look has what ecd has of a request,
        and which of these are missing.
        `only_encodes` and `has_encoder` say what the engine is for.
        """
        self._settings, self._namespace = settings, namespace
        self._models, self._metadata, self._names = models, metadata, names
        self._only_encodes, self._has_encoder = only_encodes, has_encoder
        self._outlined = outlined
        vocabulary = model_config.get_vocab_size()
        self._entries = MediaEntries(
            client, metadata, outlined, vocabulary, only_encodes=only_encodes
        )
        self._outlines = Outlines(metadata.of_outline, self._entries.keep)
        self._can_outline: set[str] = set()
        if outlined:
            self._can_outline.update(filter(metadata.can_outline, kinds))
            self._outlines.install()
        multimodal = model_config.multimodal_config
        self._sent = sent
        self._limits = {kind: multimodal.get_limit_per_prompt(kind) for kind in kinds}
        self._how = {kind: names.decoding(kind) for kind in KINDS.values()}
        self._marks = (URL_MARK, SOUND_MARK) if AUDIO in kinds else (URL_MARK,)
        self._fetcher = MediaFetcher(model_config)
        has_videos = VIDEO in sent
        self._headers = Headers(
            model_config,
            names.loader if has_videos else None,
            names.io_kwargs(VIDEO),
            reads_times=has_videos and metadata.reads_times,
        )

    def may_have_media(self, body: bytes) -> bool:
        """Whether a request can have media of a kind that is looked up."""
        return any(each in body for each in self._marks)

    async def look(self, body: bytes, *, may_send: bool = False) -> Look:
        """Find all media of a request, or none of them; vLLM refuses what is mixed.

        None is found where one is missing that no hop can have encoded: encoders are there only if
        it `may_send`. The caller releases what was fetched.
        """
        look = Look(body, may_send=may_send)
        try:
            await asyncio.to_thread(self._read, look)
            if look.media and await self._fetcher.fetch(look):
                await asyncio.to_thread(self._find_all, look)
        except BaseException as error:
            look.close()
            self.release(look)
            if not isinstance(error, Exception):
                raise
            # vLLM says what is wrong with the request.
            logger.debug("ecd: a request passes as it is", exc_info=True)
            return Look(body)
        return look

    def with_outlines(self, look: Look) -> AbstractContextManager[None]:
        """While vLLM has a request with names alone: have it know the outlines that were found."""
        return self._outlines.giving(look.outlines)

    def keeping_outlines(self, look: Look) -> AbstractContextManager[None]:
        """While vLLM has a request with media: store the outlines that ecd lacks."""
        return self._outlines.wanting(look.without_outline)

    def release(self, look: Look) -> None:
        """Forget a request's media, which nobody needs any more."""
        for medium in look.media:
            medium.forget()
        self._fetcher.release(look)

    def _read(self, look: Look) -> None:
        request = json.loads(look.body)
        params: Any = request.get("ec_transfer_params")
        said = params.get(DECODING) if isinstance(params, dict) else None
        if said is not None and said not in self._how.values():
            look.is_foreign = True
            return
        if (
            any(request.get(field) for field in _UNNAMED)
            or request.get("model") not in (None, *self._models)
            or (request.get("stream") and self._only_encodes)
            or not isinstance(request.get("cache_salt") or "", str)
        ):
            return
        conversations = request["messages"]
        if not isinstance(next(iter(conversations), None), list):
            conversations = [conversations]
        media: list[Medium] = []
        kinds = self._limits.keys() - self._outlines.impossible
        for messages in conversations:  # those of a batch
            found = _media(messages, kinds)
            counts = Counter(medium.kind for medium in found or ())
            if found is None or any(n > self._limits[kind] for kind, n in counts.items()):
                return
            media += found
        if self._only_encodes and any(medium.is_named_here for medium in media):
            return  # the engines that it encodes for may look for vLLM's own names
        if len(media) <= MAX_MEDIA:
            look.request, look.media = request, media

    def _find_all(self, look: Look) -> None:
        namespace = self._namespace.read()
        params: Any = look.request.get("ec_transfer_params")
        hints = hints_in(params)
        # No encoder stores in a namespace that this engine alone has.
        is_alone = (namespace or "").rpartition("|")[2].startswith(PRIVATE)
        until_s = clock.now_s() + REMOTE_WAIT_S
        names = []
        with contextlib.suppress(EcdError):
            for medium in look.media:
                self._name(medium)
                stored = stored_name(medium.name, look.salt)
                names.append(stored)
                if namespace is None or not self._settings.shares(stored):
                    break
                nodes = hints.get(medium.name, ())
                found, is_stored = self._entries.find(namespace, medium, stored, nodes, until_s)
                if found is not None:
                    look.found.append(found)
                    continue
                if medium.kind in self._outlined:
                    look.without_outline[medium.name] = namespace, stored
                # A request may name what encoders have stored, under vLLM's own names.
                names_others = names_items(params) and medium.name not in params
                is_elsewhere = names_others and medium.is_named_here
                stays = is_alone or is_stored or is_elsewhere
                may_go = look.may_send and medium.kind in self._sent and not stays
                if may_go and (missing := self._missing(medium, namespace, look.salt)):
                    look.missing.append(missing)
                elif medium.kind not in self._outlined:
                    break
        if len(look.found) + len(look.missing) < len(look.media) or not self._is_one_way(look):
            look.close()
        elif not any(medium.is_chosen for medium in look.media):
            look.names = frozenset(names)
        look.is_named = namespace is not None and self._is_named(look)
        for medium in look.media:
            medium.keep_bytes()
        if not (look.is_whole or look.missing):
            look.settle()

    def _is_one_way(self, look: Look) -> bool:
        """Whether vLLM can take all media in one way: by metadata, or by outlines."""
        said = {type(found.said) for found in look.found} | {
            Outline if each.by_outline else Placeholder for each in look.missing
        }
        if Outline not in said:
            return len(said) == 1
        return {medium.kind for medium in look.media} <= self._can_outline

    def _missing(self, medium: Medium, namespace: str, salt: str | None) -> MissingMedium | None:
        """The medium as an encoder gets it. None: it stays with the engine."""
        url = medium.data_url()
        if url is None or len(url) > MAX_URL:
            return None
        size = self._headers.size(medium, url)
        if size is None:
            return None
        can_outline = medium.kind in self._can_outline
        by_outline = size.has_times or not self._metadata.can_promise(medium.kind)
        if by_outline and not can_outline:
            return None
        return MissingMedium(
            medium,
            url,
            medium.name,
            namespace,
            size.tokens,
            salt,
            size.seconds,
            decoding=None if medium.is_chosen else self._how[medium.kind],
            by_outline=by_outline,
            can_outline=can_outline,
            is_safe=not medium.is_inline,
        )

    async def take_promised(self, look: Look) -> None:
        """Find the outlines of what encoders have stored, or have the request bring its media."""
        promised, look.promised = look.promised, []
        until_s = min(look.waits_until_s, clock.now_s() + self._settings.load_timeout_s)
        found = await asyncio.to_thread(self._find_promised, promised, until_s)
        if found is None:
            return
        look.found += found
        look.promised = [each for each in promised if each[1].placeholder is not None]
        promises = [promise for _, promise in look.promised]
        if not (self._is_one_way(look) and may_stand_together(look.found, promises)):
            for one in look.found:
                one.item.close()
            look.found, look.promised = [], []

    def _find_promised(
        self, promised: list[tuple[MissingMedium, Promise]], until_s: float
    ) -> list[FoundMedium] | None:
        found = []
        for missing, promise in promised:
            if promise.placeholder is not None:
                continue
            about = missing.namespace, missing.medium, missing.stored_name, promise.hints
            one: FoundMedium | None = None
            with contextlib.suppress(EcdError):
                one, _ = self._entries.find(*about, until_s)
            if one is None:
                return None
            found.append(one)
        return found

    @staticmethod
    def entries_of(look: Look) -> list[tuple[str, str, str]]:
        """The namespace, the modality and the stored name of a request's media, for `are_shown`."""
        kinds = {medium.name: medium.kind for medium in look.media}
        named = [(ns, kinds[name], stored) for name, (ns, stored) in look.without_outline.items()]
        return named + [
            (each.item.namespace, each.medium.kind, each.item.mm_hash) for each in look.found
        ]

    def are_shown(self, entries: list[tuple[str, str, str]]) -> bool:
        """Whether memory shows all that stands in the media's place."""
        with contextlib.suppress(EcdError):
            return all(self._entries.shows(*each) for each in entries)
        return False

    def _name(self, medium: Medium) -> None:
        if medium.name:
            return
        if medium.is_chosen:
            uuid = medium.part["uuid"]
            if not isinstance(uuid, str) or not uuid:
                raise TypeError("a uuid is no string, or empty")
            medium.uuid = uuid
        else:
            medium.uuid = self._names.uuid(medium.kind, medium.content)
        medium.name = self._names.mm_hash(medium.kind, medium.uuid)

    def _is_named(self, look: Look) -> bool:
        """Whether the request says the middleware's names of its videos and sounds, if any.

        Not where encoders can have stored them under vLLM's own names, and the engine relies on
        that: the request names what they have stored, or the engine has no encoder.
        """
        named = [medium for medium in look.media if medium.is_named_here]
        for medium in named:
            self._name(medium)
        params: Any = look.request.get("ec_transfer_params")
        if names_items(params):
            return all(medium.name in params for medium in named)
        return self._has_encoder


def _media(messages: list[dict[str, Any]], kinds: Collection[str]) -> list[Medium] | None:
    """The media of a conversation. None: one is of another kind, or vLLM may read another key."""
    found = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            key: Any = part.get("type") if isinstance(part, dict) else "text"
            others = READ_BY_KEY.intersection(part) if isinstance(part, dict) else frozenset()
            if key in _PLAIN and not others:
                continue
            if KINDS.get(key) not in kinds or others != {key}:
                return None
            if not isinstance(part[key], dict):  # vLLM refuses what is not
                return None
            if key == INPUT_AUDIO and part[key].get("format") not in FORMATS:
                return None
            found.append(Medium(part, key))
    return found
