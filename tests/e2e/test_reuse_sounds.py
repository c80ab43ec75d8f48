"""The middleware in vLLM's own server, with sounds: each is decoded and encoded once."""

from __future__ import annotations

import wave
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from itertools import count
from random import Random
from typing import Any

import pytest
import torch

from e2e.chats import WIDTH, packed, tensor
from e2e.engines import NIGHTLY, VERSIONS, installed, require
from e2e.shared import Engines
from e2e.test_reuse_media import NOTHING, Fleet, Work, answer
from ecd_proto.placeholders import Placeholder
from support.web import site

pytestmark = pytest.mark.timeout(600)
RATE = 16000
FLAGS = "--media-io-kwargs", '{"audio": {"audio_backend": "soundfile"}}'
"""With these vLLM's name of a sound is not the one that its part says."""
_seeds = count()


def sound(channels: int = 1, seed: int | None = None) -> bytes:
    """A second of noise as a WAV file, new unless a seed is given."""
    file, random = BytesIO(), Random(next(_seeds) if seed is None else seed)
    with wave.open(file, "wb") as out:
        out.setparams((channels, 1, RATE, 0, "NONE", ""))
        out.writeframes(random.randbytes(RATE * channels))
    return file.getvalue()


def heard(url: str, text: str = "what is in this?") -> list[dict]:
    return [{"type": "audio_url", "audio_url": {"url": url}}, {"type": "text", "text": text}]


def data_url(content: bytes) -> str:
    return f"data:audio/wav;base64,{b64encode(content).decode()}"


@pytest.fixture(scope="module", params=[VERSIONS[0], NIGHTLY])
def fleet(
    request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    version = installed(request.param)
    require("models")  # which decode sounds
    model = engines.model(version, "qwen2_audio")
    directory, limits = tmp_path_factory.mktemp("sounds"), {"audio": 2}
    fleet = Fleet(version, model, directory, limits, FLAGS)
    try:
        yield fleet
    finally:
        fleet.close()


def misses(fleet: Fleet) -> float:
    """Sounds that the server has encoded."""
    return fleet.server.metrics().get("misses", 0)


def test_a_sound_that_is_stored_is_neither_decoded_nor_encoded(fleet: Fleet) -> None:
    content = sound()
    before = Work.of(fleet.server)
    fleet.stored(heard(data_url(content)))
    assert Work.of(fleet.server).since(before)[:2] == (1, 1)
    encoded = misses(fleet)
    assert fleet.worked(heard(data_url(content), "and now?")) == NOTHING
    in_json = {"data": b64encode(content).decode(), "format": "wav"}
    part = {"type": "input_audio", "input_audio": in_json}
    assert fleet.worked([part, *heard(data_url(content))]) == NOTHING
    with site() as (url, page):
        page["content"] = content
        status, body = fleet.server.chat(heard(url, "and there?"))
        assert (status, page["asked"]) == (200, 1)
        assert answer(body) == answer(fleet.plain.chat(heard(data_url(content), "and there?"))[1])
    assert misses(fleet) == encoded


def test_a_sound_in_json_is_stored_under_the_name_of_its_bytes(fleet: Fleet) -> None:
    content = sound()
    in_json = {"data": b64encode(content).decode(), "format": "wav"}
    fleet.stored([{"type": "input_audio", "input_audio": in_json}, *heard("")[1:]])
    assert fleet.worked(heard(data_url(content))) == NOTHING


def test_the_same_samples_in_other_bytes_are_another_sound(fleet: Fleet) -> None:
    content = sound(seed=1000)
    fleet.stored(heard(data_url(content)))
    encoded = misses(fleet)
    fleet.right(heard(data_url(content + b"LIST" + bytes(4))))
    assert misses(fleet) == encoded + 1


def test_a_sound_beyond_the_limit_is_refused_as_vllm_does(fleet: Fleet) -> None:
    asked = heard(data_url(bytes(2 << 20)))
    puts = fleet.daemon.status().counters.puts
    status, body = fleet.server.chat(asked)
    expected, theirs = fleet.plain.chat(asked)
    assert (status, body["error"][:60]) == (expected, theirs["error"][:60])
    assert fleet.daemon.status().counters.puts == puts


def test_what_is_said_of_a_sound_harms_nobody(fleet: Fleet) -> None:
    """A request with a sound's name and another length, or no sound, is right or fails alone."""
    [sent, text] = heard(data_url(sound()))
    whole = [{**sent, "uuid": "a sound's name"}, text]
    fleet.stored(whole)
    said = Placeholder.unpack(max(fleet.daemon.entries(), key=by_age).content.metadata)
    assert said
    [n] = said.fields["audio_num_tokens"]
    right = answer(fleet.plain.chat(whole)[1])
    lengths: list[Any] = [[n], [float(n)], [n + 1], [n - 1], [1], [2 * n], [0], [-n], [n, n]]
    lengths += [[[n]], [True], [1 << 22], [1 << 63], [0.5], [], ["1"], [n] * 5000, None, "", n]
    lengths += map(packed, map(torch.tensor, ([n], [float(n)], [n + 1], [-n], [[n]], n)))
    odd = [{"audio_embeds": {"audio_num_tokens": length}} for length in lengths]
    odd += [{"audio_embeds": value} for value in ({}, None)]
    odd += [{"audio_url": value} for value in (None, {}, {"url": None}, {"url": ""})]
    odd += [{"input_audio": value} for value in (None, {"data": "", "format": "wav"})]
    brought = packed(tensor(n, WIDTH))  # after which the name alone means this to vLLM
    odd += [{"audio_embeds": {"audio_embeds": brought, "audio_num_tokens": [n]}}]
    odd += [{"audio_embeds": brought}]
    statuses = []
    for each in odd:
        [key] = each
        part = {"type": key, **each, "uuid": "a sound's name"}
        status, body = fleet.server.chat([part, text])
        assert status >= 400 or answer(body) == right or brought in str(each), each
        statuses.append(status)
        assert answer(fleet.server.chat(whole)[1]) == right
    assert statuses[0] == 200


def by_age(entry: Any) -> int:
    return entry.entry
