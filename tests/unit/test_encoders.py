"""The choice of an encoder, by active tokens and health, and what is believed of encoders.

The time is an argument.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ecd_client.errors import InvalidArgument
from ecd_client.vllm.middleware.hop.encoders import RESTS, Encoder, EncoderPool, urls_in
from ecd_client.vllm.middleware.hop.registered import URL_VARIABLE, server_url, urls_of
from ecd_proto.encoders import MAX_URL_BYTES, RegisteredEncoder
from ecd_proto.v1 import cache_pb2 as pb

FIRST_S, LONGEST_S = RESTS


def two() -> tuple[EncoderPool, Encoder, Encoder]:
    encoders = EncoderPool(["http://a:1", "http://b:1"])
    first = encoders.choose(1, (), 0.0)
    second = encoders.choose(1, (), 0.0)
    assert first is not None
    assert second is not None
    encoders.release(first, 1)
    encoders.release(second, 1)
    return encoders, first, second


@pytest.mark.parametrize(
    ("said", "urls"),
    [
        ("", []),
        (" , ", []),
        (" http://e1:8000/ ,https://e2", ["http://e1:8000", "https://e2:443"]),
        ("http://E1,http://e1:80,HTTP://e1/", ["http://e1:80"]),
        ("http://[::1]:8000,http://[0:0::1]:8000", ["http://[::1]:8000"]),
        ("http://gateway/e1/,http://gateway/e2", ["http://gateway:80/e1", "http://gateway:80/e2"]),
    ],
)
def test_urls_are_read_in_one_form_and_taken_once(said: str, urls: list[str]) -> None:
    assert urls_in(said) == urls


@pytest.mark.parametrize(
    "said",
    [
        *("e1:8000", "e1", "http://", "ftp://e1", "http://e1:port", "http://e1:70000", "://e1"),
        *("http://e1 http://e2", "http://e1;http://e2", "http://e1?x=1", "http://e1#x"),
        *("http://[::1", "http://[x]:1", "http://e 1", "http://e1\\x"),
    ],
)
def test_a_url_that_is_none_is_named(said: str) -> None:
    with pytest.raises(InvalidArgument, match=r"ECD_ENCODERS has .*http://encoder-1:8000"):
        urls_in(f"http://right:1,{said}")


def test_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidArgument) as refused:
        urls_in("http://user:secret@e1:8000")
    assert "secret" not in str(refused.value)


def test_the_encoder_with_the_fewest_active_tokens_is_next() -> None:
    encoders, first, second = two()
    assert encoders.choose(100, (), 0.0) is first
    assert [encoders.choose(30, (), 0.0) for _ in range(4)] == [second] * 4
    assert encoders.choose(30, (), 0.0) is first
    encoders.release(second, 120)
    assert encoders.choose(1, (), 0.0) is second
    assert encoders.choose(1, (second,), 0.0) is first
    assert encoders.choose(1, (first, second), 0.0) is None


def test_idle_encoders_take_turns() -> None:
    encoders, first, second = two()
    for expected in (first, second, first, second):
        chosen = encoders.choose(7, (), 0.0)
        assert chosen is expected
        encoders.release(chosen, 7)


def test_an_encoder_that_fails_rests_each_time_for_longer_up_to_a_bound() -> None:
    encoders, first, second = two()
    now_s, expected_s = 10.0, FIRST_S
    for _ in range(9):
        assert encoders.note_failed(first, now_s, now_s)
        assert not first.is_ready(now_s + expected_s - 0.01)
        assert encoders.choose(1, (second,), now_s) is None
        assert encoders.choose(1, (second,), now_s, in_need=True) is first
        encoders.release(first, 1)
        now_s += expected_s
        assert first.is_ready(now_s)
        expected_s = min(2 * expected_s, LONGEST_S)
    encoders.note_served(first, now_s)
    assert encoders.note_failed(first, now_s, now_s)
    assert first.rest_s == FIRST_S


def test_calls_that_fail_together_are_one_failure() -> None:
    encoders, first, _ = two()
    assert encoders.note_failed(first, 1.0, 5.0)
    assert not encoders.note_failed(first, 2.0, 5.0)
    assert not encoders.note_failed(first, 4.9, 30.0), "it began before the rest had ended"
    assert first.rest_s == FIRST_S


def test_after_its_rest_an_encoder_gets_one_picture_until_it_has_served_it() -> None:
    encoders, first, second = two()
    encoders.note_failed(first, 0.0, 0.0)
    now_s = FIRST_S
    assert encoders.choose(10, (second,), now_s) is first
    assert encoders.choose(10, (second,), now_s) is None
    encoders.note_served(first, now_s)
    assert encoders.choose(10, (second,), now_s) is first


def test_an_encoder_that_was_late_is_hurried_until_it_serves_a_long_medium_or_for_a_while() -> None:
    encoders, first, second = two()
    assert not first.is_hurried(0.0)
    encoders.note_late(first, 10.0)
    assert first.is_hurried(10.0 + LONGEST_S - 0.1)
    assert not first.is_hurried(10.0 + LONGEST_S)
    assert not second.is_hurried(10.0)
    encoders.note_served(first, 11.0)
    assert first.is_hurried(11.0), "a picture says nothing of the next video"
    encoders.note_served(first, 12.0, is_long=True)
    assert not first.is_hurried(12.0)


def test_encoders_come_and_go_and_those_that_stay_keep_their_state() -> None:
    encoders, first, second = two()
    encoders.note_failed(first, 0.0, 0.0)
    assert encoders.use([first.url, "http://c:1"], 1.0) == [second]
    assert encoders.choose(1, (), 0.5).url == "http://c:1", "the first one rests"
    assert encoders.choose(1, (), FIRST_S) is first
    assert encoders.use(["http://c:1"], 3.0, kept_s=2.0) == []
    assert encoders.use(["http://c:1"], 3.1, kept_s=2.0) == [first]
    encoders.release(first, 1)
    assert [each.url for each in encoders.use([], 4.0)] == ["http://c:1"]
    assert encoders.choose(1, (), 4.0, in_need=True) is None


def test_a_newcomer_gets_its_share_and_no_more() -> None:
    encoders, first, second = two()
    encoders.use([first.url, second.url, "http://c:1"], 1.0)
    chosen = [encoders.choose(10, (), 1.0).url for _ in range(30)]
    assert {url: chosen.count(url) for url in chosen} == dict.fromkeys(
        (first.url, second.url, "http://c:1"), 10
    )


def args(**about: Any) -> SimpleNamespace:
    """Arguments of vLLM's server: its defaults, but for these."""
    known = {"host": None, "port": 8000, "uds": None, "ssl_keyfile": None, "ssl_certfile": None}
    return SimpleNamespace(**{**known, **about})


