"""How much work a medium is for an encoder, as far as its size is known from its header.

The tokens are estimates, which balance encoders. A picture's time is the setting's. Videos and
sounds have more: what an idle encoder that is slow takes to get, decode and encode them.
"""

from __future__ import annotations

from typing import NamedTuple

from ecd_client.vllm.middleware.media import AUDIO, IMAGE, VIDEO

UNKNOWN_TOKENS = 1024
"""Tokens assumed for a picture that is not opened here, because the client has named it."""
MAX_SECONDS = 600.0
"""Longest time for one medium: whoever sends it chooses what its header says."""
_SIDE = 28
"""Pixels of a token's side, as Qwen2-VL has it. Other models' tokens grow with the picture, too."""
_FRAMES_OF_TOKEN, _MAX_FRAME_TOKENS = 2, 1024
"""Models take frames in pairs, and shrink large ones."""
_TOKENS_OF_SECOND = 25
"""Tokens of a second of sound, as Qwen2-Audio has it."""
_BYTES_OF_TOKEN = {VIDEO: 256, AUDIO: 640}
"""Where nothing but the bytes are known: those of 2 Mbit/s, or of 128 kbit/s."""
_MIN_SOUND_BYTES_PER_S, _MIN_FRAME_BYTES = 500, 8
"""Fewest bytes that any format needs; some headers say more than there is."""
_BYTES_PER_S, _PIXELS_PER_S, _TOKENS_PER_S = 64 << 20, 250e6, 2048
"""Assumed of a slow encoder, for each second: bytes received, pixels decoded, tokens encoded."""


class Size(NamedTuple):
    """A medium's tokens, and the seconds for which it is waited longer than for a picture.

    `has_times`: its metadata do not say all of it.
    """

    tokens: int
    seconds: float = 0.0
    has_times: bool = False


class Frames(NamedTuple):
    """A video as its header has it: all of its frames, and how many of them vLLM takes."""

    total: int
    taken: int
    width: int
    height: int
    rate: float

    @property
    def rate_taken(self) -> float:
        """How many are taken of a second: transformers' `VideoMetadata.sampled_fps`."""
        return self.taken / self.total * self.rate


def tokens_of(width: int, height: int) -> int:
    """An estimate of a picture's tokens by its size in pixels."""
    return -(-width // _SIDE) * -(-height // _SIDE)


def of_video(frames: Frames, nbytes: int, most: int) -> Size:
    """The size of a video of so many bytes, that has at most `most` tokens."""
    of_frame = min(tokens_of(frames.width, frames.height), _MAX_FRAME_TOKENS)
    tokens = -(-frames.taken // _FRAMES_OF_TOKEN) * of_frame
    pixels = min(frames.total, nbytes // _MIN_FRAME_BYTES) * frames.width * frames.height
    return _size(min(tokens, most), nbytes, pixels / _PIXELS_PER_S)


def of_sound(seconds: float, nbytes: int, most: int) -> Size:
    """The size of a sound that lasts so long."""
    seconds = min(seconds, nbytes / _MIN_SOUND_BYTES_PER_S)
    return _size(min(int(seconds * _TOKENS_OF_SECOND) + 1, most), nbytes)


def of_bytes(kind: str, nbytes: int, most: int) -> Size:
    """The size of a medium whose header is not known, or not read."""
    if kind == IMAGE:
        return Size(UNKNOWN_TOKENS)
    return _size(min(nbytes // _BYTES_OF_TOKEN[kind] + 1, most), nbytes)


def _size(tokens: int, nbytes: int, decode_s: float = 0.0) -> Size:
    seconds = nbytes / _BYTES_PER_S + decode_s + tokens / _TOKENS_PER_S
    return Size(tokens, min(seconds, MAX_SECONDS))
