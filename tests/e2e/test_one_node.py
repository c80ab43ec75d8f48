"""Two real engines and a real daemon: the main job."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

from e2e.engines import Engine, python_of, result_of
from ecd_client.placeholders import unpack
from support.daemon import Daemon, eventually

pytestmark = pytest.mark.timeout(600)

PICTURES = {
    "small": [224, 224, 1],
    "wide": [448, 336, 2],
    "tall": [252, 504, 3],
    "odd": [301, 207, 4],
    "other": [448, 336, 5],
}


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


def tokens(reply: dict) -> list[list[int]]:
    return [output["tokens"] for output in reply["outputs"]]


@pytest.fixture(scope="module")
def started(shared_daemon: Daemon) -> Daemon:
    return shared_daemon.start()


@pytest.fixture(scope="module")
def expected(plain: Engine) -> dict:
    return plain.generate(REQUESTS)


@pytest.fixture(scope="module")
def producer(started: Daemon, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine("ec_producer")


@pytest.fixture(scope="module")
def produced(started: Daemon, producer: Engine) -> dict:
    """Every picture, encoded by the producer and stored."""
    reply = producer.generate(REQUESTS, max_tokens=1)
    eventually(lambda: started.status().entries == len(PICTURES), what="every picture stored")
    assert all(entry.content.cost_s > 0 for entry in started.entries())
    return reply


@pytest.fixture(scope="module")
def consumer(started: Daemon, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine("ec_consumer")


def test_the_consumer_uses_what_the_producer_encoded(
    producer: Engine, consumer: Engine, expected: dict, produced: dict
) -> None:
    assert expected["encoded"] > 0
    assert len({tuple(t) for t in tokens(expected)}) > 5, "the tokens must depend on the pictures"
    assert produced["encoded"] == len(PICTURES)
    consumed = consumer.generate(REQUESTS)
    assert tokens(consumed) == tokens(expected)
    assert consumed["encoded"] == 0, "the consumer's encoder ran"
    assert producer.alive, "both engines live at one time"


def test_each_item_says_what_a_consumer_needs_to_skip_preprocessing(
    producer: Engine, version: str
) -> None:
    reply = producer.generate([ask("what", "small", "wide")], max_tokens=1)
    params = reply["outputs"][0]["ec_transfer_params"]
    assert [item["item_indices"] for item in params.values()] == [[0], [1]]
    grids = [item["metadata"].get("image_grid_thw") for item in params.values()]
    # The server of vLLM 0.28 takes no metadata as JSON.
    assert [grid and len(grid) for grid in grids] == [None if version == "0.28.0" else 3] * 2


def test_every_entry_carries_what_sizes_its_placeholder(
    started: Daemon, producer: Engine, version: str, produced: dict
) -> None:
    reply = producer.generate([ask("what", name) for name in PICTURES], max_tokens=1)
    announced = {
        name: item["metadata"]
        for output in reply["outputs"]
        for name, item in output["ec_transfer_params"].items()
    }
    carried = {entry.key.mm_hash: unpack(entry.content.metadata) for entry in started.entries()}
    grids = [fields["image"]["image_grid_thw"] for fields in carried.values()]
    assert sorted(grids) == sorted(
        [[1, 16, 16], [1, 24, 32], [1, 36, 18], [1, 14, 22], [1, 24, 32]]
    )
    if version != "0.28.0":  # which announces none
        assert carried == {name: {"image": fields} for name, fields in announced.items()}


def test_leases_are_given_back_when_the_requests_are_over(
    started: Daemon, consumer: Engine, produced: dict
) -> None:
    consumer.generate([ask("which picture is the other?", "tall", "odd")])
    consumer.generate([ask("what is what?")])  # a step more, which brings the workers' reports
    eventually(lambda: started.status().leases == 0, what="leases of finished requests")


def test_the_counters_reach_the_metrics_of_vllm(
    consumer: Engine, version: str, produced: dict
) -> None:
    consumer.generate(REQUESTS)
    if version == "0.28.0":
        assert consumer.metrics() == {}, "vLLM 0.28 asks no connector for its counters"
        return
    metrics = consumer.metrics()
    assert metrics["hits"] >= len(PICTURES)
    assert metrics["loads"] >= len(PICTURES)
    assert metrics["loaded_bytes"] > 0
    assert metrics.get("failures", 0) == 0


def test_one_copy_on_the_node_for_engines_and_tensor_parallel_ranks(
    started: Daemon, start_engine: Callable[..., Engine], produced: dict
) -> None:
    before = started.status()
    engine = start_engine(
        "ec_both",
        tensor_parallel_size=2,
        environ={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    new = {"text": "what is in this picture?", "images": [[336, 336, 77]]}
    reply = engine.generate([*REQUESTS, new])
    # Two ranks sum in another order than one, so their tokens are compared with their own.
    assert all(output["finish_reason"] == "length" for output in reply["outputs"])
    eventually(lambda: started.status().entries == before.entries + 1, what="the new picture")
    after = started.status()
    assert after.counters.puts == before.counters.puts + 1
    assert after.counters.duplicates == before.counters.duplicates
    assert after.counters.hits >= before.counters.hits + len(PICTURES)
    engine.generate([ask("what is what?")])
    eventually(lambda: started.status().leases == 0, what="leases, once both ranks had loaded")


def test_deepstack_embeddings_are_wider_than_the_hidden_size(
    started: Daemon, start_engine: Callable[..., Engine]
) -> None:
    plain = start_engine(kind="qwen3_vl")
    expected = plain.generate(REQUESTS)
    plain.close()
    assert tokens(expected)[1] != tokens(expected)[4], "two pictures must give two answers"
    started.evict_all()
    producer = start_engine("ec_producer", kind="qwen3_vl")
    producer.generate(REQUESTS, max_tokens=1)
    producer.close()
    assert started.status().entries == len(PICTURES)
    consumer = start_engine("ec_consumer", kind="qwen3_vl")
    consumed = consumer.generate(REQUESTS)
    assert tokens(consumed) == tokens(expected)
    assert consumed["encoded"] == 0


def test_the_order_of_the_second_model_runner(
    started: Daemon, version: str, model_of: Callable[[str], Path]
) -> None:
    """V2 runs only on GPUs; its connector code is driven here as it is."""
    started.evict_all()
    before = started.status().counters.puts
    encoded, stored, reused, resumed, private, counted = result_of(
        version, "v2_order.py", started.address, str(model_of("qwen2_5_vl"))
    )
    assert (encoded["promised"], encoded["loaded"]) == (False, False)
    assert stored == {"stored": encoded["sum"], "shape": [8, 128]}
    assert reused == {"promised": True, "loaded": True, "sum": encoded["sum"]}
    assert resumed == {"ready": True, "promised": True}, "what a resumable request adds is seen"
    assert (private["promised"], private["loaded"]) == (False, False)
    assert started.status().counters.puts == before + 2, "what was loaded is not saved again"
    stats = counted["stats"]
    assert (stats["hits"], stats["misses"]) == (1, 1)
    if version != "0.28.0":  # its workers report no counts
        assert (stats["saves"], stats["loads"]) == (1, 1)
    eventually(lambda: started.status().leases == 0)


def test_nothing_that_a_request_says_or_does_ends_the_scheduler(
    started: Daemon, version: str, model_of: Callable[[str], Path]
) -> None:
    done = result_of(version, "scheduler_seams.py", started.address, str(model_of("qwen2_5_vl")))
    left = done.pop("left over")
    assert done == {
        "given to a load before weights changed": "fails",
        "a report of before the last move is ignored": True,
        "a report of this move is not": True,
        "media of another size than the entry": "goes on",
        "one request with both": "fails",
        "names that are no text": "fails",
        "finishes with the name ec_items": True,
        "finishes with the name ecd: gone when this cache is emptied": True,
    }
    assert left == [0, 0, 0]
    eventually(lambda: started.status().leases == 0)


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
