"""The matrix: which architectures are asked which rows. Families add theirs by `architecture`.

A maker writes a tiny checkpoint into a `Checkpoint`. This is an architecture in ten lines:

    @architecture("GLM", "GlmAsrForConditionalGeneration", "audio")
    def glm_asr(to: Checkpoint) -> None:
        from transformers import GlmAsrConfig, GlmAsrProcessor, WhisperFeatureExtractor

        tokens = to.tokens(audio_token="<|pad|>")
        to.config(GlmAsrConfig(audio_config=..., text_config=..., audio_token_id=to.id("<|pad|>")))
        extractor = WhisperFeatureExtractor(feature_size=128)
        GlmAsrProcessor(extractor, tokens, audio_token="<|pad|>").save_pretrained(to.directory)

Nothing here needs vLLM or transformers: makers import them when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2e.models.checkpoint import Checkpoint

ROWS = {
    "text alone": "",
    "an image": "A",
    "two images": "A B",
    "one image twice": "A A",
    "images in another order": "B A",
    "an image of another size": "W",
    "a video at 1 frame a second": "1",
    "a video at 2 frames a second": "2",
    "a video at 10 frames a second": "8",
    "two videos": "2 V",
    "videos in another order": "V 2",
    "an image and a video": "A 2",
    "a video and an image": "2 A",
    "a short sound": "S",
    "a long sound": "L",
    "two sounds": "S L",
    "sounds in another order": "L S",
    "an image and a sound": "A S",
    "a sound and a video": "S 2",
}
"""Rows, and their items by the names in MEDIA."""
MEDIA = {
    "A": ("image", (84, 56), 1),
    "B": ("image", (84, 56), 2),
    "W": ("image", (112, 56), 3),
    "1": ("video", 4, 1.0, 4),
    "2": ("video", 4, 2.0, 4),
    "8": ("video", 4, 10.0, 4),
    "V": ("video", 8, 2.0, 5),
    "S": ("audio", 0.5, 6),
    "L": ("audio", 2.0, 7),
}
"""Images have a size, videos frames and frames a second, sounds seconds; then comes a seed."""
MOST = 2
"""Items of a medium in a row."""
QUICK = (
    *("text alone", "one image twice", "images in another order", "a video at 10 frames a second"),
    *("a video at 2 frames a second", "an image and a video", "sounds in another order"),
)
"""The rows of `make test`."""
CHAT, CHAT_AGAIN = "in a chat", "in a chat again"
"""What answers in chats have behind the name of their row."""


def kinds_of(items: list[str]) -> set[str]:
    return {MEDIA[item][0] for item in items}


@dataclass(frozen=True)
class Architecture:
    """What is tried of an architecture, and how."""

    family: str
    kind: str
    """The class that vLLM has for it, as a checkpoint's `architectures` names it."""
    name: str
    media: tuple[str, ...]
    make: Callable[[Checkpoint], None]
    quick: bool = False
    """Whether `make test` tries it; `make night` tries all."""
    by_metadata: str = ""
    """The media whose metadata the encoder's answer has, so that these do in their place."""
    by_outline: str = ""
    """The media whose outlines, which vLLM's server makes, do in their place."""
    most: Mapping[str, int] = field(default_factory=dict)
    """Items that a prompt may have, for media of which vLLM takes fewer than MOST."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Rows that vLLM cannot answer on a CPU, and its error."""
    encoder: str = "ec_producer"
    """The role of the engine that encodes; vLLM cannot run some models as encoders alone."""
    fails: tuple[str, str] | None = None
    """What vLLM's error says where no engine answers on a CPU, and why, for the reader."""
    needs_more: bool = False
    """Whether it needs packages that vLLM does not bring, which are in .venvs/models."""
    rate_by_option: bool = False
    """Whether a video's frames a second are an option of the processor, not the video's own."""
    pools: str = ""
    """vLLM's task of a pooling model, which answers with vectors: "embed" or "token_embed"."""
    tolerance: float = 0.002
    """By how much log-probabilities may differ; more where vLLM's own depend on what is encoded
    beside an item, so that those of a stored one do."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine."""
    remark: str = ""
    """What a reader has to know besides."""

    def rows(self, names: Iterator[str] | tuple[str, ...] = tuple(ROWS)) -> dict[str, list[str]]:
        """The items of each of these rows that the architecture can have."""
        made = {name: ROWS[name].split() for name in names}
        return {name: items for name, items in made.items() if self._can_have(items)}

    def _can_have(self, items: list[str]) -> bool:
        kinds = [MEDIA[item][0] for item in items]
        limits = self.limits()
        return all(kinds.count(kind) <= limits.get(kind, 0) for kind in kinds)

    def chats(self, names: tuple[str, ...] = tuple(ROWS)) -> dict[str, list[str]]:
        """Those of these rows that are asked in chats, too: those with videos or sounds."""
        rows = self.rows(names).items()
        return {name: items for name, items in rows if kinds_of(items) - {"image"}}

    def leaves_out(self, items: list[str]) -> bool:
        """Whether the middleware leaves these items out of a request, once ecd has them."""
        return kinds_of(items) <= {*self.by_outline.split(), *self.by_metadata.split()}

    def by_middleware(self) -> list[str]:
        """The media that the middleware leaves out of a row that is asked in a chat."""
        rows = filter(self.leaves_out, self.chats().values())
        left_out = set().union(*map(kinds_of, rows))
        return [kind for kind in self.media if kind in left_out]

    def limits(self) -> dict[str, int]:
        """How many items of each medium a prompt has at most."""
        return dict.fromkeys(self.media, MOST) | dict(self.most)


ARCHITECTURES: dict[str, Architecture] = {}


def architecture(family: str, kind: str, media: str, **more: Any) -> Callable[[Callable], Callable]:
    """Add the architecture that the function makes, which is called as the function is."""

    def add(make: Callable[[Checkpoint], None]) -> Callable[[Checkpoint], None]:
        name = make.__name__
        assert name not in ARCHITECTURES, f"there are two {name}"
        ARCHITECTURES[name] = Architecture(family, kind, name, tuple(media.split()), make, **more)
        return make

    return add
