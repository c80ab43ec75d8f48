"""The encode hop between vLLM's own servers, with media of all kinds: the engine decodes none."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e.engines import NIGHTLY, VERSIONS, installed, require
from e2e.servers import Server, picture_url
from e2e.shared import Engines
from e2e.test_reuse_media import LIMITS, NOTHING, ODD, Fleet, Work, data_url, shown
from e2e.test_reuse_sounds import FLAGS, heard, sound
from e2e.test_reuse_sounds import data_url as sound_url
from ecd_client.vllm.base.names import OUTLINE
from ecd_client.vllm.middleware.hop.protocol import HAS_OUTLINE, IS_HOP
from support.waiting import HANG_S, eventually
from support.web import site

pytestmark = pytest.mark.timeout(600)


class Model(NamedTuple):
    """A tiny model, its limits and flags, and what a request with a new medium has."""

    kind: str
    limits: Mapping[str, object]
    flags: Sequence[str]


OTHER_NAMES = "sounds with --media-io-kwargs"
"""The middleware of such an encoder does nothing."""
MODELS = {
    "videos": Model("qwen2_5_vl", LIMITS, ()),
    "timed videos": Model("qwen3_vl", LIMITS, ()),
    "pictures by outline": Model("llava_next", {"image": 4}, ()),
    "sounds": Model("qwen2_audio", {"audio": 2}, ()),
    OTHER_NAMES: Model("qwen2_audio", {"audio": 2}, FLAGS),
}


OUTCOMES = "encoded", "refused", "failed", "cancelled"
BY_OUTLINE = "timed videos", "pictures by outline"
VIDEOS, SOUNDS = ("videos", "timed videos"), ("sounds", OTHER_NAMES)
_seeds = count(12_000)


class Hop(Fleet):
    """An engine that sends media to an encoder, the encoder, and one without ecd."""

    encoder: Server

    def __init__(self, name: str, version: str, engines: Engines, directory: Path) -> None:
        self.name, model = name, MODELS[name]
        super().__init__(
            version, engines.model(version, model.kind), directory, model.limits, model.flags
        )
        self.encoder.wait_ready()
        if name != OTHER_NAMES:
            self._ready(self.encoder)

    def _begin_server(self) -> Server:
        self.encoder = self._begin("ec_producer")
        environ = {"ECD_ENCODERS": self.encoder.url}
        return self._begin("ec_both", environ, ecd_load_timeout_s=10 * HANG_S)

    def new(self, text: str = "what is in this?", **more: object) -> list[dict]:
        """A request with a medium that nobody has seen."""
        if self.name in SOUNDS:
            [part, said] = heard(sound_url(sound()), text)
            return [{**part, **more}, said]
        if self.name == "pictures by outline":
            picture = {"type": "image_url", "image_url": {"url": picture_url(next(_seeds))}}
            return [{**picture, **more}, {"type": "text", "text": text}]
        return shown(data_url(self.clip()), text, **more)

    def asked(self, outcome: str = "encoded") -> float:
        name = f'encoder_calls_total{{encoder="{self.encoder.url}",outcome="{outcome}"}}'
        return self.server.all_metrics().get(name, 0.0)

    def right_elsewhere(self, content: list[dict], calls: int = 1, **options: object) -> None:
        """The answer is right, the encoder has encoded `calls` media, and the engine nothing."""
        asked, misses = self.asked(), self.server.metrics().get("misses", 0.0)
        outlines = self.outlines()
        before = Work.of(self.encoder)
        assert self.worked(content, **options) == NOTHING
        assert self.server.metrics().get("misses", 0.0) == misses
        assert self.asked() == asked + calls
        decodes = 0 if self.name == "pictures by outline" else calls  # of pictures none is said
        assert Work.of(self.encoder).since(before)[:2] == (decodes, calls)
        if self.name in BY_OUTLINE:
            eventually(lambda: self.outlines() == outlines + calls)

    def outlines(self) -> int:
        return sum(name.startswith(OUTLINE) for name in self.daemon.names())


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((VERSIONS[0], name), id=name) for name in MODELS),
        *(
            pytest.param((NIGHTLY.values[0], name), id=f"{name}, next", marks=NIGHTLY.marks)
            for name in MODELS
        ),
    ],
)
def hop(
    request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hop]:
    version, name = request.param
    installed(version)
    require("models")  # which decode sounds
    started = Hop(name, version, engines, tmp_path_factory.mktemp("hop"))
    try:
        yield started
    finally:
        started.close()


def test_a_new_medium_is_decoded_and_encoded_by_the_encoder_alone(hop: Hop) -> None:
    content = hop.new()
    hop.right_elsewhere(content)
    again = [content[0], {"type": "text", "text": "and now?"}]
    eventually(lambda: hop.worked(again) == NOTHING, "its outline is stored, if it has one")
    assert hop.asked() >= 1
    kinds = {**dict.fromkeys(SOUNDS, "audio clips"), "pictures by outline": "pictures"}
    said = kinds.get(hop.name, "pictures and videos")
    assert f"{said} that are not stored go to {hop.encoder.url}" in hop.server.text()


def test_two_new_media_and_one_that_is_stored_come_by_their_names(hop: Hop) -> None:
    one, other = hop.new(), hop.new()
    hop.right_elsewhere([one[0], other[0], one[1]], calls=2)
    third = hop.new()
    hop.right_elsewhere([third[0], *one])


def test_a_new_picture_and_a_new_video_go_both(hop: Hop) -> None:
    if hop.name not in VIDEOS:
        return
    part = {"type": "image_url", "image_url": {"url": picture_url(next(_seeds))}}
    video = hop.new()
    asked = hop.asked()
    assert hop.worked([part, *video]) == NOTHING
    assert hop.asked() == asked + 2
    assert hop.worked([video[0], part, video[1]]) == NOTHING
    hop.right_elsewhere([*hop.new()[:1], part, *video[1:]])


def test_what_a_client_has_named_keeps_its_name(hop: Hop) -> None:
    hop.right_elsewhere(hop.new(uuid=f"{hop.name} of a client"))


def test_what_is_behind_a_url_is_fetched_once(hop: Hop) -> None:
    [part, said] = hop.new()
    [key] = part.keys() - {"type"}
    with site() as (url, page):
        page["content"] = content_of(part[key]["url"])
        before, asked = Work.of(hop.server), hop.asked()
        status, body = hop.server.chat([{"type": key, key: {"url": url}}, said])
        assert (status, page["asked"]) == (200, 1), body
        assert Work.of(hop.server).since(before) == NOTHING
        assert hop.asked() == asked + 1
    assert hop.worked([part, said]) == NOTHING


def content_of(url: str) -> bytes:
    return b64decode(url.partition(",")[2])


def test_what_a_proxy_has_had_encoded_is_not_sent(hop: Hop) -> None:
    """It is stored under vLLM's own name, for which it has to be decoded."""
    content = hop.new()
    status, said = hop.encoder.chat(content, max_tokens=1)
    assert status == 200
    params = said["ec_transfer_params"]
    eventually(lambda: params.keys() <= set(hop.daemon.names()))
    asked, misses = hop.asked(), hop.server.metrics().get("misses", 0.0)
    hop.right(content, ec_transfer_params=params)
    assert hop.asked() == asked
    assert hop.server.metrics().get("misses", 0.0) == misses


