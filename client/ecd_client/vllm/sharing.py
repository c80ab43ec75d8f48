"""Where this engine shares now: its namespace, which moves when its weights may have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from ecd_client.vllm.identity import Identity, why_nothing_is_shared
from ecd_client.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")


class Sharing:
    """The engine's namespace, and the choice of items that other engines may get.

    `moves` counts how often the namespace was set anew: the same name may come back with other
    weights.
    """

    def __init__(self, settings: Settings, vllm_config: VllmConfig) -> None:
        self._settings, self._vllm_config = settings, vllm_config
        self._identity = Identity.of(vllm_config, settings.namespace, settings.weights_version)
        self.moves = 0

    @property
    def namespace(self) -> str:
        return self._identity.namespace

    @property
    def namespace_to_store_in(self) -> str | None:
        """The namespace; None while no item is shared."""
        return self.namespace if self._shares else None

    @property
    def _shares(self) -> bool:
        return self._settings.trusts_uuids and why_nothing_is_shared(self._vllm_config) is None

    def includes(self, identifier: str) -> bool:
        """Whether the item of this name is shared."""
        return self._shares and self._settings.shares(identifier)

    def log_start(self) -> None:
        logger.info("ecd: namespace %s on %s", self.namespace, self._settings.address)
        if self._identity.is_private:
            logger.warning(
                "ecd: this engine shares with no other, because what its weights are cannot be "
                "told: they come from a bucket, of no known commit, or changed as it started. "
                "Give engines of equal weights the same ecd_weights_version"
            )
        if not self._settings.trusts_uuids:
            logger.warning(
                "ecd: nothing is shared: ecd_uuids is refuse, and no version of vLLM tells the "
                "connector a client's uuid from a hash of content. To share, have the gateway "
                "remove uuids and let ecd_uuids be trust"
            )
        elif why := why_nothing_is_shared(self._vllm_config):
            logger.warning("ecd: nothing is shared: %s", why)

    def move_alone(self, cause: str) -> None:
        """Move to a namespace that no other engine has: the weights may have changed."""
        self._move(self._identity.alone())
        logger.warning(
            "ecd: weights may have changed (%s): this engine shares with no other from now on, "
            "under %s. Tell vLLM their weight version, after the last such call, and it shares "
            "with engines that were told the same",
            *(cause, self.namespace),
        )

    def move_to_version(self, version: str) -> None:
        """Move to the namespace of the engines whose weights have this version."""
        self._move(self._identity.with_version(version))
        logger.info("ecd: namespace %s", self.namespace)

    def _move(self, identity: Identity) -> None:
        self.moves += 1
        self._identity = identity
