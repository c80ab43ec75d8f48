"""The middleware in vLLM's own server, with videos and sounds: each is decoded and encoded once."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from e2e.engines import NIGHTLY, VERSIONS, installed, output_of
from e2e.servers import Server, api_server, picture_url
from e2e.shared import EXACT, Engines
from ecd_client import Client
from ecd_client.vllm.base.names import OUTLINE
from support.daemon import Daemon
from support.waiting import eventually
from support.web import site

pytestmark = pytest.mark.timeout(600)
SIZE = {"count": 2, "num_frames": 8, "width": 56, "height": 56}
LIMITS = {"image": 2, "video": SIZE}
CLIPS = 24
RATE = 2.0
"""Frames a second at which Qwen2.5-VL needs the grid of a video alone."""
ODD = 3.0


class Work(NamedTuple):
    """What a server has done: media decoded, calls of the processor, passes of the encoder.

    The passes are those of Qwen2.5-VL's tower.
    """

    decodes: int
    preprocesses: int
    encodes: int

    @classmethod
    def of(cls, server: Server) -> Work:
        text = server.text()
        decodes = text.count("a video is decoded") + text.count("a sound is decoded")
        others = "media are preprocessed", "pictures are encoded"
        return cls(decodes, *map(text.count, others))

    def since(self, before: Work) -> Work:
        return Work(*(now - then for now, then in zip(self, before, strict=True)))


NOTHING, ONCE = Work(0, 0, 0), Work(1, 1, 1)


class Fleet:
    """A daemon, servers with the middleware, one without ecd, and clips."""

    def __init__(
        self,
        version: str,
        model: Path,
        directory: Path,
        limits: Mapping[str, object] = LIMITS,
        flags: Sequence[str] = (),
    ) -> None:
        self.version, self.model, self.directory = version, model, directory
        self.daemon = Daemon(directory, "64MiB").start()
        self._clips: dict[float, Iterator[Path]] = {}
        self._numbers = count()
        self._started: list[Server] = []
        self._flags = [*EXACT, *flags, "--limit-mm-per-prompt", json.dumps(limits)]
        self._plain, self._server = self._begin(None), self._begin_server()

    @cached_property
    def plain(self) -> Server:
        """An engine without ecd."""
        return self._plain.wait_ready()

    @cached_property
    def server(self) -> Server:
        """An engine that does all."""
        return self._ready(self._server)

    def clip(self, rate: float = RATE) -> bytes:
        """A video that no other test has."""
        if rate not in self._clips:
            directory = self.directory / f"{rate} a second"
            directory.mkdir()
            output_of(self.version, "clips.py", str(directory), str(CLIPS), str(rate))
            self._clips[rate] = iter(sorted(directory.glob("*.mp4")))
        return next(self._clips[rate]).read_bytes()

    @cached_property
    def pair(self) -> tuple[Server, Server]:
        """An engine that only encodes, and one that relies on encoders."""
        begun = self._begin("ec_producer"), self._begin("ec_consumer", ecd_on_unavailable="fail")
        return self._ready(begun[0]), self._ready(begun[1])

    def _begin_server(self) -> Server:
        return self._begin("ec_both")

    def _begin(
        self, role: str | None, environ: Mapping[str, str] | None = None, **extra: object
    ) -> Server:
        log, flags = self.directory / f"{next(self._numbers)}.log", self._flags
        calm = {"CALM": "1", "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "1"}
        how: dict[str, Any] = {"environ": {**calm, **(environ or {})}}
        if role is not None:
            flags = [*flags, "--middleware", "ecd_client.vllm.ReuseMiddleware"]
            how |= {"counting": True, "ecd_address": self.daemon.address}
        server = api_server(self.version, log, self.model, role, flags, **how, **extra)
        self._started.append(server)
        return server

    @staticmethod
    def _ready(server: Server) -> Server:
        server.wait_ready()
        eventually(lambda: "that are stored are not preprocessed" in server.text())
        return server

    def close(self) -> None:
        with ThreadPoolExecutor() as side:
            list(side.map(Server.close, self._started))
        self.daemon.close()

    def right(self, content: list[dict], server: Server | None = None, **options: object) -> dict:
        """The answer is that of vLLM alone."""
        server = server or self.server
        status, body = server.chat(content, **options)
        assert status == 200, f"{body}\n{server.text()[-3000:]}"
        assert answer(body) == answer(self.plain.chat(content)[1])
        return body

    def stored(self, content: list[dict], server: Server | None = None) -> None:
        before = self.daemon.status().counters.puts
        self.right(content, server)
        eventually(lambda: self.daemon.status().counters.puts > before)

    def worked(self, content: list[dict], server: Server | None = None, **options: object) -> Work:
        """What a right answer takes."""
        server = server or self.server
        before = Work.of(server)
        self.right(content, server, **options)
        return Work.of(server).since(before)


def answer(body: dict) -> list[tuple[str, float]]:
    tokens = body["choices"][0]["logprobs"]["content"]
    return [(token["token"], pytest.approx(token["logprob"], abs=1e-3)) for token in tokens]


def data_url(clip: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{b64encode(clip).decode()}"


def shown(url: str, text: str = "what is in this video?", **more: object) -> list[dict]:
    return [
        {"type": "video_url", "video_url": {"url": url}, **more},
        {"type": "text", "text": text},
    ]


@pytest.fixture(scope="module", params=[VERSIONS[0], NIGHTLY])
def fleet(
    request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    version = installed(request.param)
    fleet = Fleet(version, engines.model(version), tmp_path_factory.mktemp("media"))
    try:
        yield fleet
    finally:
        fleet.close()


def test_a_video_that_is_stored_is_neither_decoded_nor_encoded(fleet: Fleet) -> None:
    url = data_url(fleet.clip())
    before = Work.of(fleet.server)
    fleet.stored(shown(url))
    assert Work.of(fleet.server).since(before) == ONCE
    assert fleet.worked(shown(url, "and now?")) == NOTHING
    both = [*shown(url)[:1], *shown(url, "are these the same?")]
    assert fleet.worked(both) == NOTHING


def test_a_picture_beside_a_video_is_found_with_it_or_both_are_sent(fleet: Fleet) -> None:
    picture = {"type": "image_url", "image_url": {"url": picture_url(1)}}
    [video, text] = shown(data_url(fleet.clip()))
    fleet.stored([video, text])
    assert fleet.worked([picture, video, text]).encodes == 1, "the video has its name"
    eventually(lambda: fleet.worked([picture, video, text]) == NOTHING)
    assert fleet.worked([video, picture, text]) == NOTHING


def test_a_url_is_fetched_once_and_its_bytes_are_what_the_name_says(fleet: Fleet) -> None:
    clips = [fleet.clip() for _ in range(2)]
    with site() as (url, page):
        for clip in clips:
            page["content"], page["asked"] = clip, 0
            status, body = fleet.server.chat(shown(url))
            assert (status, page["asked"]) == (200, 1)
            said = shown(data_url(clip))
            assert answer(body) == answer(fleet.plain.chat(said)[1])
        eventually(lambda: fleet.worked(shown(data_url(clips[0]))) == NOTHING)


def test_frames_in_a_url_are_a_video(fleet: Fleet) -> None:
    frames = [picture_url(seed, 56, 56).partition(",")[2] for seed in range(4)]
    url = f"data:video/jpeg;base64,{','.join(frames)}"
    fleet.right(shown(url))
    eventually(lambda: fleet.worked(shown(url, "and now?")) == NOTHING)


def test_a_video_of_any_rate_is_found_by_its_outline(fleet: Fleet) -> None:
    """Its frames' times are in no metadata that a server takes, so a producer says none."""
    odd, usual = (
        {"type": "video_url", "video_url": {"url": data_url(fleet.clip(rate))}}
        for rate in (ODD, RATE)
    )
    picture = {"type": "image_url", "image_url": {"url": picture_url(3)}}
    text = {"type": "text", "text": "what is in these?"}
    fleet.stored([odd, text])
    eventually(lambda: fleet.worked([odd, text]) == NOTHING)
    assert [name for name in fleet.daemon.names() if name.startswith(OUTLINE)]
    for more in (usual, picture):
        fleet.right([odd, more, text])
        eventually(lambda more=more: fleet.worked([odd, more, text]) == NOTHING)
        assert fleet.worked([more, odd, text]) == NOTHING
    assert fleet.worked([odd, text], fleet.pair[1]) == NOTHING


