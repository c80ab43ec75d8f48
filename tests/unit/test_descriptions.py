"""What engines say of themselves, and which of them are apart by mistake."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from ecd.base.clock import Clock
from ecd.core.model.types import SessionId
from ecd.rpc.cache.engines import Engines
from ecd_proto.encoders import MAX_ENCODERS, RegisteredEncoder
from ecd_proto.engines import MAX_ENGINES, MAX_PARTS, Engine, advice, difference, lonely, nearest
from ecd_proto.findings import DOUBTFUL, GOOD, engines
from ecd_proto.v1 import cache_pb2 as pb

PARTS = {"model": "aa", "dtype": "bfloat16", "vllm": "0.32.0", "code": "bb", "weights": "cc"}
ENCODER = Engine("encoder", "m", "n", True, False, PARTS, "image", 1)
CONSUMER = Engine("consumer", "m", "n", False, True, PARTS, "image", 2)


def other(engine: Engine, namespace: str = "other", **parts: str | None) -> Engine:
    """The engine with other parts, of which None leaves one out."""
    made = {name: value for name, value in {**engine.parts, **parts}.items() if value is not None}
    return replace(engine, namespace=namespace, parts=made)


def test_the_parts_that_differ_are_named_with_what_makes_both_equal() -> None:
    apart = other(ENCODER, dtype="float32", mm_processor_kwargs="ff", code="dd")
    assert difference(CONSUMER, apart) == "code, dtype (bfloat16 and float32), mm_processor_kwargs"
    said = advice(CONSUMER, apart)
    assert said.startswith("start both with the same dtype, mm_processor_kwargs; run one version")
    assert said.endswith("an ecd_namespace for each to keep them apart")


@pytest.mark.parametrize(
    ("parts", "differ"),
    [
        ({"ecd_namespace": "ff"}, ["ecd_namespace"]),
        ({"ecd_namespace": "ff", "model": None, "dtype": None}, ["ecd_namespace"]),
        ({"ecd_code_version": "ff", "vllm": None, "code": None}, ["ecd_code_version"]),
        ({"ecd_weights_version": "ff", "weights": None}, ["ecd_weights_version"]),
        ({"weights": "dd", "vllm": "0.33.0"}, ["vllm", "weights"]),
    ],
)
def test_what_an_operator_chose_stands_for_all_that_it_replaces(
    parts: dict[str, str | None], differ: list[str]
) -> None:
    apart = other(ENCODER, **parts)
    assert CONSUMER.differs_from(apart) == apart.differs_from(CONSUMER) == differ


def test_namespaces_that_differ_in_no_part_are_to_be_compared_in_the_logs() -> None:
    assert "namespaces in their logs" in difference(CONSUMER, other(ENCODER))


@pytest.mark.parametrize(
    ("encoder", "is_apart"),
    [
        (other(ENCODER, dtype="float32"), True),
        (replace(other(ENCODER, dtype="float32"), model="its alias"), True),
        (replace(other(ENCODER, model="dd"), model="a copy of equal weights"), True),
        (replace(other(ENCODER, model="dd", weights="dd"), model="another"), False),
        (ENCODER, False),
        (replace(other(ENCODER), stores=False), False),
        (replace(other(ENCODER), id="consumer"), False),
    ],
)
def test_one_who_loads_is_apart_from_one_of_its_model_who_stores_elsewhere(
    encoder: Engine, is_apart: bool
) -> None:
    assert CONSUMER.may_be_apart_from(encoder) == is_apart
    assert not encoder.may_be_apart_from(CONSUMER), "it loads nothing"


def test_two_namespaces_that_an_operator_chose_are_meant_to_differ() -> None:
    ours, theirs = other(CONSUMER, ecd_namespace="aa"), other(ENCODER, "b", ecd_namespace="bb")
    assert not ours.may_be_apart_from(theirs)
    assert CONSUMER.may_be_apart_from(theirs), "one of them alone may have been forgotten"


def test_an_engine_has_company_in_another_of_its_namespace_that_stores() -> None:
    both = replace(ENCODER, id="both", loads=True)
    assert lonely([CONSUMER, ENCODER]) == []
    assert lonely([both, replace(both, pid=9), ENCODER]) == []
    assert lonely([both, replace(both, pid=9)]) == [both, replace(both, pid=9)], "its own ranks"
    assert lonely([CONSUMER, replace(CONSUMER, id="third"), other(ENCODER)]) == [
        CONSUMER,
        replace(CONSUMER, id="third"),
    ]


def test_the_engine_is_named_that_differs_least() -> None:
    near, far = other(ENCODER, dtype="float32"), other(ENCODER, dtype="float32", code="dd")
    assert nearest(CONSUMER, [far, near, ENCODER]) is near
    assert nearest(CONSUMER, [ENCODER]) is None


# -- the door --------------------------------------------------------------------------------------


def test_a_description_survives_its_message() -> None:
    assert Engine.of(ENCODER.message, ENCODER.pid) == ENCODER
    assert Engine.of(ENCODER.status.engine, ENCODER.status.pid) == ENCODER


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": ""},
        {"id": "../.."},
        {"id": "x" * 65},
        {"model": "two\nlines"},
        {"model": "\x1b[31mred"},
        {"model": "m" * 1025},
        {"namespace": ""},
        {"namespace": "n" * 1025},
        {"namespace": "two\nlines"},
        {"namespace": "\x1b[31mred"},
        {"shares": "s" * 1025},
        {"shares": "\u202eback"},
        {"parts": {"": "x"}},
        {"parts": {"a b": "x"}},
        {"parts": {"a\n": "x"}},
        {"parts": {"a" * 65: "x"}},
        {"parts": {"a": ""}},
        {"parts": {"a": "/a/path"}},
        {"parts": {"a": "x\n"}},
        {"parts": {"a": "x" * 65}},
        {"parts": {f"a{number}": "x" for number in range(MAX_PARTS + 1)}},
    ],
)
def test_a_description_of_another_form_is_none(wrong: dict) -> None:
    assert Engine.of(pb.Engine(**{"id": "i", "namespace": "n", **wrong})) is None


# -- the daemon's books ----------------------------------------------------------------------------


def arrive(books: Engines, number: int, engine: Engine) -> dict[int, int]:
    """The sessions that are told, and the pids of the engines of which each is told."""
    assert books.describe(SessionId(number), engine)
    return {told: apart.pid for told, apart in books.told_by_arrival(SessionId(number))}


APART = other(ENCODER, dtype="float32")


@pytest.mark.parametrize(
    "order", list(permutations((CONSUMER, APART, replace(CONSUMER, id="third"))))
)
def test_each_lonely_engine_is_told_once_whoever_comes_first(order: tuple[Engine, ...]) -> None:
    books = Engines(Clock())
    told = [arrive(books, number, engine) for number, engine in enumerate(order)]
    consumers = {number for number, engine in enumerate(order) if engine is not APART}
    assert {session: pid for each in told for session, pid in each.items()} == dict.fromkeys(
        consumers, APART.pid
    )
    assert sum(map(len, told)) == len(consumers)
    assert arrive(books, 9, replace(APART, id="fourth", pid=7)) == {}


def test_nobody_with_company_is_told() -> None:
    books = Engines(Clock())
    assert [arrive(books, n, e) for n, e in enumerate((ENCODER, CONSUMER, APART))] == [{}, {}, {}]
    assert arrive(books, 3, replace(APART, id="both", loads=True)) == {}


def test_an_engine_that_has_left_is_nobodys_company() -> None:
    books = Engines(Clock())
    arrive(books, 1, ENCODER)
    arrive(books, 2, CONSUMER)
    books.forget(SessionId(1))
    assert books.statuses() == [CONSUMER.status]
    assert arrive(books, 3, APART) == {2: APART.pid}
    books.forget(SessionId(2))
    assert arrive(books, 4, replace(CONSUMER, pid=5)) == {4: APART.pid}


def test_descriptions_are_bounded_and_those_known_may_change() -> None:
    books = Engines(Clock())
    for number in range(MAX_ENGINES):
        assert books.describe(SessionId(number), replace(ENCODER, id=str(number)))
    assert not books.describe(SessionId(MAX_ENGINES), CONSUMER)
    assert books.describe(SessionId(0), APART)
    assert len(books.statuses()) == MAX_ENGINES
    books.forget(SessionId(MAX_ENGINES))  # which is not known
    books.forget(SessionId(1))
    assert books.describe(SessionId(MAX_ENGINES), CONSUMER)


# -- doctor ----------------------------------------------------------------------------------------


def doctor(*described: Engine) -> list[tuple[str, str]]:
    status = pb.StatusReply(engines=[each.status for each in described])
    return [(finding.state, finding.found) for finding in engines(status)]


def test_doctor_names_both_engines_and_what_parts_them_once_for_two_namespaces() -> None:
    [(state, found)] = doctor(CONSUMER, replace(CONSUMER, id="third", pid=3), APART)
    assert state == DOUBTFUL
    assert "pid 2 finds nothing of what pid 1 stores for one model (m)" in found
    assert "dtype (bfloat16 and float32)" in found
    both = [replace(each, stores=True, loads=True) for each in (CONSUMER, APART)]
    assert len(doctor(*both)) == 1


def test_doctor_names_an_engine_that_shares_nothing() -> None:
    alone = replace(CONSUMER, loads=False, shares="nothing: it takes no media")
    assert doctor(alone, ENCODER) == [(DOUBTFUL, "pid 2 shares nothing: it takes no media")]


def test_doctor_finds_engines_in_order_that_share() -> None:
    assert doctor() == []
    both = replace(ENCODER, loads=True)
    [(state, found)] = doctor(ENCODER, CONSUMER, replace(ENCODER, pid=4), both)
    assert (state, found) == (GOOD, "2 engines: none is kept from what another one stores")


def test_an_encoder_is_what_its_engine_says_for_as_long_as_both_are_there() -> None:
    engines, engine, server = Engines(Clock(), "Node-1:9465"), SessionId(1), SessionId(2)
    assert engines.register(server, RegisteredEncoder("encoder", "http://[::]:8000/e"))
    assert engines.encoders() == [], "nothing describes the engine"
    engines.describe(engine, ENCODER)
    [found] = engines.encoders()
    assert (found.engine, found.namespace, found.loads) == ("encoder", "n", False)
    assert found.url == "http://node-1:8000/e"
    assert RegisteredEncoder.of(found.message) == found, "other nodes accept it"
    engines.describe(engine, replace(ENCODER, namespace="other", loads=True))
    [found] = engines.encoders()
    assert (found.namespace, found.loads) == ("other", True), "it moves with the engine"
    engines.describe(engine, replace(ENCODER, stores=False))
    assert engines.encoders() == [], "it shares nothing now"
    engines.describe(engine, ENCODER)
    engines.forget(server)
    assert engines.encoders() == []
    engines.register(server, RegisteredEncoder("encoder", "http://0.0.0.0:8000"))
    engines.forget(engine)
    assert engines.encoders() == []


def test_servers_that_register_are_bounded_and_one_that_moves_is_no_other() -> None:
    engines = Engines(Clock())
    engines.describe(SessionId(0), ENCODER)
    for number in range(MAX_ENCODERS):
        encoder = RegisteredEncoder("encoder", f"http://0.0.0.0:{8000 + number}")
        assert engines.register(SessionId(number), encoder)
    more = RegisteredEncoder("encoder", "http://0.0.0.0:1")
    assert not engines.register(SessionId(MAX_ENCODERS), more)
    assert engines.register(SessionId(0), more)
    assert engines.encoders()[0].url == "http://127.0.0.1:1", "no other node reaches this one"
