"""An engine's description at its start: the media that it shares, and its namespace's parts.

It goes to the engine's log and to its daemon, which shows it and compares engines of one model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from ecd_client.vllm.base.compat import gpu_bytes
from ecd_client.vllm.base.outputs import room_for_loads
from ecd_client.vllm.base.settings import Settings
from ecd_client.vllm.base.sharing import Sharing
from ecd_proto.engines import MAX_TEXT_BYTES, Engine, advice, difference

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

ALL_MEDIA = "all media"
_RANK = re.compile(r"_dp\d+$")
"""What vLLM adds to the instance of an engine for each rank of data parallelism."""
_ID_DIGITS = 12


class Description:
    """One engine, by its flags and its model; its namespace may move while it runs."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        settings: Settings,
        sharing: Sharing,
        media: Mapping[str, bool] | None,
        *,
        is_producer: bool,
        is_consumer: bool,
    ) -> None:
        """`media` are the model's, with whether the engine's limits let requests bring each.

        None: they are not known.
        """
        self._settings, self._sharing = settings, sharing
        self._is_producer, self._is_consumer = is_producer, is_consumer
        self._told_of = ""
        self._is_known, media = media is not None, media or {}
        allowed = [each for each, may_come in media.items() if may_come]
        self._limited = [each for each in media if each not in allowed]
        self._shared = [
            each for each in allowed if not settings.keeps_private(each, is_streaming=False)
        ]
        self._left_out = [each for each in allowed if each not in self._shared]
        self._is_kv_sized = bool(vllm_config.cache_config.kv_cache_memory_bytes)
        self._id = engine_id(vllm_config.instance_id)
        self._model = _one_line(str(vllm_config.model_config.served_model_name))

    @property
    def shares(self) -> str:
        """The media that are shared, and why others are not."""
        if why := self._why_nothing:
            return f"nothing: {why.partition('. ')[0]}"
        said = [in_words(self._shared) or ALL_MEDIA]
        if self._limited:
            said.append(f"not {in_words(self._limited)}, left out by --limit-mm-per-prompt")
        if self._left_out:
            said.append(f"not {in_words(self._left_out)}, left out by ecd_modalities")
        if "audio" in self._shared:
            said.append("not the audio of a session that streams")
        if self._settings.private_adapters:
            said.append("not items of adapters of the tower, as ecd_namespace is not set")
        if self._sharing.is_private:
            said.append("but with no other engine: its log says why")
        return "; ".join(said)

    @property
    def _why_nothing(self) -> str | None:
        """Why no item is shared, and the remedy."""
        if why := self._sharing.why_nothing:
            return why
        if self._is_known and not self._shared:
            left_out = in_words([*self._limited, *self._left_out])
            return f"--limit-mm-per-prompt or ecd_modalities leaves out {left_out}"
        return None

    @property
    def engine(self) -> Engine:
        """The description as it is now."""
        is_sharing = self._why_nothing is None
        return Engine(
            self._id,
            self._model,
            self._sharing.namespace,
            is_sharing and self._is_producer,
            is_sharing and self._is_consumer,
            self._sharing.parts,
            _one_line(self.shares),
        )

    def log(self) -> None:
        if why := self._why_nothing:
            logger.warning("ecd: nothing is shared: %s", why)
        else:
            logger.info("ecd: this engine shares %s", self.shares)

    def log_room(self, cache_bytes: int) -> None:
        """Log what loads may take of a GPU's memory, for an encoder cache of this size."""
        has_loads = self._is_consumer and self._why_nothing is None
        if has_loads and cache_bytes and (all_bytes := gpu_bytes()):
            said = room_for_loads(cache_bytes, all_bytes, is_kv_sized=self._is_kv_sized)
            logger.info("ecd: %s", said)

    def log_apart(self, other: Engine) -> None:
        """Log, once for each other engine, that its entries are not found here."""
        mine = self.engine
        if (
            other.id != self._told_of
            and not self._sharing.is_private  # which its log says already
            and mine.may_be_apart_from(other)
        ):
            self._told_of = other.id
            logger.warning(
                "ecd: this engine finds nothing of what the engine of pid %d stores for the same "
                "model at this daemon, as their namespaces differ in %s: %s",
                other.pid,
                difference(mine, other),
                advice(mine, other),
            )


def engine_id(instance_id: str) -> str:
    """The id of an engine's description, the same in each of its processes."""
    instance = _RANK.sub("", instance_id)
    return hashlib.sha256(instance.encode()).hexdigest()[:_ID_DIGITS]


def in_words(names: Sequence[str]) -> str:
    """The names as a sentence lists them: a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _one_line(text: str) -> str:
    """The text as a daemon accepts it: printable, and not too long."""
    shown = "".join(each if each.isprintable() else "?" for each in text)
    return shown.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")
