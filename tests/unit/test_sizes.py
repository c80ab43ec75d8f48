"""How much work a medium is for an encoder, and for how long it is waited."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecd_client.vllm.middleware.hop.sizes import (
    MAX_SECONDS,
    UNKNOWN_TOKENS,
    Frames,
    Size,
    of_bytes,
    of_sound,
    of_video,
    tokens_of,
)
from ecd_client.vllm.middleware.media import AUDIO, IMAGE, VIDEO
from support.examples import draws

CONTEXT = 32768
HUGE = 1 << 62


@draws(100)
@given(st.integers(1, 9999), st.integers(1, 9999), st.integers(0, 99), st.integers(0, 99))
def test_a_larger_picture_has_no_fewer_tokens(w: int, h: int, wider: int, higher: int) -> None:
    assert 0 < tokens_of(w, h) <= tokens_of(w + wider, h + higher)


SIDES, COUNTS, BYTES = st.integers(1, 9999), st.integers(1, 99999), st.integers(1, 1 << 28)


@draws(200)
@given(COUNTS, COUNTS, SIDES, SIDES, BYTES, COUNTS, BYTES)
def test_a_longer_video_has_no_less_of_anything(
    count: int, taken: int, width: int, height: int, nbytes: int, more: int, more_bytes: int
) -> None:
    short = of_video(Frames(count, taken, width, height, 30.0), nbytes, CONTEXT)
    long = of_video(
        Frames(count + more, taken + more, width, height, 30.0), nbytes + more_bytes, CONTEXT
    )
    assert 0 < short.tokens <= long.tokens <= CONTEXT
    assert 0.0 < short.seconds <= long.seconds <= MAX_SECONDS


def test_a_minute_of_video_has_as_long_as_a_slow_encoder_needs() -> None:
    minute = of_video(Frames(1800, 120, 1280, 720, 30.0), 15 << 20, 1 << 20)
    assert minute.tokens == 60 * UNKNOWN_TOKENS, "frames come in pairs, and large ones shrink"
    assert 35.0 < minute.seconds < 40.0
    hour = of_video(Frames(108_000, 768, 1920, 1080, 30.0), 250 << 20, CONTEXT)
    assert hour == Size(CONTEXT, MAX_SECONDS)


def test_a_short_clip_has_little_more_than_a_picture() -> None:
    assert of_video(Frames(40, 40, 56, 56, 2.0), 20_000, CONTEXT).seconds < 0.1
    assert of_sound(3.0, 48_000, CONTEXT).seconds < 0.1


@pytest.mark.parametrize("nbytes", [1, 1000])
def test_a_header_says_no_more_than_its_bytes_can_be(nbytes: int) -> None:
    said = Frames(HUGE, 768, 65_535, 65_535, 30.0)
    most = of_video(said, nbytes, CONTEXT)
    assert most.seconds <= MAX_SECONDS
    assert of_video(Frames(HUGE, 4, 56, 56, 30.0), nbytes, CONTEXT).seconds < 0.1
    assert of_sound(HUGE, nbytes, CONTEXT).seconds < 0.1


def test_what_nobody_has_opened_is_judged_by_its_bytes() -> None:
    assert of_bytes(IMAGE, 1 << 20, CONTEXT) == Size(UNKNOWN_TOKENS)
    for kind in (VIDEO, AUDIO):
        small, large = of_bytes(kind, 1000, CONTEXT), of_bytes(kind, 1 << 20, CONTEXT)
        assert 0 < small.tokens < large.tokens <= CONTEXT
        assert 0.0 < small.seconds < large.seconds


def test_a_videos_rate_is_that_of_the_frames_which_are_taken() -> None:
    assert Frames(300, 20, 56, 56, 30.0).rate_taken == 2.0
    assert Frames(305, 20, 56, 56, 30.0).rate_taken != 2.0