def test_tenants_have_media_of_their_own(hop: Hop) -> None:
    content = hop.new()
    hop.right_elsewhere(content, cache_salt="one")
    asked = hop.asked()
    assert hop.worked(content, cache_salt="another") == NOTHING
    assert hop.asked() == asked + 1, "though the encoder has preprocessed it"


def test_a_sound_in_json_goes_as_a_sound(hop: Hop) -> None:
    if hop.name not in SOUNDS:
        return
    in_json = {"data": b64encode(sound()).decode(), "format": "wav"}
    hop.right_elsewhere([{"type": "input_audio", "input_audio": in_json}, *heard("")[1:]])


def test_a_video_whose_frames_have_times_comes_by_its_outline(hop: Hop) -> None:
    """Frames that lie otherwise than the model assumes have times, which no answer says."""
    if hop.name != "videos":
        return
    frames = [picture_url(seed, 56, 56).partition(",")[2] for seed in range(4)]
    hop.right_elsewhere(shown(f"data:video/jpeg;base64,{','.join(frames)}"))
    outlines = hop.outlines()
    hop.right_elsewhere(shown(data_url(hop.clip(ODD))))
    eventually(lambda: hop.outlines() == outlines + 1)
    odd, usual = shown(data_url(hop.clip(ODD))), hop.new()
    hop.right_elsewhere([odd[0], usual[0], usual[1]], calls=2)


def test_a_medium_that_is_none_is_vllms_to_refuse(hop: Hop) -> None:
    [part, said] = hop.new()
    [key] = part.keys() - {"type"}
    content = [{**part, key: {"url": f"data:{key[:5]}/x;base64,AAAA"}}, said]
    called = [hop.asked(outcome) for outcome in OUTCOMES]
    status, body = hop.server.chat(content)
    assert (status, "error" in body) == (hop.plain.chat(content)[0], True)
    assert [hop.asked(outcome) for outcome in OUTCOMES] == called, "its header says that"
    hop.right_elsewhere(hop.new())


def test_an_encoder_that_decodes_otherwise_refuses(hop: Hop) -> None:
    """Its middleware, before anything is read."""
    if hop.name == OTHER_NAMES:
        return
    content = hop.new()
    params = {"ecd_hop": True, "ecd_decoding": "another digest"}
    before = Work.of(hop.encoder)
    status, body = hop.encoder.chat(content, ec_transfer_params=params)
    assert status == 409, body
    assert "decodes otherwise" in body["error"]
    assert Work.of(hop.encoder).since(before) == NOTHING


def test_an_encoder_says_whether_all_is_stored(hop: Hop) -> None:
    if hop.name != "pictures by outline":
        return

    def says() -> bool:  # of a name that no cache of vLLM's has
        asked = hop.new(uuid=f"picture {next(_seeds)}"), {IS_HOP: "1"}, {"max_tokens": 1}
        with hop.encoder.open(*asked) as reply:
            return HAS_OUTLINE in reply.headers

    assert says()
    hop.daemon.kill()
    eventually(lambda: not says())
    hop.daemon.start()
    eventually(says)


def test_an_encoder_that_has_ended_costs_no_request(hop: Hop) -> None:
    """The last test."""
    hop.encoder.kill()
    failed = hop.asked("failed")
    before = hop.server.metrics().get("misses", 0.0)
    for _ in range(2):
        assert hop.worked(hop.new()).preprocesses == 1
    assert hop.server.metrics()["misses"] == before + 2
    eventually(lambda: hop.asked("failed") > failed)
