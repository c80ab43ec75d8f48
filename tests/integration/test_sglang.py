"""ecd as SGLang's global embedding cache, through the interface of SGLang's own wheel."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ecd_client import Client
from support.daemon import Daemon
from support.processes import child
from support.waiting import HANG_S, eventually
from support.warm import IMPORT_S

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs/sglang/bin/python"
NAME = "tiny@1"
ROWS = 64
CONNECT = f"{{}}._client.wait_connected({HANG_S})"
"""A store connects in the background, and what it is asked before then is a miss."""
CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "vision_config": {"depth": 2, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 128},
}


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


class Encoder:
    """A process that has SGLang's interface and evaluates expressions; see support."""

    def __init__(self, log: Path, **environ: str) -> None:
        self.log = log
        self._ours, self.theirs = socket.socketpair()
        self.arguments = [str(self.theirs.fileno()), str(log), json.dumps(environ)]
        self._lines = self._ours.makefile("rw")

    def await_ready(self) -> None:
        """Wait until SGLang is imported and has made its store."""
        self.theirs.close()
        self._ours.settimeout(IMPORT_S)
        assert self._answer("whether it is ready") == "ready"
        self._ours.settimeout(HANG_S)

    def __call__(self, expression: str) -> Any:
        print(json.dumps(expression), file=self._lines, flush=True)
        return self._answer(expression)

    def _answer(self, asked: str) -> Any:
        try:
            answer = self._lines.readline()
        except TimeoutError:
            answer = ""
        said = self.log.read_text()[-4000:] if self.log.exists() else ""
        assert answer, f"no answer to {asked}:\n{said}"
        return json.loads(answer)

    def close(self) -> None:
        self._lines.close()
        self._ours.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration; no weights are read."""
    if not (PYTHON.parents[1] / ".ready").exists():
        if os.environ.get("ECD_REQUIRE_VLLM"):
            pytest.fail("SGLang's wheel is not installed, and ECD_REQUIRE_VLLM is set")
        pytest.skip("SGLang's wheel IS NOT INSTALLED: `make vllm` says why")
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture(scope="module")
def encoders(
    model: Path, shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Encoder]]:
    """Two encoders that ask for ecd, and one that does not."""
    asked = {"ECD_SGLANG_NAMESPACE": NAME, "ECD_ADDRESS": shared_daemon.address}
    logs = tmp_path_factory.mktemp("encoders")
    made = [Encoder(logs / f"{n}.log", **(asked if n < 2 else {})) for n in range(3)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ECD_", "PYTHON"))}
    path = [ROOT, ROOT / "client", ROOT / "proto", ROOT / "tests/e2e/site"]
    arguments = [argument for encoder in made for argument in encoder.arguments]
    with child(
        [PYTHON, ROOT / "tests/support/sglang_process.py", model, str(ROWS), *arguments],
        env=kept | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        pass_fds=[encoder.theirs.fileno() for encoder in made],
    ):
        for encoder in made:
            encoder.await_ready()
        yield made
    for encoder in made:
        encoder.close()


@pytest.fixture
def one(encoders: list[Encoder], shared_daemon: Daemon) -> Encoder:
    """The first encoder, connected to a daemon that has no entry."""
    shared_daemon.evict_all()
    encoders[0](CONNECT.format("store"))
    return encoders[0]


def test_only_an_encoder_that_asks_for_ecd_gets_it(encoders: list[Encoder]) -> None:
    registered = "EmbeddingStoreFactory._registry['mooncake']['module_path']"
    own = "sglang.srt.mem_cache.storage.mooncake_store.mooncake_embedding_store"
    assert [encoder(registered) for encoder in encoders[1:]] == ["ecd_client.sglang.store", own]
    assert not encoders[2]("'ecd_client.sglang.store' in sys.modules")
    assert encoders[0]("isinstance(store, EmbeddingStore)")


def test_every_method_takes_what_sglang_passes(encoders: list[Encoder]) -> None:
    signature = "list(__import__('inspect').signature(getattr({}, {!r})).parameters)"
    methods = encoders[0](
        "[n for n, f in vars(EmbeddingStore).items() if callable(f) and n[0] != '_']"
    )
    assert "batch_get_into_multi_buffers" in methods
    for name in methods:
        theirs = encoders[0](signature.format("EmbeddingStore", name))
        assert encoders[0](signature.format("type(store)", name)) == theirs, name


def test_another_encoder_gets_the_same_bytes(one: Encoder, encoders: list[Encoder]) -> None:
    two = encoders[1]
    two(CONNECT.format("store"))
    assert two("store.batch_is_exist(['7', '8'])") == [False, False]
    assert one("put('7', (0, 5), (20, 1), (9, 2))") == [True]
    assert one("put('7', (0, 5), (20, 1), (9, 2))") == [True]  # as it is stored already
    assert two("store.batch_is_exist(['8', '7', '7'])") == [False, True, True]
    assert two("get('7', (30, 7), (3, 1))") == [True]
    assert two("is_put((30, 7), (3, 1))")
    two("buffer.zero_() is None")
    assert two("store.batch_get(['8', '7'], *places((0, 8), (8, 8)))") == [False, True]
    assert two("is_put((8, 8))")


def test_an_entry_of_another_shape_or_dtype_is_a_miss(one: Encoder, shared_daemon: Daemon) -> None:
    assert one("put('8', (0, 8))") == [True]
    [entry] = shared_daemon.entries()
    with Client(shared_daemon.address, namespace=entry.key.namespace) as client:
        client.put("half", torch.ones(8, 128, dtype=torch.float16))
        client.put("flat", torch.ones(8 * 128, dtype=torch.bfloat16))
        client.put("wide", torch.ones(4, 256, dtype=torch.bfloat16))
        client.put_bytes("bytes", bytes(8 * 128 * 2), "uint8", [8, 256])
    for name in ("half", "flat", "wide", "bytes"):
        assert one(f"get({name!r}, (0, 8))") == [False], name
        assert not one("buffer.any().item()")
    for rows in (7, 9, 64):
        assert one(f"get('8', (0, {rows}))") == [False]
        assert not one("buffer.any().item()")
    assert one("get('8', (56, 8))") == [True]


@pytest.mark.parametrize(
    "piece",
    [
        "(buffer.data_ptr() - 256, 512)",
        "(buffer.data_ptr() + 62 * 256, 3 * 256)",
        "(buffer.data_ptr() + 64 * 256, 256)",
        "(buffer.data_ptr() + 2, 256)",
        "(buffer.data_ptr(), 255)",
        "(buffer.data_ptr() + 512, -256)",
        "(buffer.data_ptr(), 0)",
        "(0, 256)",
    ],
)
def test_memory_that_was_not_registered_is_not_touched(one: Encoder, piece: str) -> None:
    assert one("put('1', (0, 1))") == [True]
    assert one("put('2', (0, 2))") == [True]
    assert one("put('3', (0, 3))") == [True]
    one("buffer.zero_() is None")
    for name in ("1", "2", "3"):
        assert one(f"store.batch_get([{name!r}], *zip({piece}))") == [False]
    assert one(f"store.batch_put(['bad'], *zip({piece}))") == [False]
    assert one("store.batch_is_exist(['bad'])") == [False]
    assert not one("buffer.any().item()")


def test_a_bad_batch_loses_only_what_is_bad(one: Encoder) -> None:
    assert one("put('1', (0, 1))") == [True]
    names = "['', '1', 'n' * 5000, chr(0xd800), None]"
    assert one(f"store.batch_is_exist({names})") == [False, True, False, False, False]
    got = one(f"store.batch_get({names}, *places(*[(n, 1) for n in range(5)]))")
    assert got == [False, True, False, False, False]
    stored = one(f"store.batch_put({names}, *places(*[(n, 1) for n in range(5)]))")
    assert stored == [False, True, False, False, False]
    assert one("store.batch_get(['1', '1'], *places((0, 1)))") == [False, False]
    assert one("store.batch_get_into_multi_buffers(['1'], [[]], [[]])") == [False]
    assert one("store.batch_get([], [], [])") == []


def test_a_batch_larger_than_a_session_may_hold(one: Encoder) -> None:
    many = "[str(n) for n in range(500)], *places(*[(n % 64, 1) for n in range(500)])"
    assert one(f"store.batch_put({many})") == [True] * 500
    assert one("store.batch_is_exist([str(n) for n in range(600)])") == [True] * 500 + [False] * 100
    assert one(f"store.batch_get({many})") == [True] * 500


def test_an_entry_of_another_node_is_fetched(
    one: Encoder, make_daemon: Callable[..., Daemon], shared_daemon: Daemon
) -> None:
    peers = ["127.0.86.1:9465", "127.0.86.2:9465"]
    near, far = (
        make_daemon(
            "16MiB",
            ECD_PEER_ADDRESS=peer,
            ECD_PEERS=",".join(peers),
            ECD_PEER_TOKEN="a secret of the test",
            ECD_ENGINE_PORTS=ports,
        ).start()
        for peer, ports in zip(peers, ("18900-18915", "18916-18931"), strict=True)
    )
    to_daemon = "os.environ.update(ECD_ADDRESS={!r})"
    one(to_daemon.format(near.address))
    one("globals().update(near=start())")
    one(to_daemon.format(shared_daemon.address))
    one(CONNECT.format("near"))
    entry = torch.randn(8, 128).to(torch.bfloat16)
    with Client(far.address, namespace=one("near._namespace")) as client:
        client.put("5", entry)
        eventually(lambda: one("near.batch_is_exist(['6', '5'])") == [False, True], "it is found")
    places = "[[near._buffers[0].data_ptr()], [8 * 256]]"
    assert one(f"near.batch_get(['5'], *{places})") == [True]
    assert one("sha(near._buffers[0][:8])") == sha(entry)


def test_no_daemon_and_a_stalled_one_are_misses(one: Encoder, shared_daemon: Daemon) -> None:
    calls = ("put('9', (0, 9))", "get('9', (0, 9))", "store.batch_is_exist(['9', '10'])")
    one("[setattr(ours, bound, 0.5) for bound in ('BATCH_S', 'CALL_S')]")
    one("globals().update(hasty=start())")
    one(CONNECT.format("hasty"))
    with shared_daemon.stopped():
        assert one("hasty.batch_is_exist(['10'])") == [False]
        rows = "[[hasty._buffers[0].data_ptr()], [256]]"
        assert one(f"hasty.batch_get(['10'], *{rows})") == [False]
    one("[setattr(ours, bound, PATIENCE_S) for bound in ('BATCH_S', 'CALL_S')]")
    shared_daemon.kill()
    eventually(lambda: not one("store._client.connected"), "the end of the session is seen")
    for call in calls:
        assert not any(one(call)), call
    shared_daemon.start()
    one(CONNECT.format("store"))
    assert all(one("put('9', (0, 9))") + one("get('9', (0, 9))"))


def test_equal_settings_and_only_they_share(encoders: list[Encoder]) -> None:
    one, two = encoders[:2]
    usual = one("namespace()")
    assert usual == two("namespace()")
    assert usual.startswith("sglang|")
    assert f"|{NAME}|" in usual
    assert usual.endswith("|bfloat16")
    others = [
        "dtype=torch.float16",
        "revision='abc'",
        "mm_attention_backend='sdpa'",
        "mm_process_config={'image': {'max_pixels': 200704}}",
        "image_processor_backend='pil'",
        "enable_precise_embedding_interpolation=True",
        'json_model_override_args=\'{"hidden_act": "gelu"}\'',
    ]
    seen = {usual} | {one(f"namespace({other})") for other in others}
    assert len(seen) == 1 + len(others)


def test_what_cannot_be_told_apart_is_refused(encoders: list[Encoder]) -> None:
    one = encoders[0]
    name = "os.environ.__setitem__('ECD_SGLANG_NAMESPACE', {!r})"
    try:
        for bad in ("", "a|b", "x" * 200):
            one(name.format(bad))
            assert "must name the model and its weights" in one("refusal()"), bad
    finally:
        one(name.format(NAME))
    assert "--tp-size is 2" in one("refusal(tp_size=2)")
    for buffer in ("torch.zeros(4)", "torch.zeros(8, 8).t()[:4]", "torch.zeros(4, 4)"):
        assert "InvalidArgument" in one(f"unregistered({buffer})"), buffer


def test_sglangs_own_cache_fetches_and_inserts(one: Encoder, shared_daemon: Daemon) -> None:
    one("start_cache()")
    entry = torch.randn(2500, 128).to(torch.bfloat16)
    prefetch = "cache.prefetch('r', [{!r}], [{}], Modality.IMAGE)"

    def ended() -> bool:
        return one("cache.check_prefetch_progress('r')")

    one(CONNECT.format("cache.embedding_store"))
    with Client(shared_daemon.address, namespace=one("cache.embedding_store._namespace")) as client:
        client.put("77", entry)
        assert one("asyncio.run(cache.batch_is_exist(['76', '77']))") == [False, True]
        one("setattr(cache.vision_pool.allocator, 'free_ranges', [(0, 1), (2, 1), (4, 1)])")
        one(prefetch.format("77", 2400))
        eventually(ended, "SGLang is told of the miss")
        assert not one("cache.has_local_embedding('77')")
        assert one("cache.vision_pool.allocator.free_pages") == 3
        one(prefetch.format("77", 2500))
        eventually(ended, "SGLang has the entry")
        assert one("cached('77')") == [sha(entry), 3]
        shared_daemon.evict_all()
        one("cache.insert_batch(['77'], Modality.IMAGE)")
        item = client.get("77", timeout=HANG_S)
        assert item is not None
        with item:
            assert torch.equal(item.tensor, entry)
