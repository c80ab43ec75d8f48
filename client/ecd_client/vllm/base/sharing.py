"""Where this engine shares now: its namespace, which moves when its weights may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.envs import VLLM_PLUGINS
from vllm.logger import init_logger

from ecd_client.vllm.base import omni
from ecd_client.vllm.base.identity.code_name import model_class_of
from ecd_client.vllm.base.identity.identity import Identity, why_nothing_is_shared
from ecd_client.vllm.base.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

TOLD = (
    "Tell vLLM their weight version, after the last such call, and it shares with engines of its "
    "ecd_weights_run that were told the same"
)
UNTOLD = (
    "A weight version that vLLM is told later lets it share if ecd_weights_run names the training "
    "run. Calls to the workers that leave the weights alone can be named in ecd_harmless_calls"
)
REFUSED = (
    "ecd_uuids is refuse, and no version of vLLM tells the connector a client's uuid from a hash "
    "of content. To share, have the gateway remove uuids and let ecd_uuids be trust"
)


class Sharing:
    """The engine's namespace, and the choice of items that other engines may get.

    `moves` counts how often the namespace was set anew: the same name may come back with other
    weights.
    """

    def __init__(self, settings: Settings, vllm_config: VllmConfig) -> None:
        self._settings, self._vllm_config = settings, vllm_config
        self._identity = Identity.of(
            vllm_config,
            namespace=settings.namespace,
            code_version=settings.code_version,
            weights_version=settings.weights_version,
            weights_run=settings.weights_run,
        )
        self._why_never = omni.why_model_shares_nothing(
            model_class_of(vllm_config), omni.stage_of(vllm_config.model_config)
        )
        self._before_sleep: tuple[Identity, int] | None = None
        self.moves = 0

    @property
    def namespace(self) -> str:
        return self._identity.namespace

    @property
    def namespace_to_store_in(self) -> str | None:
        """The namespace; None while no item is shared."""
        return self.namespace if self.why_nothing is None else None

    @property
    def parts(self) -> Mapping[str, str]:
        """The parts of the namespace (`ecd_proto.engines`)."""
        return self._identity.parts

    @property
    def is_private(self) -> bool:
        """Whether no other engine can have the namespace."""
        return self._identity.is_private

    @property
    def why_nothing(self) -> str | None:
        """Why no item is shared, and the remedy; None if items are shared."""
        if not self._settings.trusts_uuids:
            return REFUSED
        return self._why_never or why_nothing_is_shared(self._vllm_config)

    def includes(self, identifier: str) -> bool:
        """Whether the item of this name is shared."""
        return self.why_nothing is None and self._settings.shares(identifier)

    def log_start(self) -> None:
        logger.info("ecd: namespace %s on %s", self.namespace, self._settings.address)
        if self._identity.is_private:
            logger.warning("ecd: this engine shares with no other: %s", self._identity.why_private)
        if VLLM_PLUGINS is not None and "ecd" not in VLLM_PLUGINS:
            logger.warning(
                "ecd: VLLM_PLUGINS leaves out ecd, which checks in the API server what clients say "
                "of items without media: one request can end this engine. Add ecd to the list"
            )

    def move_alone(self, cause: str) -> None:
        """Move to a namespace that no other engine has: the weights may have changed."""
        self._move(self._identity.alone())
        logger.warning(
            "ecd: weights may have changed (%s): this engine shares with no other from now on, "
            "under %s. %s",
            cause,
            self.namespace,
            TOLD if self._settings.weights_run else UNTOLD,
        )

    def move_to_version(self, version: str) -> None:
        """Move to the namespace of the engines of this run whose weights have this version."""
        if self._settings.weights_run is None:
            self.move_alone(f"they are version {version!r} of a run without a name")
            return
        self._move(self._identity.with_version(version, self._settings.weights_run))
        logger.info("ecd: namespace %s", self.namespace)

    def fall_asleep(self, weights_are_kept: bool) -> None:
        """Note where the engine shares, before a sleep that keeps its weights or drops them."""
        self._before_sleep = (self._identity, self.moves) if weights_are_kept else None

    def wake_up(self) -> None:
        """Move back to where the engine shared before it slept, or alone.

        A sleep resets the encoder cache, which is one move. With any other the weights may have
        changed meanwhile.
        """
        before, self._before_sleep = self._before_sleep, None
        if before is None or self.moves != before[1] + 1:
            self.move_alone("the engine woke up")
            return
        self._move(before[0])
        logger.info("ecd: the engine woke up with its weights: namespace %s", self.namespace)

    def _move(self, identity: Identity) -> None:
        self.moves += 1
        self._identity = identity