def test_an_encoder_says_again_nothing_of_a_video_of_another_rate(fleet: Fleet) -> None:
    encoder, _ = fleet.pair
    content = shown(data_url(fleet.clip(ODD)), uuid="an odd one")
    said = []
    for work in (ONCE, NOTHING):
        before = Work.of(encoder)
        status, body = encoder.chat(content, max_tokens=1)
        assert status == 200
        assert Work.of(encoder).since(before) == work
        said.append(body["ec_transfer_params"])
        eventually(lambda: "an odd one" in fleet.daemon.names())
        eventually(lambda: any(name.startswith(OUTLINE) for name in fleet.daemon.names()))
    assert said[0] == said[1]
    assert said[0]["an odd one"]["metadata"] == {}


def test_a_video_that_a_client_has_named_keeps_that_name(fleet: Fleet) -> None:
    content = shown(data_url(fleet.clip()), uuid="a video's name")
    fleet.stored(content)
    assert "a video's name" in fleet.daemon.names()
    assert fleet.worked(content) == NOTHING


def test_an_encoder_gives_no_names_and_engines_find_what_it_stored_by_vllms(fleet: Fleet) -> None:
    """An engine that it encodes for may have no middleware, and look for the name of the frames."""
    encoder, consumer = fleet.pair
    content = shown(data_url(fleet.clip()))
    status, said = encoder.chat(content, max_tokens=1)
    assert status == 200
    params = said["ec_transfer_params"]
    eventually(lambda: params.keys() <= set(fleet.daemon.names()))
    assert fleet.worked(content, ec_transfer_params=params).encodes == 0
    for more in ({}, {"ec_transfer_params": params}):
        assert fleet.worked(content, consumer, **more).encodes == 0
    assert fleet.worked(content).encodes == 1, "its own name is another one"


