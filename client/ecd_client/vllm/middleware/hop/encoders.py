"""The encoders that an engine may send media to: which one is next, and which are left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ecd_client.errors import InvalidArgument
from ecd_proto.backoff import Backoff
from ecd_proto.encoders import checked_url

VARIABLE = "ECD_ENCODERS"
DIRECTORY = "directory"
"""The value of the variable that stands for all encoders which register themselves."""
KEPT_S = 3.0
"""How long an encoder is kept that is not listed: a daemon that restarts knows none at first."""
RESTS = Backoff(1.0, 60.0)
"""First and longest time for which an encoder is left out after it failed."""


def urls_in(said: str) -> list[str]:
    """The URLs in ECD_ENCODERS, each once, without a slash at the end. Raises InvalidArgument."""
    return list(dict.fromkeys(_url(url.strip()) for url in said.split(",") if url.strip()))


def _url(said: str) -> str:
    try:
        return checked_url(said)
    except ValueError:
        shown = said.rpartition("@")[2].partition("?")[0]  # without a password or a key
        raise InvalidArgument(
            f"{VARIABLE} has {shown!r}; it must be URLs such as http://encoder-1:8000, with commas "
            "between them and without user, query and fragment"
        ) from None


@dataclass(eq=False)
class Encoder:
    """An engine that encodes for others, and its state.

    `rest_s` is the length of its last rest; it is 0 once a call has succeeded. `served_s` is when
    it has served a medium last.
    """

    url: str
    active_tokens: int = 0
    rest_s: float = 0.0
    served_s: float = 0.0
    _rests_until_s: float = 0.0
    _hurried_until_s: float = 0.0
    _unlike_until_s: dict[str, float] = field(default_factory=dict)
    _last_call: int = 0
    _listed_s: float = 0.0

    def is_ready(self, now_s: float) -> bool:
        """Whether it is not left out. After a rest it gets one medium, until it has served it."""
        return now_s >= self._rests_until_s and not (self.rest_s and self.active_tokens)

    def has_served(self, since_s: float) -> bool:
        """Whether it has served a medium since then."""
        return self.served_s > since_s

    def is_hurried(self, now_s: float) -> bool:
        """Whether it has no longer for a medium than for a picture: it was late with a long one."""
        return now_s < self._hurried_until_s

    def is_unlike(self, decoding: str | None, now_s: float) -> bool:
        """Whether it has said of late that it decodes otherwise than with this digest."""
        return decoding is not None and now_s < self._unlike_until_s.get(decoding, 0.0)


class EncoderPool:
    """Chooses the encoder with the fewest active tokens; time is an argument."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._encoders = [Encoder(url) for url in urls]
        self._calls = 0

    def use(self, urls: Collection[str], now_s: float, kept_s: float = 0.0) -> list[Encoder]:
        """Choose among these from now on, and among those listed in the last `kept_s` seconds.

        Return the others, which were listed before.
        """
        known = {encoder.url: encoder for encoder in self._encoders}
        for url in urls:
            known.setdefault(url, Encoder(url))._listed_s = now_s
        left = [each for each in known.values() if each._listed_s + kept_s < now_s]
        self._encoders = [each for each in known.values() if each not in left]
        return left

    def are_any(self, now_s: float, *, in_need: bool = False) -> bool:
        """Whether one is not left out; `in_need` does not ask for that."""
        return any(in_need or encoder.is_ready(now_s) for encoder in self._encoders)

    def serve(self, since_s: float) -> bool:
        """Whether one has served a medium since then."""
        return any(encoder.has_served(since_s) for encoder in self._encoders)

    def has(self, url: str) -> bool:
        return any(encoder.url == url for encoder in self._encoders)

    def choose(
        self,
        tokens: int,
        tried: Collection[Encoder],
        now_s: float,
        *,
        decoding: str | None = None,
        in_need: bool = False,
    ) -> Encoder | None:
        """Give the tokens to an encoder that was not tried, until they are released.

        Of equals the one that was called longest ago. None: all were tried, decode otherwise or are
        left out; `in_need` takes the last, too.
        """
        left = [
            encoder
            for encoder in self._encoders
            if encoder not in tried and not encoder.is_unlike(decoding, now_s)
        ]
        ready = [encoder for encoder in left if encoder.is_ready(now_s)] or (
            left if in_need else []
        )
        if not ready:
            return None
        chosen = min(ready, key=lambda encoder: (encoder.active_tokens, encoder._last_call))
        self._calls += 1
        chosen._last_call = self._calls
        chosen.active_tokens += tokens
        return chosen

    def release(self, encoder: Encoder, tokens: int) -> None:
        encoder.active_tokens -= tokens

    def note_served(self, encoder: Encoder, now_s: float, *, is_long: bool = False) -> None:
        """`is_long`: the medium has a longer time than a picture."""
        encoder.rest_s = encoder._rests_until_s = 0.0
        encoder.served_s = now_s
        if is_long:
            encoder._hurried_until_s = 0.0

    def note_unlike(self, encoder: Encoder, decoding: str | None, now_s: float) -> None:
        """Leave the encoder out for a while where media are decoded as this digest says."""
        if decoding is not None:
            encoder._unlike_until_s[decoding] = now_s + RESTS.longest_s

    def note_late(self, encoder: Encoder, now_s: float) -> None:
        """Give it no longer than for a picture for a while: it had the time that a medium needs."""
        encoder._hurried_until_s = now_s + RESTS.longest_s

    def note_failed(self, encoder: Encoder, began_s: float, now_s: float) -> bool:
        """Leave the encoder out for a while, each time for longer.

        False: the call began before the last rest ended, so that it says nothing new.
        """
        if began_s < encoder._rests_until_s:
            return False
        encoder.rest_s = RESTS.after(encoder.rest_s)
        encoder._rests_until_s = now_s + encoder.rest_s
        return True
