"""Outlines of items: what is stored of them, and which bytes are none."""

from __future__ import annotations

import json
import zlib
from typing import Any

import msgspec
import pytest

from ecd_client.vllm.base.names import outline_name, stored_name
from ecd_client.vllm.middleware.media import FoundMedium, Look, Medium
from ecd_client.vllm.middleware.outline import (
    MAX_PACKED_BYTES,
    MAX_TOKENS,
    Outline,
    Update,
)
from ecd_proto.placeholders import Placeholder

VOCABULARY = 1000
TIMED = Placeholder.of("video", {"video_grid_thw": [1, 2, 2], "timestamps": [0.5]})
PICTURE = Outline("image", (Update("replace", [5], [7, 8, 8, 9], b"\0\1\1\0"),))


def stored(*said: Any) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(said))


def test_an_outline_comes_back_as_it_was() -> None:
    at_ends = Update("insert", "start", [4] * 576, None), Update("insert", "end", [3] * 576, None)
    for outline in PICTURE, Outline("video", at_ends), Outline("video", placeholder=TIMED):
        packed = outline.pack()
        assert packed is not None
        assert len(packed) < 150
        assert Outline.unpack(packed, VOCABULARY) == outline
    assert PICTURE.embeddings == 2


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\0" * 64, id="zeros"),
        pytest.param(PICTURE.pack()[:-6], id="cut short"),
        pytest.param(b"x" * (MAX_PACKED_BYTES + 1), id="long"),
        pytest.param(zlib.compress(b"\xc1"), id="no MessagePack"),
        pytest.param(zlib.compress(bytes(1 << 25)), id="far longer once unpacked"),
        pytest.param(stored(2, "image", b"", [("replace", [5], [7], None)]), id="another form"),
        pytest.param(stored(1, "image", b"", []), id="no update"),
        pytest.param(stored(1, "image", b"", [("delete", [5], [7], None)]), id="another mode"),
        pytest.param(stored(1, "image", b"", [("replace", "middle", [7], None)]), id="a place"),
        pytest.param(stored(1, "image", b"", [("replace", [5], [VOCABULARY], None)]), id="token"),
        pytest.param(stored(1, "image", b"", [("replace", [-1], [7], None)]), id="target below 0"),
        pytest.param(stored(1, "image", b"", [("replace", [5], [7.5], None)]), id="no token"),
        pytest.param(stored(1, "image", b"", [("replace", [5], [], None)]), id="no embedding"),
        pytest.param(stored(1, "image", b"", [("replace", [5], [7], b"\0")]), id="none gets one"),
        pytest.param(stored(1, "image", b"", [("replace", [5], [7], b"\1\1")]), id="long mask"),
        pytest.param(stored(1, "image", b"", [("replace", [5], [7], b"\2")]), id="twice one"),
        pytest.param(
            stored(1, "image", b"", [("insert", [5], [7], None), ("insert", [5], [7, 7], None)]),
            id="updates that differ",
        ),
        pytest.param(stored(1, "image", b"?", []), id="no metadata"),
        pytest.param(stored(1, "image", TIMED.packed, []), id="metadata of another kind"),
        pytest.param(
            stored(1, "video", TIMED.packed, [("replace", [5], [7], None)]),
            id="tokens beside metadata from which they follow",
        ),
        pytest.param(
            stored(1, "image", b"", [("replace", [5], [7] * (MAX_TOKENS + 1), None)]),
            id="more tokens than a context has",
        ),
    ],
)
def test_what_is_no_outline_is_none(packed: bytes) -> None:
    assert Outline.unpack(packed, VOCABULARY) is None


def test_an_outline_that_is_too_long_is_not_stored() -> None:
    numbers = [number * 7919 % 100_000 for number in range(MAX_TOKENS // 4)]
    assert Outline("image", (Update("replace", [5], numbers, None),)).pack() is None


def test_a_medium_with_an_outline_goes_on_as_its_name() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}, "detail": "auto"}
    request = {"messages": [{"role": "user", "content": [part]}]}
    look = Look(b"", request, [Medium(part, "image_url", uuid="u", name="n")])
    look.found = [FoundMedium(look.media[0], None, PICTURE)]  # type: ignore[arg-type]
    [sent] = json.loads(look.rewritten())["messages"][0]["content"]
    assert sent == {"type": "image_url", "image_url": None, "uuid": "u", "detail": "auto"}
    assert look.outlines == {"n": PICTURE}


def test_media_with_metadata_go_by_outlines_beside_one_that_needs_its_own() -> None:
    kinds = ("image", "video")
    parts = [{"type": f"{kind}_url", f"{kind}_url": {"url": "data:,"}} for kind in kinds]
    request = {"messages": [{"role": "user", "content": parts}]}
    media = [Medium(part, part["type"], uuid=part["type"], name=part["type"]) for part in parts]  # type: ignore[arg-type]
    grid = Placeholder.of("image", {"image_grid_thw": [1, 4, 4]})
    look = Look(b"", request, media)
    timed = Outline("video", placeholder=TIMED)
    look.found = [FoundMedium(media[0], None, grid), FoundMedium(media[1], None, timed)]  # type: ignore[arg-type]
    assert look.outlines == {"image_url": Outline("image", placeholder=grid), "video_url": timed}
    sent = json.loads(look.rewritten())["messages"][0]["content"]
    assert [part[part["type"]] for part in sent] == [None, None]


def test_nobody_can_name_an_item_as_an_outline_is() -> None:
    name = outline_name(stored_name("a", None), "front end")
    assert stored_name(name, None) != name
    assert outline_name(stored_name("a", "salt"), "front end") != name
    assert outline_name(stored_name("a", None), "another") != name
