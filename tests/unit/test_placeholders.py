"""The one door for placeholder metadata: what makes no sense does not pass, whoever says it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecd_proto.contract import MAX_METADATA_BYTES
from ecd_proto.placeholders import (
    MAX_NUMBERS,
    MAX_STORED_BYTES,
    STEP,
    Placeholder,
    is_claimed,
    may_be_said,
    may_be_together,
)
from support.examples import draws

GRID = {"image_grid_thw": [1, 16, 24]}
VIDEO = {"timestamps": [0.25, 0.75], "video_grid_thw": [2, 16, 24]}
FORMS = [
    ("image", GRID),
    ("video", VIDEO),
    ("video", {"video_grid_thw": [[1, 16, 24], [1, 8, 8]]}),
    ("video", {"video_image_sizes": [[640, 480], [640, 480]]}),
    ("image", {"image_sizes": [640, 480]}),
    ("audio", {"audio_num_tokens": [750]}),
    ("audio", {"audio_feature_lengths": [3000]}),
    ("image", {"of_a_later_model": [[1, 2], [3]]}),
]
NUMBERS = (
    *(1.0, 16.0, 1.6e1, True, False, 0, -0, -16, 1e99, float("nan"), float("inf"), 10**400),
    *("16", None, [], [1], [[1]], {}, 1 << 30),
)


def said(text: str) -> Placeholder | None:
    return Placeholder.unpack(b"\x01" + text.encode())


@pytest.mark.parametrize(("modality", "fields"), FORMS)
def test_what_models_say_passes_and_comes_back(modality: str, fields: dict) -> None:
    placeholder = Placeholder.of(modality, fields)
    assert placeholder is not None
    again = Placeholder.unpack(placeholder.packed)
    assert again == placeholder
    assert again.fields == fields
    assert again.modality == modality
    assert is_claimed(placeholder.packed)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("modality", "fields"), FORMS)
def test_a_number_is_an_integer_above_0(modality: str, fields: dict, number: object) -> None:
    for name, value in fields.items():
        if name == "timestamps":
            continue
        rows = value if isinstance(value[0], list) else [value]
        for row in rows:
            for place, before in enumerate(row):
                row[place] = number
                assert Placeholder.of(modality, fields) is None
                row[place] = before


@pytest.mark.parametrize(
    "seconds", [[-0.5], [True], ["1"], [[1.0]], [], [float("nan")], [1e99], [10**400], 1.0]
)
def test_timestamps_are_seconds(seconds: object) -> None:
    assert Placeholder.of("video", {**VIDEO, "timestamps": seconds}) is None


@pytest.mark.parametrize(
    "step",
    [[0.0], [-0.5], [True], ["1"], [[1.0]], [], [1.0, 1.0], [float("nan")], [1e99], [10**400], 1.0],
)
def test_a_step_between_frames_is_one_time_above_0(step: object) -> None:
    fields = {"video_grid_thw": [2, 16, 24], STEP: [0.5]}
    assert Placeholder.of("video", fields) is not None
    assert Placeholder.of("video", {**fields, STEP: [1]}) == Placeholder.of(
        "video", {**fields, STEP: [1.0]}
    )
    assert Placeholder.of("video", {**fields, STEP: step}) is None


@pytest.mark.parametrize(
    ("modality", "fields"),
    [
        *((modality, GRID) for modality in ("", "x" * 99, 'a"', None, 1, "\ud800")),
        *(("image", fields) for fields in ({}, [], None, {"": [1]}, {1: [1]}, {"a b": [1]})),
        ("image", {f"field_{number}": [1] for number in range(99)}),
        ("image", {"image_grid_thw": [1, 9000, 9000]}),
        ("image", {"image_grid_thw": [16, 24]}),
        ("image", {"image_grid_thw": [96, 2, 2]}),
        ("image", {"image_grid_thw": [1, 1, 16, 24]}),
        ("video", {"video_grid_thw": [[1, 16, 24], [1, 16]]}),
        ("video", {"video_grid_thw": [[1, 2048, 2048], [1, 2048, 2048]]}),
        ("image", {"image_sizes": [640]}),
        ("audio", {"audio_num_tokens": [750, 1]}),
        ("audio", {"audio_num_tokens": [1 << 30]}),
        ("image", {"of_a_later_model": [1] * (MAX_NUMBERS + 1)}),
        ("image", {"of_a_later_model": [60000] * MAX_NUMBERS}),
        ("image", {"of_a_later_model": (1, 2)}),
    ],
)
def test_another_form_does_not_pass(modality: object, fields: object) -> None:
    assert Placeholder.of(modality, fields) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "null", "x", "{" * 4000, '{"a":' * 700, "[" * 4000, "1" * 4096),
        *('{"image":[]}', '{"image":{}}', '{"image":{"image_grid_thw":"x"}}', "\x00"),
        '{"image":{"image_grid_thw":[1,16.0,24]}}',
        '{"image":{"image_grid_thw":[1,1.6e1,24]}}',
        '{"image":{"image_grid_thw":[1,-16,-24]}}',
        '{"image":{"image_grid_thw":[1,true,24]}}',
        '{"image":{"image_grid_thw":[1,NaN,24]}}',
        '{"image":{"image_grid_thw":[1,16,24]},"video":{"video_grid_thw":[1,16,24]}}',
        '{"image":{"image_grid_thw":[1,16,24]}}' + " " * MAX_METADATA_BYTES,
    ],
)
def test_metadata_of_an_entry_that_make_no_sense_are_none(text: str) -> None:
    assert said(text) is None
    assert Placeholder.unpack(text.encode()) is None


def test_one_item_is_one_whatever_the_spelling() -> None:
    spelt = '{ "video": {"video_grid_thw": [2, 16,24], "timestamps" : [0.25, 7.5e-1]}}'
    assert said(spelt) == Placeholder.of("video", VIDEO)
    assert said(spelt) != Placeholder.of("video", {**VIDEO, "timestamps": [0.25, 0.5]})
    assert said('{"image":{"image_grid_thw":[1,16,24]}}') != said(
        '{"image":{"image_grid_thw":[1,24,16]}}'
    )


@pytest.mark.parametrize("frames", [2, 200])
def test_an_entrys_metadata_are_compared_however_long_they_are(frames: int) -> None:
    """Long ones, as of a video with the times of its frames, are there as a digest."""
    times = [float(frame) for frame in range(frames)]
    placeholder, other = (
        Placeholder.of("video", {"timestamps": times, "video_grid_thw": grid})
        for grid in ([2, 16, 24], [2, 24, 16])
    )
    assert placeholder is not None
    assert other is not None
    assert len(placeholder.stored) <= MAX_STORED_BYTES
    assert Placeholder.unpack(placeholder.stored) == (placeholder if frames == 2 else None)
    assert placeholder.is_of(placeholder.stored)
    assert not any(placeholder.is_of(metadata) for metadata in (other.stored, b"", b"of a program"))


def test_a_proxy_may_write_whole_seconds() -> None:
    assert Placeholder.of("video", {**VIDEO, "timestamps": [0, 1]}) == Placeholder.of(
        "video", {**VIDEO, "timestamps": [0.0, 1.0]}
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


NUMBER = st.integers(-1, 40) | st.sampled_from((1, 2, 2.0, True, 1 << 16, 1 << 17))
FIELDS = st.dictionaries(
    st.sampled_from(("image_grid_thw", "video_grid_thw", "image_sizes", "audio_num_tokens", "x")),
    st.lists(NUMBER, max_size=4) | st.lists(st.lists(NUMBER, max_size=4), max_size=3) | JSON,
    max_size=2,
)


def test_only_bounded_integers_pass() -> None:
    passed = []

    @draws(1000)
    @given(st.dictionaries(st.sampled_from(("image", "video")), FIELDS | JSON, max_size=2) | JSON)
    def run(anything: object) -> None:
        placeholder = said(json.dumps(anything))
        if placeholder is not None:
            passed.append(placeholder)
            numbers = str(list(placeholder.fields.values())).translate(str.maketrans("[],", "   "))
            assert all(0 < int(number) <= 1 << 22 for number in numbers.split())

    run()
    assert passed


@draws(300)
@given(st.binary(max_size=64), st.sampled_from((b"", b"\x01", b"\x01{", b'\x01{"image":')))
def test_bytes_of_any_kind_are_read(rest: bytes, start: bytes) -> None:
    Placeholder.unpack(start + rest)


def test_a_grid_fits_its_embeddings() -> None:
    image = Placeholder.of("image", GRID)
    assert image is not None
    assert image.fits(2, 96)
    assert image.fits(2)
    assert image.fits(None, 96)
    assert not image.fits(2, 97)
    assert not image.fits(5)
    assert not image.fits(None, 1)
    assert not image.fits(None, 385)
    odd = Placeholder.of("image", {"image_grid_thw": [1, 1, 384]})  # no row of merged patches
    assert odd is not None
    assert not odd.fits(2)
    audio = Placeholder.of("audio", {"audio_num_tokens": [5]})
    assert audio is not None
    assert audio.fits(2, 7)


HUGE = 1 << 16


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("image_grid_thw", [1, 16, 24]),
        ("image_grid_thw", [[1, 16, 24], [1, 2, 2]]),
        ("video_grid_thw", [[4, 16, 24]]),
        ("audio_num_tokens", [5, 7]),
        ("audio_num_tokens", [[5], [7]]),
        ("audio_feature_lengths", [3000]),
        ("image_sizes", [[640, 480], [64, 48]]),
        ("video_image_sizes", [[[64, 48]] * 8]),
        ("timestamps", [[0.5, 1.5], [0.0]]),
    ],
)
def test_items_may_come_with_what_sizes_them(name: str, said: Any) -> None:
    assert may_be_said(name, said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("image_grid_thw", [[1, HUGE, HUGE]]),
        ("image_grid_thw", [[1, HUGE, HUGE], [1, -HUGE, HUGE]]),
        ("image_grid_thw", [[1, -(1 << 26), (1 << 38) - 1]]),
        ("image_grid_thw", [[1, 2048, 2048], [1, 2048, 2048]]),
        ("image_grid_thw", [[1.0, 16.0, 24.0]]),
        ("image_grid_thw", [[1, 16.5, 24]]),
        ("image_grid_thw", [[4, 8, 12]]),
        ("image_grid_thw", [[]]),
        ("image_grid_thw", [[1, 16, 24], 1]),
        ("image_grid_thw", []),
        ("image_grid_thw", None),
        ("audio_num_tokens", [60_000_000]),
        ("audio_num_tokens", [0]),
        ("audio_feature_lengths", [10**12]),
        ("image_sizes", [[10**9, 5]]),
        ("video_image_sizes", [[[64, 48]] * 10**6]),
        ("timestamps", [[-1.0]]),
        ("input_audio_features", [[[0.5] * 3]]),
        ("feature_attention_mask", [[1, 1, 0]]),
    ],
)
def test_nothing_else_is_said_of_items_without_media(name: str, said: Any) -> None:
    assert not may_be_said(name, said)


@pytest.mark.parametrize(
    ("modality", "fields", "most"),
    [
        ("image", {"image_grid_thw": [1, 1024, 1024]}, 4),
        ("image", {"image_grid_thw": [1, 2048, 2048]}, 1),
        ("video", {"timestamps": [1e6], "video_grid_thw": [[1, 1024, 1024], [1, 2, 2]]}, 3),
        ("audio", {"audio_num_tokens": [1 << 20]}, 4),
    ],
)
def test_items_of_one_request_are_bounded_together(modality: str, fields: Any, most: int) -> None:
    placeholder = Placeholder.of(modality, fields)
    assert placeholder is not None
    assert may_be_together([placeholder] * most)
    assert not may_be_together([placeholder] * (most + 1))
    [name] = fields.keys() - {"timestamps"}
    assert not may_be_said(name, [fields[name]] * (most + 1)), "nor may a client say so"


def test_sizes_in_pixels_are_not_added_up() -> None:
    placeholder = Placeholder.of("image", {"image_sizes": [4096, 4096]})
    assert placeholder is not None
    assert may_be_together([placeholder] * 64)
