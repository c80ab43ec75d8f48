"""What engines say of themselves, the one door for it, and which of them are apart by mistake.

Two engines share exactly when their namespaces are equal. An engine that finds nothing, because the
one that stores has another namespace, sees misses alone. So each says of which parts its namespace
is made, and whoever has the descriptions of both can name the parts that differ.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ecd_proto.contract import MAX_NAMESPACE_BYTES
from ecd_proto.v1 import cache_pb2 as pb

MAX_ENGINES = 64
"""Sessions of one daemon that may describe their engine; each rank of data parallelism has one."""
MAX_TEXT_BYTES = 1024
MAX_PARTS = 48
NAMESPACE = "ecd_namespace"
"""The part of a namespace that an operator chose."""
IN_PLACE_OF = {
    "ecd_code_version": frozenset(("vllm", "transformers", "code")),
    "ecd_weights_version": frozenset(("weights",)),
}
"""Further parts that an operator chooses, and those that an engine without them has instead."""
SHOWN = frozenset(("dtype", "quantization", "vllm", "transformers"))
"""Parts whose values are words for people, as they stand in the namespace; the rest are digests."""
_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_PART = re.compile(r"[a-z][a-z0-9_]{0,63}")
_VALUE = re.compile(r"[A-Za-z0-9._+-]{1,64}")
_ADVICE = {
    "model": "start both with one name, or one path, of the model",
    **dict.fromkeys(
        ("vllm", "transformers", "code"),
        "run one version of vLLM and transformers, or compare them and set ecd_code_version",
    ),
    "weights": "give both the same files of weights, or one ecd_weights_version",
}


@dataclass(frozen=True)
class Engine:
    """A checked description of one engine, as one of its sessions says it."""

    id: str
    """The same in each of the engine's sessions."""
    model: str
    namespace: str
    stores: bool
    loads: bool
    parts: Mapping[str, str]
    """What the namespace is made of: short words, or digests."""
    shares: str
    """The media that it shares, and why not the others."""
    pid: int = 0
    """Its client's process, as that says; 0: not said."""

    @classmethod
    def of(cls, message: pb.Engine, pid: int = 0) -> Engine | None:
        """The description that a message has; None if it has another form, or is too long."""
        texts = message.model, message.namespace, message.shares
        if not (
            is_id(message.id)
            and 0 < _nbytes(message.namespace, MAX_NAMESPACE_BYTES) <= MAX_NAMESPACE_BYTES
            and all(_nbytes(each, MAX_TEXT_BYTES) <= MAX_TEXT_BYTES for each in texts)
            and all(each.isprintable() for each in texts)
            and len(message.parts) <= MAX_PARTS
            and all(_PART.fullmatch(name) for name in message.parts)
            and all(map(is_value, message.parts.values()))
        ):
            return None
        return cls(
            message.id,
            message.model,
            message.namespace,
            message.stores,
            message.loads,
            dict(message.parts),
            message.shares,
            pid,
        )

    @property
    def message(self) -> pb.Engine:
        return pb.Engine(**{name: said for name, said in vars(self).items() if name != "pid"})

    @property
    def status(self) -> pb.EngineStatus:
        return pb.EngineStatus(engine=self.message, pid=self.pid)

    def is_of_model_of(self, other: Engine) -> bool:
        """Whether both run one model, by its users' name for it, its name here, or its weights."""
        return self.model == other.model or any(
            name in self.parts and self.parts[name] == other.parts.get(name)
            for name in ("model", "weights")
        )

    def may_be_apart_from(self, other: Engine) -> bool:
        """Whether this engine would load what the other stores, were their namespaces equal.

        Where an operator chose both namespaces they are meant to differ.
        """
        return (
            self.loads
            and other.stores
            and self.id != other.id
            and self.namespace != other.namespace
            and not (NAMESPACE in self.parts and NAMESPACE in other.parts)
            and self.is_of_model_of(other)
        )

    def differs_from(self, other: Engine) -> list[str]:
        """The names of the parts that make the difference between two namespaces."""
        names = [
            name
            for name in sorted(self.parts.keys() | other.parts.keys())
            if self.parts.get(name) != other.parts.get(name)
        ]
        if NAMESPACE in names:  # it has the place of all that is not chosen, too
            return [NAMESPACE]
        for chosen in IN_PLACE_OF.keys() & set(names):
            names = [name for name in names if name not in IN_PLACE_OF[chosen]]
        return names


def _nbytes(text: str, most: int) -> int:
    """The text's length in bytes; of one that is too long anyway, in characters."""
    return len(text) if len(text) > most else len(text.encode())


def is_id(text: str) -> bool:
    """Whether the text may be an engine's id."""
    return bool(_ID.fullmatch(text))


def is_value(text: str) -> bool:
    """Whether the text may be the value of a part."""
    return bool(_VALUE.fullmatch(text))


def lonely(engines: Sequence[Engine]) -> list[Engine]:
    """The engines that load, and in whose namespaces no other engine stores."""
    storing: defaultdict[str, set[str]] = defaultdict(set)
    for engine in engines:
        if engine.stores:
            storing[engine.namespace].add(engine.id)
    return [each for each in engines if each.loads and not storing[each.namespace] - {each.id}]


def nearest(engine: Engine, others: Iterable[Engine]) -> Engine | None:
    """The one of the others that the engine may be apart from and differs least from."""
    apart = filter(engine.may_be_apart_from, others)
    return min(apart, key=lambda other: len(engine.differs_from(other)), default=None)


def difference(engine: Engine, other: Engine) -> str:
    """The parts that differ, in words: with both values where these are words for people."""
    named = []
    for name in engine.differs_from(other):
        mine, theirs = engine.parts.get(name), other.parts.get(name)
        is_shown = name in SHOWN and mine is not None and theirs is not None
        named.append(f"{name} ({mine} and {theirs})" if is_shown else name)
    return ", ".join(named) or "what they do not say: compare the namespaces in their logs"


def advice(engine: Engine, other: Engine) -> str:
    """What makes the two engines share."""
    names = engine.differs_from(other)
    flags = [name for name in names if name not in _ADVICE]
    said = [_ADVICE[name] for name in names if name in _ADVICE]
    if flags:
        said.insert(0, f"start both with the same {', '.join(flags)}")
    return "; ".join((*dict.fromkeys(said), "or set an ecd_namespace for each to keep them apart"))