@pytest.mark.parametrize(
    ("about", "said", "url"),
    [
        ({}, None, "http://0.0.0.0:8000"),
        ({"host": "", "port": 8100}, None, "http://0.0.0.0:8100"),
        ({"host": "::"}, None, "http://[::]:8000"),
        ({"host": "127.0.0.1"}, None, "http://127.0.0.1:8000"),
        ({"host": "10.0.0.5"}, None, "http://10.0.0.5:8000"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"}, None, "https://0.0.0.0:8000"),
        ({"root_path": "/behind/a/proxy"}, None, "http://0.0.0.0:8000"),
        ({"uds": "/run/vllm.sock"}, None, None),
        ({"port": 0}, None, None),
        ({"port": 0}, "https://Gateway/e1/", "https://gateway:443/e1"),
        ({}, "off", None),
        ({}, " ", "http://0.0.0.0:8000"),
    ],
)
def test_a_server_is_reached_where_its_arguments_or_the_variable_say(
    about: dict[str, Any], said: str | None, url: str | None
) -> None:
    assert server_url(args(**about), {} if said is None else {URL_VARIABLE: said}) == url


@pytest.mark.parametrize("said", ["10.0.0.1:8000", "http://user@e:1", "on"])
def test_a_wrong_variable_is_no_url(said: str) -> None:
    with pytest.raises(ValueError, match="http://encoder-1:8000"):
        server_url(args(), {URL_VARIABLE: said})


def test_an_engine_sends_itself_nothing_and_those_that_prefill_only_without_others() -> None:
    one, two, three = (
        RegisteredEncoder(name, f"http://{name}:1", "n", loads)
        for name, loads in (("one", False), ("two", True), ("three", True))
    )
    assert urls_of([one, two, three], "two") == [one.url]
    assert urls_of([one, two, three], "one") == [two.url, three.url]
    assert urls_of([two], "two") == []


@pytest.mark.parametrize(
    "wrong",
    [
        *({"engine": ""}, {"engine": "e" * 65}, {"engine": "e 1"}),
        *({"url": ""}, {"url": "e1:8000"}, {"url": "http://e1"}, {"url": "http://e1:1/"}),
        *({"url": "http://user@e1:1"}, {"url": "http://e1:1?x"}, {"url": "http://e1:1/\u0301"}),
        {"url": "http://e1:1/" + "x" * MAX_URL_BYTES},
        *({"url": "ftp://e1:1"}, {"url": "http://e1:70000"}, {"url": "http://e1:1/\n"}),
        *({"namespace": "n" * 1025}, {"namespace": "\x1b"}),
    ],
)
def test_an_encoder_of_another_form_is_none(wrong: dict[str, str]) -> None:
    right = {"engine": "e", "url": "http://e1:8000/path", "namespace": "n"}
    said = RegisteredEncoder.of(pb.Encoder(**right, age_s=float("nan"), active=7))
    assert said == RegisteredEncoder("e", "http://e1:8000/path", "n", active=7)
    assert RegisteredEncoder.of(said.message) == said
    assert RegisteredEncoder.of(pb.Encoder(**{**right, **wrong})) is None
