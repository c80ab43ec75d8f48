"""Two real engines and a real daemon: the main job."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

from e2e.engines import NEXT, SPREAD, VERSIONS, Engine, python_of, result_of
from e2e.shared import CONTRACT, WORDS, Engines, Pictures, Plain, settle, tokens
from ecd_proto.placeholders import Placeholder
from support.daemon import Daemon
from support.waiting import eventually

pytestmark = pytest.mark.timeout(600)

PICTURES = {
    "small": [224, 224, 1],
    "wide": [448, 336, 2],
    "tall": [252, 504, 3],
    "odd": [301, 207, 4],
    "other": [448, 336, 5],
}
GRIDS = [[1, 14, 22], [1, 16, 16], [1, 24, 32], [1, 24, 32], [1, 36, 18]]


def ask(text: str, *names: str) -> dict:
    return {"text": text, "images": [PICTURES[name] for name in names]}


REQUESTS = [
    ask("what is in this picture?", "small"),
    ask("what is in this picture?", "wide"),
    ask("what is in this picture?", "tall"),
    ask("what is in this picture?", "odd"),
    ask("what is in this picture?", "other"),
    ask("and what is in the other?", "small"),
    ask("what is in this picture, and in the other?", "small", "wide"),
    ask("what is in this picture, and in the other?", "wide", "small"),
    ask("is this the other picture?", "odd", "odd"),
    ask("which picture is the other?", "tall", "odd", "other"),
    ask("which picture is the other?", "other", "small", "wide", "tall"),
    ask("what is what?"),
    ask("what is in the other?"),
    ask("what", "tall"),
]


@CONTRACT
def test_the_consumer_uses_what_the_producer_encoded(
    version: str,
    daemon: Daemon,
    engines: Engines,
    shared: Callable[..., Engine],
    plain: Plain,
    new: Pictures,
) -> None:
    """Entries and answers say what a consumer needs to skip preprocessing; leases come back."""
    producer, consumer = shared("ec_producer"), shared("ec_consumer")
    requests = new.redrawn(REQUESTS)
    expected = plain.generate(requests)
    assert len({tuple(t) for t in tokens(expected)}) > 5, "the tokens must depend on the pictures"
    before = consumer.metrics()
    assert producer.generate(requests, max_tokens=1)["encoded"] == len(PICTURES)
    eventually(lambda: daemon.status().entries == len(PICTURES), "every picture stored")
    assert all(entry.content.cost_s > 0 for entry in daemon.entries())
    consumed = consumer.generate(requests)
    assert tokens(consumed) == tokens(expected)
    assert consumed["encoded"] == 0, "the consumer's encoder ran"
    assert producer.alive, "both engines live at one time"

    replies = producer.generate(requests, max_tokens=1)["outputs"]
    params = [output["ec_transfer_params"] or {} for output in replies]
    two = [list(item["item_indices"]) for item in params[6].values()]
    assert two == [[0], [1]]
    announced = {name: item["metadata"] for each in params for name, item in each.items()}
    carried = {
        entry.key.mm_hash: Placeholder.unpack(entry.content.metadata) for entry in daemon.entries()
    }
    assert sorted(each.fields["image_grid_thw"] for each in carried.values() if each) == GRIDS
    if version == "0.28.0":  # whose server takes no metadata as JSON
        assert not any(announced.values())
        assert consumer.metrics() == {}, "vLLM 0.28 asks no connector for its counters"
    else:
        said = {name: Placeholder.of("image", fields) for name, fields in announced.items()}
        assert carried == said
        counted = {name: n - before.get(name, 0) for name, n in consumer.metrics().items()}
        assert counted["hits"] >= counted["loads"] == len(PICTURES)
        assert counted["loaded_bytes"] > 0
        assert counted.get("failures", 0) == 0
    consumer.generate([WORDS])  # a step more, which brings the workers' reports
    eventually(lambda: daemon.status().leases == 0, "leases of finished requests")


@CONTRACT
def test_one_copy_on_the_node_for_engines_and_tensor_parallel_ranks(
    daemon: Daemon,
    engines: Engines,
    shared: Callable[..., Engine],
    start_engine: Callable[..., Engine],
    new: Pictures,
) -> None:
    requests = new.redrawn(REQUESTS)
    shared("ec_producer").generate(requests, max_tokens=1)
    eventually(lambda: daemon.status().entries == len(PICTURES), "every picture stored")
    before = daemon.status()
    engine = start_engine(
        "ec_both",
        tensor_parallel_size=2,
        environ=SPREAD,
    ).wait_ready()
    eventually(lambda: daemon.status().sessions == before.sessions + 3, "a session of each part")
    reply = engine.generate([*requests, new.request()])
    # Two ranks sum in another order than one, so their tokens are compared with their own.
    assert all(output["finish_reason"] == "length" for output in reply["outputs"])
    eventually(lambda: daemon.status().entries == before.entries + 1, "the new picture")
    after = daemon.status()
    assert after.counters.puts == before.counters.puts + 1
    assert after.counters.duplicates == before.counters.duplicates
    assert after.counters.hits >= before.counters.hits + len(PICTURES)
    engine.generate([WORDS])
    settle(daemon, engines)  # once both ranks have loaded


def test_deepstack_embeddings_are_wider_than_the_hidden_size(
    version: str,
    daemon: Daemon,
    engines: Engines,
    start_engine: Callable[..., Engine],
    new: Pictures,
) -> None:
    requests = new.redrawn(REQUESTS)
    how = {"kind": "qwen3_vl", "dtype": "bfloat16"}  # as models are run, and other tests' are not
    expected = Plain(engines, version, **how).generate(requests)
    assert tokens(expected)[1] != tokens(expected)[4], "two pictures must give two answers"
    engine = start_engine("ec_both", **how)
    assert tokens(engine.generate(requests)) == tokens(expected)
    eventually(lambda: daemon.status().entries == len(PICTURES))
    assert {entry.content.shape[1] for entry in daemon.entries()} == {3 * 128}
    engine.do("forget")
    loaded = engine.generate(requests)
    assert (tokens(loaded), loaded["encoded"]) == (tokens(expected), 0)


@CONTRACT
def test_the_order_of_the_second_model_runner(
    daemon: Daemon, version: str, model_of: Callable[[str], Path]
) -> None:
    """Its connector code, as it is; `test_ways.py` runs whole engines of 0.32 with it."""
    before = daemon.status().counters.puts
    encoded, stored, reused, resumed, private, counted = result_of(
        version, "v2_order.py", daemon.address, str(model_of("qwen2_5_vl"))
    )
    assert (encoded["promised"], encoded["loaded"]) == (False, False)
    assert stored == {"stored": encoded["sum"], "shape": [8, 128]}
    assert reused == {"promised": True, "loaded": True, "sum": encoded["sum"]}
    assert resumed == {"ready": True, "promised": True}, "what a resumable request adds is seen"
    assert (private["promised"], private["loaded"]) == (False, False)
    assert daemon.status().counters.puts == before + 2, "what was loaded is not saved again"
    stats = counted["stats"]
    assert (stats["hits"], stats["misses"]) == (1, 1)
    if version != "0.28.0":  # its workers report no counts
        assert (stats["saves"], stats["loads"]) == (1, 1)
    eventually(lambda: daemon.status().leases == 0)


@CONTRACT
def test_nothing_that_a_request_says_or_does_ends_the_scheduler(
    daemon: Daemon, version: str, model_of: Callable[[str], Path]
) -> None:
    what = "scheduler_seams.py", daemon.address, str(model_of("qwen2_5_vl"))
    done = result_of(version, *what, VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=str(10**10))
    left = done.pop("left over")
    assert set(done.pop("names in answers")) == {"a", "of a tenant"}
    described = {name: done.pop(name) for name in list(done) if ": " in name and name[0] in "mb"}
    if version != "0.28.0":  # which takes no metadata as JSON
        assert done.pop("what was brought is looked up") is False
        assert done.pop("what was brought is stored") is False
        is_counted = version == NEXT  # and would be counted anew without what was fetched
        first = "whole" if is_counted else "data:"
        assert done.pop("fetched") == [False, first, "absen", "slow"]
        assert done.pop("the middleware is connected") is True
        assert done.pop("served as the middleware begins") == ["a client", "a hop"]
        prompts = {name: done.pop(name) for name in list(done) if "prompt's embeddings" in name}
        assert len(prompts) == 4
        assert not any(prompts.values()), prompts
        assert {name for name, end in described.items() if end == "goes on"} == {
            "metadata: right",
            "metadata: by tokens, of 1.0 s",
            "metadata: by tokens, on the CPU",
            "metadata: none, and M-RoPE: False",
            "brought embeddings: right",
            "brought embeddings: right, a video",
            "brought embeddings: right, without an encoder",
            "brought prompt: right",
        }
        may_come = {name for name, may in described.items() if may is True}
        assert may_come == {"may come: right", "may come: embeddings"}
        assert len(described) == 42
        announced = [done.pop(name) for name in list(done) if name.startswith("announced")]
        assert announced == [{"image_grid_thw": [1, 4, 8]}, {}, {}]
        assert done.pop("numbers that are read of a field of 29,997") == 0
        assert done.pop("tokens to be loaded") == "goes on"
        goes_on, fails = ["goes on", True], ["fails", False]
        tokens = {name: done.pop(name) for name in list(done) if name.startswith("tokens of")}
        assert tokens == {
            "tokens of others, computed": [fails, goes_on, fails],
            "tokens of others, computed, and evicted": [fails, goes_on, fails],
            "tokens of others, computed, without metadata": [fails, fails, fails],
            "tokens of others, computed in two ways": ["goes on", False],
            "tokens of others, of a half": [fails, ["fails", True]],
            "tokens of others, a video of 0.5 s": False,
            "tokens of others, a video of 1.0 s": True,
            "tokens of others, before a preemption": "goes on",
            "tokens of others, after it": False,
            "tokens of others, with media": goes_on,
            "tokens of others, of an engine that prefills": [goes_on, fails, fails],
            "tokens of others, and those to be loaded": [goes_on, fails],
            "tokens of others, where none could be loaded": False,
        }
    assert done == {
        "what loads may take is said": 1,
        "blocks of an answer, of None": [3, True],
        "blocks of an answer, of one": [3, True],
        "blocks of a request that vLLM made in another way": [],
        "a name alone, of None": "goes on",
        "a name alone, of one": "goes on",
        "a name alone, of other": "fails",
        **{
            f"the hint of a request of {salt}": ["10.0.0.1:9465"] for salt in (None, "one", "other")
        },
        "given to a load before weights changed": "fails",
        "a report of before the last move is ignored": True,
        "a report of this move is not": True,
        "reports go to another engine": False,
        "loads while none is reported": [True, False, True],
        "and that is said": True,
        "a lost load ends without a step": True,
        "and lets go of its item": True,
        "locked while its step runs": True,
        "sound that is whole is had": True,
        "sound that is of a stream is had": False,
        "and not for long after that": True,
        "goes on while another encodes": False,
        "once that is stored": ["goes on", True],
        "locked by one that does not begin": True,
        "another takes over from it": [True, True],
        "and stores for it": ["goes on", True],
        "stored after the answer": ["goes on", True],
        "another node encodes it, known after the question": [False, False],
        "once that has ended": ["goes on", True],
        "another node encodes it, known before the question": [False, False],
        "once it has waited long enough": "goes on",
        "items that came in vain": 1,
        "shown, and not stored": True,
        "goes on without it": True,
        "waits for another node": True,
        "what it said is taken back with its request": ["left alone"],
        "media of another size than the entry": "goes on",
        "one request with both": "fails",
        "names that are no text": "fails",
        "finishes with the name ec_items": True,
        "finishes with the name ecd: gone when this cache is emptied": True,
    }
    assert left == [0, 0, 0]
    eventually(lambda: daemon.status().leases == 0)


@CONTRACT
def test_what_a_step_encodes_is_left_to_this_engine_by_others(
    daemon: Daemon, version: str, model_of: Callable[[str], Path]
) -> None:
    models = str(model_of("qwen2_5_vl")), str(model_of("eagle"))
    done = result_of(version, "scheduler_reach.py", daemon.address, *models)
    assert done == {
        "behind a step": {"encoded": [], "locked": []},
        "behind a step, with EAGLE": {"encoded": [0], "locked": [0]},
        "further behind it": {"encoded": [], "locked": []},
        "further, with modules of MTP": {"encoded": [0], "locked": [0]},
        "more embeddings than a step's tokens": {"encoded": [0, 1], "locked": [0, 1]},
    }


@CONTRACT
def test_each_worker_that_loads_has_a_number_of_its_own(version: str) -> None:
    """In tensor, pipeline, prefill context, decode context and data parallelism of such sizes."""
    assert result_of(version, "rank_layout.py") == {
        sizes: [[list(range(loading))] * engines, loading]
        for sizes, (loading, engines) in {
            "1 1 1 1 1": (1, 1),
            "4 1 1 1 1": (4, 1),
            "2 2 1 1 1": (2, 1),
            "2 2 1 1 2": (2, 2),
            "4 1 1 2 1": (4, 1),
            "4 2 1 4 1": (4, 1),
            "1 1 2 1 1": (2, 1),
            "2 2 2 1 1": (4, 1),
            "2 1 4 4 1": (8, 1),
            "2 2 2 4 1": (4, 1),
        }.items()
    }


@CONTRACT
def test_a_step_waits_for_no_save_after_a_late_one_until_one_is_in_time(version: str) -> None:
    """In seconds of a clock that the script holds: a step waits for 0.1 s at most."""
    assert result_of(version, "worker_seams.py") == {
        "late, and then in time": [0.1, 0.0, 0.06],
        "late again and again": [0.1, 0.0, 0.0],
        "in time": [0.06, 0.06],
    }


@pytest.mark.parametrize("version", VERSIONS, indirect=True, scope="session")
def test_the_client_changes_no_package_of_vllm(version: str) -> None:
    python = python_of(version)
    before = (python.parents[1] / "before-ecd.txt").read_text().splitlines()
    [packages] = python.parents[1].glob("lib/python3*/site-packages")
    found = {each.metadata["Name"]: each.version for each in distributions(path=[str(packages)])}
    assert found.pop("encoder-cache-daemon")
    now = {f"{name}=={version}" for name, version in found.items()}
    tools = {f"{name}=={found[name]}" for name in ("pip", "setuptools") if name in found}
    assert now - tools == set(before) - tools
    assert any(line.startswith("grpcio==") for line in now)
