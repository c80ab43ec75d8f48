"""The names of items that one tenant, or one client, alone may use."""

from __future__ import annotations

import copy
import itertools
import pickle
from types import SimpleNamespace

import pytest

from ecd_client.vllm.base.names import ALONE, SALTED, is_alone, name_apart, outer_name, stored_name
from ecd_proto.contract import shown


def item(name: str, *fields: str, modality: str = "image") -> SimpleNamespace:
    data = {field: SimpleNamespace(data=1) for field in fields}
    return SimpleNamespace(identifier=name, modality=modality, data=data or None)


def named(feature: SimpleNamespace, salt: str | None) -> str:
    name_apart(feature, salt)
    once = feature.identifier
    name_apart(feature, salt)  # the item of another request that vLLM made of the same
    for other in (copy.copy(feature), copy.deepcopy(feature), pickle.loads(pickle.dumps(feature))):
        name_apart(other, salt)
        assert other.identifier == once
    assert feature.identifier == once
    return once


def test_a_tenants_names_are_its_own() -> None:
    names = [named(item("a"), salt) for salt in (None, "", "one", "other", "\ud800")]
    assert names[:2] == ["a", "a"]
    assert len(set(names)) == 4
    assert [outer_name(name) for name in names] == ["a"] * 5
    assert not any(map(is_alone, names))
    assert stored_name("a", "one") == names[2]


def test_an_item_that_is_private_is_never_another_engines() -> None:
    names = []
    for salt in (None, "one"):
        for fields in ((), ("image_embeds",)):
            private = item("a", *fields)
            name_apart(private, salt, is_private=True)
            assert is_alone(private.identifier)
            assert outer_name(private.identifier) == "a"
            assert is_alone(named(item(private.identifier), None))
            names += [private.identifier, named(item("a", *fields), salt)]
    brought = [name for name in names if names.count(name) > 1]
    assert len(set(names)) == 6, "what a client brought is named so, private or not"
    assert set(brought) == {named(item("a", "image_embeds"), salt) for salt in (None, "one")}


def test_names_of_digests_are_numbers_that_differ_in_their_last_digits() -> None:
    """A connector for KV may look at nothing else (LMCache)."""
    ways = "ab", (None, "one", "other"), ((), ("image_embeds",)), (False, True)
    identifiers = set()
    for last, salt, fields, is_private in itertools.product(*ways):
        digest = item("0123456789abcdef" * 4 + last, *fields)
        name_apart(digest, salt, is_private=is_private)
        identifiers.add(digest.identifier)
    assert len(identifiers) == len({int(each, 16) & 0xFFFF for each in identifiers}) == 18


def test_no_name_that_a_client_chooses_is_a_tenants() -> None:
    guessed = stored_name("a", "one")
    assert is_alone(named(item(guessed), None))
    assert is_alone(stored_name(guessed, None))
    assert named(item(guessed), "other") != guessed
    assert named(item(guessed), "one") == stored_name(guessed, "one") != guessed


def test_no_two_items_have_one_identifier_whatever_a_client_calls_them() -> None:
    """Each round takes the identifiers of the last for names, as who has seen or computed them."""
    names = ["a", "b0a", "d0a", SALTED, ALONE, *(f"{ALONE}{kind}" for kind in ("00", "b0", "d0a"))]
    for _ in range(2):
        given: dict[str, tuple[str, str | None, bool]] = {}
        ways = itertools.product(dict.fromkeys(names), (None, "one", "other"), (False, True))
        for name, salt, is_brought in ways:
            identifier = named(item(name, *(["image_embeds"] if is_brought else [])), salt)
            assert identifier not in given
            given[identifier] = name, salt, is_brought
            assert outer_name(identifier) == name
            if not is_brought:
                assert identifier == stored_name(name, salt)
            if is_brought:
                assert is_alone(identifier)
        names += given


@pytest.mark.parametrize("modality", ["image", "video", "audio", "prompt_embeds"])
@pytest.mark.parametrize("salt", [None, "one"])
def test_embeddings_that_a_client_brought_have_no_pictures_name(
    modality: str, salt: str | None
) -> None:
    """vLLM calls those of a prompt's part (`--enable-prompt-embeds`) otherwise."""
    field = "embedding" if modality == "prompt_embeds" else f"{modality}_embeds"
    brought = named(item("a", field, modality=modality), salt)
    assert is_alone(brought)
    assert brought not in ("a", stored_name("a", salt))
    assert outer_name(brought) == "a"
    other = named(item("a", field, modality=modality), "another")
    assert other != brought


def test_a_processors_own_fields_are_no_embeddings() -> None:
    assert named(item("a", "input_image_embeds", "pixel_values"), None) == "a"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a" * 128, "a" * 128),
        ("a" * 5000, f"{'a' * 128}... (5,000 characters)"),
        ("a\nERROR forged \ud800", "a\\nERROR forged \\ud800"),
    ],
)
def test_a_name_is_short_and_one_line_in_messages(name: str, said: str) -> None:
    assert shown(name) == said
