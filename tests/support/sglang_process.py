"""Processes with SGLang's real interface, as its encoder has it. Each evaluates what a test sends.

The arguments are a model's directory, how many rows the registered buffer has, and for each process
a socket's descriptor, a log and settings for its environment in JSON. A process says "ready" by its
socket; each line that comes is an expression in JSON, and is answered by a line with its value. All
are forked from one that has imported SGLang, which takes 5 s of a free core.
"""

import asyncio  # noqa: F401
import hashlib
import json
import os
import signal
import socket
import sys

import torch
from sglang.srt.mem_cache.embedding_store import EmbeddingStore, EmbeddingStoreFactory  # noqa: F401
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import ServerArgs

WIDTH = 128
MODEL, ROWS = sys.argv[1], int(sys.argv[2])
PATIENCE_S = 60.0
"""In place of the store's bounds: a machine that stands still for a moment is no miss."""


def sha(tensor):
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def start(dtype=torch.bfloat16, **settings):
    """Publish the settings as the encode server does, and have SGLang's factory make its store."""
    settings = {"model_path": MODEL, "device": "cpu", "encoder_only": True, **settings}
    publish(ServerArgs(enable_mm_global_cache=True, **settings), role="encoder")
    made = EmbeddingStoreFactory.create_backend("mooncake")
    made.register_buffer(torch.zeros(ROWS, WIDTH, dtype=dtype))
    return made


def refusal(**settings):
    """The message with which the store refuses to start."""
    try:
        start(**settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def unregistered(tensor):
    """The message with which the store refuses a buffer."""
    try:
        store.register_buffer(tensor)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def namespace(**settings):
    return start(**settings)._namespace


def places(*pieces):
    """The addresses and sizes of pieces (first row, rows) of the buffer, as SGLang passes them."""
    row = WIDTH * buffer.element_size()
    return [buffer.data_ptr() + first * row for first, _ in pieces], [n * row for _, n in pieces]


def filled(tensor, *pieces, seed=0):
    """The tensor, with the rows of one entry in the pieces."""
    rows = [rows for _, rows in pieces]
    entry = torch.randn(sum(rows), WIDTH, generator=torch.Generator().manual_seed(seed))
    for (first, n), part in zip(pieces, entry.split(rows), strict=True):
        tensor[first : first + n] = part
    return tensor


def put(name, *pieces, seed=0):
    """Fill the pieces, and store them as one entry."""
    filled(buffer, *pieces, seed=seed)
    ptrs, sizes = places(*pieces)
    return store.batch_put_from_multi_buffers([name], [ptrs], [sizes])


def get(name, *pieces):
    """Get one entry into the pieces of a buffer that is zero."""
    buffer.zero_()
    ptrs, sizes = places(*pieces)
    return store.batch_get_into_multi_buffers([name], [ptrs], [sizes])


def is_put(*pieces, seed=0):
    """Whether the pieces have the entry's bytes, and all other rows are zero."""
    return torch.equal(buffer, filled(torch.zeros_like(buffer), *pieces, seed=seed))


def start_cache():
    """Make SGLang's own cache over the store, as the encoder does after it has loaded its model.

    Its pool is not pinned, which needs a GPU.
    """
    global cache, Modality
    from sglang.srt.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from sglang.srt.managers.schedule_batch import Modality
    from sglang.srt.mem_cache.embedding_cache_controller import EmbeddingCacheController

    class OnHost(EmbeddingCacheController):
        def _create_pools(self, pin_memory):
            return super()._create_pools(False)

    start()  # with the usual settings
    init_distributed_environment(1, 0, f"file://{MODEL}/rendezvous", 0, "gloo")
    ranks = ("tp", "pp", "attn_dp", "attn_tp", "attn_cp", "attn_dcp", "moe_ep", "moe_dp")
    alone = {f"{rank}_rank": 0 for rank in ranks} | {"pp_size": 1, "attn_dp_size": 1}
    alone |= {"attn_tp_size": 1, "attn_dcp_size": 1, "moe_ep_size": 1, "moe_tp_size": 1}
    get_parallel().override_permanently(**alone)
    initialize_model_parallel()
    made = EmbeddingStoreFactory.create_backend("mooncake")
    dims = {Modality.IMAGE: WIDTH}
    cache = OnHost(made, max_pool_size_gb=0.01, hidden_dims=dims, dtype=torch.bfloat16)


def cached(name):
    """The SHA-256 of an entry in SGLang's own cache, and in how many pieces it lies there."""
    pieces = cache.get_pool_views([name])[0]
    return [sha(torch.cat(pieces)), len(pieces)]


each = iter(sys.argv[3:])
own = next((own for own in zip(each, each, each, strict=True) if os.fork() == 0), None)
if own is None:
    os.wait()
    os.killpg(0, signal.SIGKILL)  # all of them, so that the test is told
descriptor, log, settings = own
for output in (1, 2):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
os.environ.update(json.loads(settings))
load_plugins()
if "ECD_SGLANG_NAMESPACE" in os.environ:
    from ecd_client.sglang import store as ours

    ours.BATCH_S = ours.CALL_S = PATIENCE_S
    store = start()
    buffer = store._buffers[0]
with socket.socket(fileno=int(descriptor)).makefile("rw") as test:
    print(json.dumps("ready"), file=test, flush=True)
    for line in test:
        print(json.dumps(eval(json.loads(line))), file=test, flush=True)
