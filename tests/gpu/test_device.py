"""Copies by torch's CUDA, which the stand-in cannot show: run with ECD_TEST_CUDA=device."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from support.cuda.processes import Cuda
from support.daemon import Daemon

pytestmark = pytest.mark.skipif(
    os.environ.get("ECD_TEST_CUDA") != "device", reason="needs a GPU, and ECD_TEST_CUDA=device"
)

BEGIN = """
import gc, sys
import torch
from ecd_client import Client
from support.waiting import HANG_S, eventually, value_of

MIB = 1 << 20
work = torch.cuda._sleep

def encode(byte, nbytes=8 * MIB):
    work(20_000_000)  # some 10 ms of it, and the tensor is written only then
    return torch.full((nbytes,), byte, dtype=torch.uint8, device="cuda")

def is_right(copy, byte):
    return bool((copy == byte).all())

torch.cuda.init()
"""

SCRIPT = """
with Client(sys.argv[1]) as client:
    client.pin()
    eventually(lambda: client.pinning.nbytes, "the pool is pinned")
    for number in range(1, 40):
        output = encode(number)
        stored = client.put_async(str(number), output)
        del output
        encode(255)  # in the memory that may be free by now
        assert stored.result(HANG_S)
        with client.get(str(number)) as item:
            copy = item.to("cuda", non_blocking=True)
            assert set(item.view[:4096]) == set(item.view[-4096:]) == {number}
        assert is_right(copy, number), number
        assert is_right(copy.clone(), number)
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        tensor = torch.arange(3000, device="cuda").to(dtype).view(30, 100).t()
        client.put(str(dtype), tensor)
        with client.get(str(dtype)) as item:
            assert torch.equal(item.to("cuda"), tensor)
            assert torch.equal(item.tensor, tensor.cpu())
    last = client.get("39")
    copy = last.to("cuda", non_blocking=True)
assert is_right(copy, 39), "the client was closed amid its copy"
print("right")
"""

CAPTURES = """
import threading
from functools import partial
from ecd_client.device import pinned

def captured(*beside):
    # A graph that adds 1, and what other threads do from its capture's begin to its end.
    found, graph = [], torch.cuda.CUDAGraph()
    def do(each, stream):
        with torch.cuda.stream(stream):
            found.append(each())
    threads = [threading.Thread(target=do, args=[each, torch.cuda.Stream()]) for each in beside]
    with torch.cuda.graph(graph):
        static.add_(1)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        static.add_(1)
    before = float(static[0])
    graph.replay()
    assert float(static[0]) == before + 2
    assert len(found) == len(beside), "a thread has failed: see above"
    return found

def pin(client):
    client.pin()
    eventually(lambda: client.pinning.nbytes, "the pool is pinned")

def load_some(client):
    loaded = []
    for number in (1, 2) * 10:
        with client.get(str(number)) as item:
            loaded.append((item.to("cuda", non_blocking=True), number))
    return loaded

def put_one(client, tensor):
    return client.put_async("amid", tensor).result(HANG_S)

def pin_anew(client, address):
    client.close()
    eventually(lambda: not pinned._pools and not pinned._leaving, "the pool is unpinned")
    again = Client(address)
    pin(again)
    return again

static = torch.zeros(MIB, device="cuda")
client, tensor = Client(sys.argv[1]), encode(3)
captured(partial(pin, client))
for number in (1, 2):
    client.put(str(number), encode(number))
torch.cuda.synchronize()
load, put = partial(load_some, client), partial(put_one, client, tensor)
done = captured(load, load, put)
assert done.count(True) == 1, done
torch.cuda.synchronize()
for loaded in done:
    assert loaded is True or all(is_right(*each) for each in loaded)
[client] = captured(partial(pin_anew, client, sys.argv[1]))
with client.get("amid") as item:
    assert is_right(item.to("cuda"), 3)
client.close()
print("right")
"""


NEAR = """
def view_of(client, key):
    # A view of the copy in the device pool, once there is one.
    def look():
        with client.get(key) as item:  # anew: the daemon may list it only now
            view = item.device_view("cuda")
            return None if view is None else [view]
    [view] = value_of(look, f"a copy of {key}: does this process map the device pool?")
    return view
