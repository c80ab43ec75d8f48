"""The connector's settings, as an engine is started with them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ecd_client.arguments import text
from ecd_client.errors import InvalidArgument
from ecd_client.session.channel import CALL_TIMEOUT_S, resolve
from ecd_client.vllm.base import omni
from ecd_client.vllm.base.names import is_alone
from ecd_proto.contract import MAX_MM_HASH_BYTES, MAX_NAMESPACE_BYTES, seconds_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENCODE, FAIL = "encode", "fail"
LOAD_TIMEOUT_S = {ENCODE: 2.0, FAIL: 30.0}
MAX_LOAD_TIMEOUT_S = 3600.0

TRUST, REFUSE = "trust", "refuse"
KEYS = (
    *("ecd_address", "ecd_namespace", "ecd_uuids"),
    *("ecd_weights_version", "ecd_weights_run", "ecd_code_version", "ecd_harmless_calls"),
    *("ecd_load_timeout_s", "ecd_on_unavailable", "ecd_announce_node"),
    *("ecd_device_views", "ecd_modalities"),
)
MODALITIES = "audio", "image", "video", "vision_chunk"
"""The modalities of vLLM's models; the last is Kimi-K2.5's one medium, of pictures and videos."""


@dataclass(frozen=True)
class Settings:
    """The checked values of `ec_connector_extra_config`."""

    address: str
    namespace: str | None
    weights_version: str | None
    load_timeout_s: float
    on_unavailable: str
    private_adapters: bool
    trusts_uuids: bool
    announces_node: bool
    device_views: bool
    weights_run: str | None = None
    code_version: str | None = None
    harmless_calls: frozenset[str] = frozenset()
    modalities: frozenset[str] | None = None
    """The shared modalities; None: all."""

    @property
    def call_timeout_s(self) -> float:
        """Seconds that a call to the daemon may take: no longer than a request is held for one."""
        return min(CALL_TIMEOUT_S, self.load_timeout_s)

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Settings:
        """Check the values. Raises InvalidArgument, which names the key and its allowed values.

        An engine of this role and layout may not answer at all; then it says what to change.
        """
        transfer_config = vllm_config.ec_transfer_config
        assert transfer_config is not None
        if transfer_config.is_encode_only:
            _refuse_unanswering(vllm_config)
        extra = dict(transfer_config.ec_connector_extra_config or {})
        address = extra.pop("ecd_address", None)
        namespace = extra.pop("ecd_namespace", None)
        on_unavailable = extra.pop("ecd_on_unavailable", ENCODE)
        if on_unavailable not in tuple(LOAD_TIMEOUT_S):
            raise InvalidArgument(
                f"ecd_on_unavailable is {on_unavailable!r}; it must be {ENCODE!r}, or {FAIL!r} for "
                "an engine that has no encoder"
            )
        if on_unavailable == FAIL and omni.stage_of(vllm_config.model_config) is not None:
            raise InvalidArgument(
                "ecd_on_unavailable is 'fail', and vLLM-Omni answers no request that a connector "
                f"fails; let it be {ENCODE!r}"
            )
        load_timeout_s = _seconds(extra.pop("ecd_load_timeout_s", LOAD_TIMEOUT_S[on_unavailable]))
        if namespace is not None and not (
            isinstance(namespace, str)
            and 0 < len(text(namespace, "ecd_namespace").encode()) <= MAX_NAMESPACE_BYTES
            and namespace.isprintable()
        ):
            raise InvalidArgument(
                f"ecd_namespace must be a printable string of 1 to {MAX_NAMESPACE_BYTES} bytes"
            )
        versions = {}
        for key in ("ecd_weights_version", "ecd_weights_run", "ecd_code_version"):
            versions[key] = value = extra.pop(key, None)
            if value is not None and not (isinstance(value, str) and text(value, key)):
                raise InvalidArgument(f"{key} is {value!r}; it must be a string, and not empty")
        harmless = extra.pop("ecd_harmless_calls", [])
        if not isinstance(harmless, list) or not all(isinstance(n, str) and n for n in harmless):
            raise InvalidArgument(
                f"ecd_harmless_calls is {harmless!r}; it must be a list of the names of calls"
            )
        uuids = extra.pop("ecd_uuids", TRUST)
        if uuids not in (TRUST, REFUSE):
            raise InvalidArgument(f"ecd_uuids is {uuids!r}; it must be {TRUST!r} or {REFUSE!r}")
        announces_node = extra.pop("ecd_announce_node", True)
        if not isinstance(announces_node, bool):
            raise InvalidArgument(
                f"ecd_announce_node is {announces_node!r}; it must be true or false"
            )
        device_views = extra.pop("ecd_device_views", False)
        if not isinstance(device_views, bool):
            raise InvalidArgument(f"ecd_device_views is {device_views!r}; it must be true or false")
        modalities = extra.pop("ecd_modalities", None)
        if modalities is not None and not (
            isinstance(modalities, list) and all(each in MODALITIES for each in modalities)
        ):
            raise InvalidArgument(
                f"ecd_modalities is {modalities!r}; it must be a list of some of "
                f"{', '.join(MODALITIES)}"
            )
        if extra:
            raise InvalidArgument(
                f"unknown in ec_connector_extra_config: {', '.join(map(str, extra))}; known are "
                f"{', '.join(KEYS)}"
            )
        lora = vllm_config.lora_config
        return cls(
            address=resolve(address),
            namespace=namespace,
            weights_version=versions["ecd_weights_version"],
            weights_run=versions["ecd_weights_run"],
            code_version=versions["ecd_code_version"],
            harmless_calls=frozenset(harmless),
            load_timeout_s=load_timeout_s,
            on_unavailable=on_unavailable,
            private_adapters=bool(namespace is None and lora and lora.enable_tower_connector_lora),
            trusts_uuids=uuids == TRUST,
            announces_node=announces_node,
            device_views=device_views,
            modalities=None if modalities is None else frozenset(modalities),
        )

    def keeps_private(self, modality: str, *, is_streaming: bool) -> bool:
        """Whether media of this kind stay with this engine: those of a stream never come again."""
        if self.modalities is not None and modality not in self.modalities:
            return True
        return is_streaming and modality == "audio"

    def shares(self, identifier: str) -> bool:
        """Whether the identifier means the same item on every engine of the namespace.

        The items of a vision-tower adapter have its name in theirs, and another engine may give
        that name to other weights. They are shared only in a namespace that an operator chose.
        """
        try:
            nbytes = len(identifier.encode())
        except UnicodeEncodeError:  # JSON has halves of characters, which no message can hold
            return False
        if is_alone(identifier) or (self.private_adapters and ":" in identifier):
            return False
        return 0 < nbytes <= MAX_MM_HASH_BYTES


def _seconds(value: Any) -> float:
    """The load timeout: a number, as the key's name says the unit, or a duration."""
    seconds = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            seconds = seconds_of(value)
    if type(seconds) not in (int, float) or not 0 < seconds <= MAX_LOAD_TIMEOUT_S:
        raise InvalidArgument(
            f"ecd_load_timeout_s is {value!r}; it must be seconds, or a duration such as 2m, "
            "above 0 and at most 1h"
        )
    return float(seconds)


def _refuse_unanswering(vllm_config: VllmConfig) -> None:
    """Raise InvalidArgument where vLLM starts an engine that only encodes, and ends with a request.

    Such an engine runs no language model: nothing comes out of it that could be pooled, and
    nothing goes to the next stage, which waits for it. vLLM-Omni's scheduler does not
    end its requests.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if vllm_config.model_config.runner_type == "pooling":
        flag = "the pooling runner"
    elif stages > 1:
        flag = f"--pipeline-parallel-size {stages}"
    elif omni.stage_of(vllm_config.model_config) is not None:
        flag = "vLLM-Omni"
    else:
        return
    raise InvalidArgument(
        f"ec_role is 'ec_producer', and vLLM answers no request of such an engine with {flag}; "
        "let ec_role be 'ec_both'"
    )