def test_an_encoder_answers_again_for_a_video_that_a_proxy_has_named(fleet: Fleet) -> None:
    encoder, _ = fleet.pair
    content = shown(data_url(fleet.clip()), uuid="a proxy's name")
    status, first = encoder.chat(content, max_tokens=1)
    assert status == 200
    eventually(lambda: "a proxy's name" in fleet.daemon.names())
    before = Work.of(encoder)
    status, second = encoder.chat(content, max_tokens=1)
    assert status == 200
    assert Work.of(encoder).since(before) == NOTHING
    [(name, said)] = first["ec_transfer_params"].items()
    assert (name, second["ec_transfer_params"]) == ("a proxy's name", first["ec_transfer_params"])
    bare = {"type": "video_embeds", "video_embeds": said["metadata"], "uuid": name}
    before = Work.of(fleet.server)
    status, body = fleet.server.chat([bare, content[1]])
    assert status == 200
    assert answer(body) == answer(fleet.plain.chat(content)[1])
    assert Work.of(fleet.server).since(before) == NOTHING


def test_another_server_gives_the_same_name(fleet: Fleet) -> None:
    url = data_url(fleet.clip())
    fleet.stored(shown(url))
    assert fleet.worked(shown(url, "and there?"), fleet.pair[1]) == NOTHING


def test_a_tenants_video_is_not_anothers(fleet: Fleet) -> None:
    content = shown(data_url(fleet.clip()))
    for salt in ("one", "other"):
        puts = fleet.daemon.status().counters.puts
        assert fleet.worked(content, cache_salt=salt).encodes == 1
        eventually(lambda puts=puts: fleet.daemon.status().counters.puts > puts)
        assert fleet.worked(content, cache_salt=salt) == NOTHING


def test_a_request_that_fails_without_its_video_is_made_with_it(fleet: Fleet) -> None:
    content = shown(data_url(fleet.clip()))
    fleet.stored(content)
    entry = max(fleet.daemon.entries(), key=lambda entry: entry.entry)
    with Client(fleet.daemon.address, namespace=entry.key.namespace) as client:
        fleet.daemon.evict(entry.key)
        rows, width = entry.content.shape
        nbytes = entry.content.nbytes // width * (width + 1)
        put = client.put_bytes(
            *(entry.key.mm_hash, bytes(nbytes), entry.content.dtype, (rows, width + 1)),
            metadata=entry.content.metadata,
        )
        assert put
    said = "a request without its media failed, and was made with them"
    before = fleet.server.text().count(said)
    fleet.right([content[0], {"type": "text", "text": "what is it?"}])
    assert fleet.server.text().count(said) == before + 1


def test_a_batch_brings_names_alone_or_all_media(fleet: Fleet) -> None:
    """Each conversation may have as many media as a request."""
    pictures = [{"type": "image_url", "image_url": {"url": picture_url(n)}} for n in (71, 72, 73)]
    talks = [
        [{"role": "user", "content": [*pair, {"type": "text", "text": "what is it?"}]}]
        for pair in (pictures[:2], pictures[1:], pictures[:1])
    ]
    path, how = "/v1/chat/completions/batch", {"temperature": 0, "max_tokens": 4, "logprobs": True}

    def ask(server: Server) -> list[list[tuple[str, float]]]:
        status, body = server.ask(path, messages=talks, **how)
        assert status == 200, body
        return [answer({"choices": [choice]}) for choice in body["choices"]]

    right = ask(fleet.plain)
    assert ask(fleet.server) == right
    for picture in pictures:
        eventually(lambda picture=picture: fleet.worked([picture, *shown("")[1:]]) == NOTHING)
    before = Work.of(fleet.server)
    assert ask(fleet.server) == right
    assert Work.of(fleet.server).since(before) == NOTHING


@pytest.mark.parametrize("what", ["beyond a limit", "no video", "a name that is a number"])
def test_what_vllm_says_of_a_video_is_said(
    fleet: Fleet, what: str, request: pytest.FixtureRequest
) -> None:
    content: dict[str, Callable[[], Any]] = {
        "beyond a limit": lambda: shown(data_url(fleet.clip()))[:1] * 3,
        "no video": lambda: shown(data_url(b"no video")),
        "a name that is a number": lambda: shown(data_url(fleet.clip()), uuid=7),
    }
    asked = content[what]()
    status, body = fleet.server.chat(asked)
    expected, theirs = fleet.plain.chat(asked)
    assert (status, "error" in body) == (expected, "error" in theirs)
