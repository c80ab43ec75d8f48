"""The middleware in vLLM's own server, with a model whose pictures have no placeholder metadata."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from e2e.engines import NIGHTLY, VERSIONS, installed
from e2e.servers import picture_url
from e2e.shared import Engines
from e2e.test_reuse_media import NOTHING, Fleet, Work, answer
from ecd_client import Client
from ecd_client.vllm.base.names import OUTLINE
from ecd_client.vllm.middleware.outline import Outline, Update
from support.waiting import eventually

pytestmark = pytest.mark.timeout(600)
_seeds = count(9000)


def seen(*urls: str, text: str = "what is in this?", **more: object) -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": url}, **more} for url in urls]
    return [*parts, {"type": "text", "text": text}]


def picture(width: int = 336, height: int = 224) -> str:
    """A picture that no other test has."""
    return picture_url(next(_seeds), width, height)


@pytest.fixture(scope="module", params=[VERSIONS[0], NIGHTLY])
def fleet(
    request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    version = installed(request.param)
    model = engines.model(version, "llava_next")
    fleet = Fleet(version, model, tmp_path_factory.mktemp("outlines"), {"image": 4})
    try:
        yield fleet
    finally:
        fleet.close()


def outlines(fleet: Fleet) -> list[str]:
    return [name for name in fleet.daemon.names() if name.startswith(OUTLINE)]


def stored(fleet: Fleet, content: list[dict], pictures: int = 1, **options: object) -> Work:
    """Ask for new pictures, until they and their outlines are stored; what that took."""
    before, had = fleet.daemon.status().counters.puts, len(outlines(fleet))
    work = fleet.worked(content, **options)
    eventually(lambda: fleet.daemon.status().counters.puts == before + 2 * pictures)
    assert len(outlines(fleet)) == had + pictures
    return work


def test_a_picture_that_is_stored_is_not_preprocessed_again(fleet: Fleet) -> None:
    one, other = picture(), picture(224, 448)
    assert stored(fleet, seen(one)) == Work(0, 1, 1)
    assert stored(fleet, seen(other)) == Work(0, 1, 1)
    assert fleet.worked(seen(one, text="and now?")) == NOTHING
    assert fleet.worked(seen(one, other, one, text="which is which?")) == NOTHING
    assert fleet.worked(seen(other, one, text="which is which?")) == NOTHING


def test_two_new_pictures_of_a_request_both_get_outlines(fleet: Fleet) -> None:
    urls = picture(), picture(224, 448)
    stored(fleet, seen(*urls), pictures=2)
    assert fleet.worked(seen(*reversed(urls))) == NOTHING


def test_a_new_picture_beside_a_stored_one_comes_with_it(fleet: Fleet) -> None:
    one, other = picture(), picture()
    stored(fleet, seen(one))
    assert fleet.worked(seen(one, other)).encodes == 1
    eventually(lambda: fleet.worked(seen(one, other)) == NOTHING)


def test_another_server_takes_what_the_first_has_preprocessed(fleet: Fleet) -> None:
    url = picture()
    stored(fleet, seen(url))
    assert fleet.worked(seen(url, text="and there?"), fleet.pair[1]) == NOTHING


def test_an_encoder_says_what_it_would_and_its_consumer_need_not_preprocess(fleet: Fleet) -> None:
    encoder, consumer = fleet.pair
    content = seen(picture())
    had = len(outlines(fleet))
    status, first = encoder.chat(content, max_tokens=1)
    assert status == 200
    params: dict[str, Any] = first["ec_transfer_params"]
    eventually(lambda: params.keys() <= set(fleet.daemon.names()))
    eventually(lambda: len(outlines(fleet)) == had + 1)
    before = Work.of(encoder)
    status, second = encoder.chat(content, max_tokens=1)
    assert (status, second["ec_transfer_params"]) == (200, params)
    assert Work.of(encoder).since(before) == NOTHING
    assert fleet.worked(content, consumer, ec_transfer_params=params) == NOTHING


def test_a_tenants_picture_is_not_anothers(fleet: Fleet) -> None:
    content = seen(picture())
    for salt in ("one", "other"):
        assert stored(fleet, content, cache_salt=salt).encodes == 1
        assert fleet.worked(content, cache_salt=salt) == NOTHING


def test_a_picture_that_a_client_has_named_keeps_that_name(fleet: Fleet) -> None:
    content = seen(picture(), uuid="a picture's name")
    stored(fleet, content)
    assert "a picture's name" in fleet.daemon.names()
    assert fleet.worked(content) == NOTHING
    bare = [{"type": "image_url", "image_url": None, "uuid": "a picture's name"}, content[1]]
    elsewhere = fleet.pair[1]  # whose vLLM has never seen the picture
    assert fleet.worked(content, elsewhere) == NOTHING
    status, said = elsewhere.chat(bare)
    assert status != 200, f"no outline is left for others: {said}"


@pytest.mark.parametrize("how", ["of another picture", "of another size", "nonsense"])
def test_a_wrong_outline_is_not_taken_or_the_request_is_made_again(fleet: Fleet, how: str) -> None:
    large, small = picture(448, 448), picture(56, 224)
    names = []
    for url in (large, small):
        before = set(outlines(fleet))
        stored(fleet, seen(url))
        names.append(*set(outlines(fleet)) - before)
    entries = {entry.key.mm_hash: entry.key for entry in fleet.daemon.entries()}
    wrong, right = (entries[name] for name in names)
    with Client(fleet.daemon.address, namespace=right.namespace) as client:
        item = client.get(right.mm_hash)
        assert item is not None
        with item:
            content = {"of another size": bytes(item.view), "nonsense": b"\0" * 40}.get(how)
        if how == "of another picture":
            with client.get(wrong.mm_hash) as own:
                content = spoilt(bytes(own.view))
        fleet.daemon.evict(wrong)
        assert client.put_bytes(wrong.mm_hash, content, "uint8", (len(content),))
    failed = "a request without its media failed, and was made with them"
    before = fleet.server.text().count(failed)
    fleet.right(seen(large, text="what is it?"))
    assert fleet.server.text().count(failed) - before == (how == "of another picture")


def spoilt(packed: bytes) -> bytes:
    """An outline whose target no prompt has."""
    outline = Outline.unpack(packed, 1 << 20)
    assert outline is not None
    [update] = outline.updates
    other = Update(update.mode, [*update.target, 0, 0], update.full, update.embeds)
    said = replace(outline, updates=(other,)).pack()
    assert said is not None
    return said


def test_pictures_that_are_not_pictures_get_vllms_own_answer(fleet: Fleet) -> None:
    content = seen("data:image/png;base64,AAAA")
    assert fleet.server.chat(content)[0] == fleet.plain.chat(content)[0]


def test_answers_differ_by_the_picture(fleet: Fleet) -> None:
    """Or right ones would prove nothing."""
    answers = [answer(fleet.plain.chat(seen(picture()))[1]) for _ in range(2)]
    assert answers[0] != answers[1]