"""

PUTS_NEAR = """
with Client(sys.argv[1]) as client:
    client.pin()
    for number in range(1, 5):
        output = encode(number)
        stored = client.put_async(str(number), output)
        del output
        encode(255)
        assert stored.result(HANG_S)
        assert is_right(view_of(client, str(number)), number), number
print("right")
"""

LOADS_NEAR = """
with Client(sys.argv[1]) as client:
    views = {number: view_of(client, str(number)) for number in range(1, 5)}
    for number, view in views.items():
        with client.get(str(number)) as item:
            copy = item.to("cuda", non_blocking=True)
        assert is_right(copy, number), number
        assert is_right(view, number), number
    for number in (2, 3, 4):
        del views[number]
    del view
    for number in range(5, 25):  # three times what the device pool has
        client.put(str(number), encode(number))
        assert is_right(view_of(client, str(number)), number), number
    assert is_right(views.pop(1), 1), "a view was evicted"
    for number in range(1, 25):
        with client.get(str(number)) as item:
            copy = item.to("cuda", non_blocking=True)
        assert is_right(copy, number), number
    gc.collect()
    last = view_of(client, "24")
assert is_right(last, 24), "the client was closed, and the view was not"
print("right")
"""

DROPS_ELSEWHERE = """
import threading

def ends_early(made_on):
    # Another thread drops a view amid the model's work: is its hold over before that work is?
    with torch.cuda.stream(made_on):
        views = [view_of(client, "k")]
    with torch.cuda.stream(model):
        work(500_000_000)  # a quarter of a second of it, which may use the view
        its_end = model.record_event()
    dropping = threading.Thread(target=views.clear)  # its current stream is the default one
    dropping.start()
    dropping.join()
    words = client._connection.session().index._words
    eventually(lambda: not any(words[8:512]), "the hold has ended")
    return not its_end.query()  # asked after that, so a machine that stands still shows nothing

model = torch.cuda.Stream()
with Client(sys.argv[1]) as client:
    client.pin()
    client.put("k", encode(5))
    assert not ends_early(model)
    # As for work on a stream that ecd does not know of: the question would show it.
    eventually(lambda: ends_early(torch.cuda.default_stream()), "a hold that ends early")
print("right")
"""


def test_saves_and_loads_are_right(cuda: Cuda, daemon: Daemon) -> None:
    assert cuda.run(BEGIN + SCRIPT, daemon.address).stdout == "right\n"
    daemon.check_nothing_leaked()


def test_graphs_are_captured_while_other_threads_copy_and_pin(cuda: Cuda, daemon: Daemon) -> None:
    assert cuda.run(BEGIN + CAPTURES, daemon.address).stdout == "right\n"
    daemon.check_nothing_leaked()


@pytest.fixture
def near(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon with a device pool on the first GPU."""
    settings = {"ECD_DEVICE_POOL_BYTES": "64MiB", "ECD_DEVICES": "0"}
    return make_daemon("512MiB", **settings).start()


def test_copies_in_a_device_pool_are_right(cuda: Cuda, near: Daemon) -> None:
    """A second process reads what the first has put, as copies and as views, among evictions."""
    host, device = near.status().pools
    assert (host.kind, device.kind) == ("host", "device")
    assert device.populated_bytes == device.pool_bytes, near.text()
    for script in (PUTS_NEAR, LOADS_NEAR):
        assert cuda.run(BEGIN + NEAR + script, near.address).stdout == "right\n"
    assert near.status().counters.copies >= 24
    near.check_nothing_leaked()


def test_a_view_is_held_until_the_models_stream_is_past_it(cuda: Cuda, near: Daemon) -> None:
    """Its kernels run where no other stream waits for them, whichever thread drops the view."""
    assert cuda.run(BEGIN + NEAR + DROPS_ELSEWHERE, near.address).stdout == "right\n"
    near.check_nothing_leaked()
