"""What the middleware makes of a request's media: parts with names, with bytes, or as they came."""

from __future__ import annotations

import json
from base64 import b64encode
from types import SimpleNamespace
from typing import Any

import pytest

from ecd_client.vllm.base.hints import names_items
from ecd_client.vllm.middleware.media import FoundMedium, Look, Medium, MissingMedium, Promise, Raw
from ecd_proto.contract import Hint
from ecd_proto.placeholders import Placeholder

DATA = "data:video/mp4;base64,AAAA"
GRID = {"video_grid_thw": [4, 4, 6]}


def request_of(*parts: dict[str, Any], **more: Any) -> Look:
    request = {"messages": [{"role": "user", "content": list(parts)}], **more}
    look = Look(b"as it came", request, [Medium(part, part["type"]) for part in parts])
    for number, medium in enumerate(look.media):
        medium.uuid, medium.name = f"uuid {number}", f"name {number}"
    return look


def part_of(kind: str, url: str = DATA, **more: Any) -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}, **more}


def sent(body: bytes) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(body)["messages"][0]["content"]
    return content


def test_a_request_whose_media_nobody_names_goes_on_as_it_came() -> None:
    look = request_of(part_of("video_url"), part_of("image_url"))
    look.settle()
    assert look.body == b"as it came"


def test_videos_and_sounds_get_names_and_pictures_and_chosen_names_stay() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    chosen = part_of("video_url", uuid="chosen")
    look = request_of(part_of("video_url"), sound, part_of("image_url"), chosen)
    look.is_named = True
    look.settle()
    assert [part.get("uuid") for part in sent(look.body)] == ["uuid 0", "uuid 1", None, "chosen"]
    assert look.media[1].url == "data:audio/wav;base64,AAAA"


def test_what_was_fetched_takes_the_place_of_its_url() -> None:
    look = request_of(part_of("audio_url", "http://a"), part_of("video_url", "http://b"))
    look.media[0].content, look.is_named = Raw(b"bytes"), True
    look.settle()
    encoded = b64encode(b"bytes").decode()
    assert sent(look.body) == [
        part_of("audio_url", f"data:audio/unknown;base64,{encoded}", uuid="uuid 0"),
        part_of("video_url", "http://b", uuid="uuid 1"),
    ]
    body = look.body
    look.settle()
    assert look.body == body, "what was fetched is there no more"


def test_no_pixels_are_kept_and_no_bytes_that_the_request_has() -> None:
    look = request_of(part_of("image_url", "http://a"), part_of("image_url"), part_of("video_url"))
    for medium in look.media:
        medium.content = SimpleNamespace(original_bytes=b"bytes", media="pixels")
        medium.keep_bytes()
    assert [medium.content for medium in look.media] == [Raw(b"bytes"), None, None]


def test_the_media_of_a_rewritten_request_come_back() -> None:
    look = request_of(part_of("video_url", "http://a", more=1), ec_transfer_params={"name 0": {}})
    [video] = look.media
    video.content, look.is_named = Raw(b"bytes"), True
    placeholder = Placeholder.of("video", GRID)
    assert placeholder
    look.found.append(FoundMedium(video, SimpleNamespace(), placeholder))  # type: ignore[arg-type]
    assert look.is_whole
    bare = {"type": "video_embeds", "video_embeds": GRID, "uuid": "uuid 0", "more": 1}
    assert sent(look.rewritten()) == [bare]
    look.settle()
    [part] = sent(look.body)
    assert part["video_url"]["url"].startswith("data:video/unknown;base64,")
    assert (part["type"], part["uuid"], part["more"]) == ("video_url", "uuid 0", 1)


def test_a_promise_leaves_a_picture_out_and_says_where_it_lies() -> None:
    look = request_of(part_of("image_url"))
    [picture] = look.media
    placeholder = Placeholder.of("image", {"image_grid_thw": [1, 4, 4]})
    assert placeholder
    missing = MissingMedium(picture, DATA, "name 0", "namespace", 10)
    promise = Promise(placeholder, [Hint("node:1")], SimpleNamespace())  # type: ignore[arg-type]
    look.promised.append((missing, promise))
    body = json.loads(look.rewritten())
    assert body["ec_transfer_params"] == {"name 0": {"ecd_node": "node:1"}}
    assert "ec_transfer_params" not in look.request


@pytest.mark.parametrize(
    ("params", "are_named"),
    [
        (None, False),
        ([], False),
        ({"ecd_consumers": ["node:1"], "ecd_hop": True}, False),
        ({"a name": {"metadata": {}}}, True),
        ({"ec_items": []}, True),
    ],
)
def test_parameters_name_items_or_nodes(params: object, are_named: bool) -> None:
    assert names_items(params) is are_named
