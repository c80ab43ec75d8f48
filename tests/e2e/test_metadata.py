"""What is announced of an item is all that a consumer needs of it, and what its server takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.engines import NEXT, VERSIONS, require, result_of

pytestmark = pytest.mark.timeout(600)
NEWEST = pytest.mark.parametrize("version", [VERSIONS[0], NEXT], indirect=True, scope="session")


@NEWEST
def test_what_is_announced_does_for_a_consumer_and_its_server(version: str, tmp_path: Path) -> None:
    said, taken, more, unclassified = result_of(version, "metadata_seams.py", str(tmp_path))
    picture, video = {"image_grid_thw": [1, 6, 8]}, {"video_grid_thw": [4, 4, 6]}
    slow, fast = ({**video, "second_per_grid_ts": [step_s]} for step_s in (2.0, 0.25))
    assert said == {
        "qwen2_5_vl: a picture": picture,
        "qwen2_5_vl: a video, 1 frames a second": [{}, slow],  # its positions need the rate
        "qwen2_5_vl: a video, 2 frames a second": video,
        "qwen2_5_vl: a video, 8 frames a second": [{}, fast],
        "a field that nobody knows": {},
        "frames alone": video,
        "two grids": {},
        "beside a video with its sound": {},
        "qwen3_vl: a picture": picture,
        "qwen3_vl: a video, 1 frames a second": {**video, "timestamps": [0.5, 2.5, 4.5, 6.5]},
        "qwen3_vl: a video, 2 frames a second": {**video, "timestamps": [0.25, 1.25, 2.25, 3.25]},
        "qwen3_vl: a video, 8 frames a second": {
            **video,
            "timestamps": [0.0625, 0.3125, 0.5625, 0.8125],
        },
        "qwen2_audio: a sound": {"audio_num_tokens": [25]},
        "qwen2_5_omni: a video, 1 frame a second": [{}, slow],
        "minicpmv4_6: a picture": {},
        "minicpmv4_6: a video": {},
        "minicpmv4_6: announces pictures": False,
    }
    assert not any(taken.values()), taken
    assert len(taken) == 7
    assert all("may not come with such" in refusal for refusal in more.values()), more
    assert len(more) == 11
    assert not unclassified, "say in ENCODERS_OWN or READ who reads them"


@NEWEST
def test_a_picture_that_nobody_has_read_has_the_name_that_the_server_gives_it(
    version: str, tmp_path: Path
) -> None:
    """In one process, which takes long to start: vLLM's limits of a request, and what is held."""
    named, unread, limits, let_go = result_of(version, "picture_seams.py", str(tmp_path))
    assert all(named.values()), named
    assert len(named) == 10
    assert unread == ["RGB, turned", "RGB, as WebP"]
    takes = {"1": [True, True, True]}
    if version == NEXT:  # which has limits: a request that it would refuse passes as it came
        takes["2"] = [False, False, True]
    else:
        takes["2"] = [True, True, True]
    assert limits == dict.fromkeys(("decoded RGB", "decoded RGBA", "downloaded"), takes)
    assert let_go == ["b", "c", "d"], "who has most held loses the oldest"


@NEWEST
def test_a_video_or_a_sound_has_the_name_of_its_bytes_in_the_engine(
    version: str, tmp_path: Path
) -> None:
    require("models")  # which decode sounds
    said = result_of(version, "media_seams.py", str(tmp_path))
    none, named = "--limit-mm-per-prompt allows none", "--media-io-kwargs change their names"
    nothing = {"video": "nothing that the model takes can stand in their place"}
    some = {} if version == VERSIONS[0] else nothing
    looked_up = [kind for kind in ("image", "video", "audio") if kind not in some]
    assert said.pop("kinds") == [
        [looked_up, [], some],
        [looked_up[1:], [], {"image": none, **some}],
        [[], [], {"image": none, "video": named, "audio": named}],
    ]
    kinds = ["a video", "frames", "a sound", "a sound in JSON"]
    for how in ("plain", "--media-io-kwargs"):
        assert said.pop(f"named as vLLM does: {how}") == dict.fromkeys(kinds, True)
    assert said.pop("stay") == [True] * 6
    assert said.pop("outlines of one") == [True, None]
    assert said.pop("outlines of two") is None
    assert said.pop("outlines kept") == [["space", "one"]]
    assert said.pop("outlines of none") == [None, False]
    assert said.pop("no outlines of") == ["image"]
    assert said.pop("one item without") == []
    assert all(said.pop(f"bytes: {kind}") for kind in kinds)
    assert said == {
        "names are stable": True,
        "names differ": True,
        "another OpenCV": ["a video", "frames"],
        "another libsndfile": ["a sound", "a sound in JSON"],
        "other pixels of frames": ["frames"],
        "another loader": ["a video", "frames"],
        "the same bytes in one piece": ["frames"],
        "videos with times": [False, False, True, False, True],
        "headers of none": [None, None, None],
        "tokens of sounds": [26, 101],
        "no sound": None,
        "frames one by one": True,
        "a sound beyond the limit": False,
        "a file within": True,
        "a file outside": False,
        "fetched": [True, 1, True, True],
        "beyond a request's bytes": [False, True],
        "beyond all bytes": [True, False, True, 1],
        "bytes that stay held": 0,
        "beyond the bytes alone": [False, False],
        "an encoder's answer": [[0], {"audio_feature_lengths": [50]}],
    }
