"""One client of a real daemon on a GPU, mostly the stand-in's, and what may go wrong there.

    python scenarios.py NAME ADDRESS

Prints what came of the scenario, as one line of JSON.
"""

import contextlib
import gc
import json
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ecd_client import Client, EcdError
from ecd_client.device import completions, copies, driver, pinned
from ecd_client.device import pool as device_pool
from ecd_client.errors import DaemonUnavailable, DeviceError
from ecd_client.item import Item
from ecd_client.session.channel import open_channel
from ecd_client.session.session import Session
from ecd_client.shared import index
from ecd_client.tensors import TensorSource
from ecd_client.values import Extent
from ecd_proto.shm.session_page import DMA_WORD
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.cuda.gpu import CallsByThread, StandinGpu
from support.cuda.standin import Control, Counters, Hold
from support.waiting import HANG_S, eventually

MIB = 1 << 20
SHAPE = (MIB,)
NEAR_BYTES = MIB * 3 // 2
"""An entry so large that the smallest device pool has room for one copy."""
UNKNOWN = 123456
"""A CUresult that no version of the bindings knows."""
warnings: list[str] = []


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


logging.getLogger("ecd_client").addHandler(Listener(logging.WARNING))


class Unwatched:
    """In place of the control page, on a GPU: directs nothing, and counts only what `gpu` has."""

    def counters(self) -> Counters:
        none = Counters(*[0] * len(Counters._fields))
        return none._replace(registrations=1, registered_bytes=gpu._out.nbytes)


class Calls:
    """Counts this process's calls of one of the driver's functions, from their begin on."""

    def __init__(self, name: str) -> None:
        self.count, function = 0, getattr(driver.cuda, name)

        def counted(*arguments: object) -> object:
            self.count += 1
            return function(*arguments)

        setattr(driver.cuda, name, counted)

    def await_more(self, count: int = 3) -> None:
        """Wait for so many more: the driver was asked again, and what was asked is not over."""
        until = self.count + count
        eventually(lambda: self.count >= until, f"{count} more calls")


control = Control.of_this_process() if "CUDA_STANDIN_CONTROL" in os.environ else Unwatched()
gpu = StandinGpu.use(int(os.environ.get("GPU", "0")))


def calls_are_counted(address: str) -> dict:
    """Calls of the driver by the thread of an engine's step, and by others, once all is in use."""
    device_pool.LISTED_WITHIN_S = HANG_S  # nobody asks for the copies again
    keys = "k", "l", "m", "n"
    with Client(address) as client:
        pin(client)
        has_near = bool(client._connection.session()._dma._devices)
        promotes = near_of(client)._side if has_near else None
        tensor = gpu.encode(SHAPE, torch.uint8, 1)
        for key in keys:
            client.put_async(key, tensor).result(HANG_S)
        load(client, "k", non_blocking=True)
        spare = [driver.Event(gpu.device, gpu.stream.cuda_stream) for _ in range(4)]
        for event in spare:
            event.wait()
        del event, spare  # as an engine has events to use again after some steps
        await_ends()
        calls = CallsByThread(gpu)

        def made_by(do: Callable[[], object]) -> dict[str, int]:
            before = calls.counts.copy()
            control.hold, may_ask = Hold.START, keep_ends_waiting()  # until the item is closed
            queued = do()
            control.hold = Hold.NOTHING
            may_ask.set()
            if isinstance(queued, Future):
                assert queued.result(HANG_S)
            if promotes is not None:
                promotes.submit(int).result(HANG_S)
            await_ends()
            return calls.since(before)

        return {
            "load": made_by(lambda: load(client, "k", non_blocking=True)),
            "put": made_by(lambda: client.put_async("o", tensor)),
            "step of four": made_by(lambda: load_together(client, keys)),
            "near": has_near and is_near(client, "k"),
        }


def keep_ends_waiting() -> threading.Event:
    """Keep the thread that ends holds from asking the driver, until the event is set."""
    may_ask = threading.Event()
    completions.aside(partial(may_ask.wait, HANG_S))
    return may_ask


def load_together(client: Client, keys: Iterable[str]) -> list[torch.Tensor]:
    """Load items as vLLM's worker does in one step."""
    with copies.for_number(gpu.device).together():
        return [load(client, key, non_blocking=True) for key in keys]


def loads_of_a_step(address: str) -> dict:
    """Four loads end as one: right, though each copy takes longer than the model's first use."""
    with Client(address) as client:
        pin(client)
        for byte in range(1, 5):
            put(client, str(byte), byte)
        control.delay_us = 20_000
        loaded = load_together(client, map(str, range(1, 5)))
        right = [is_right(loaded[byte - 1], byte) for byte in (4, 3, 2, 1)]
    return {"right": right, "faults": control.counters().faults}


def end_is_asked_amid_a_step(address: str) -> dict:
    """One load of a step is waited for: the hold of the next lasts until its own copy is over."""
    with Client(address) as client:
        pin(client)
        for byte, key in enumerate("kl"):
            put(client, key, byte)
        await_ends()
        held = lambda: any(client._connection.session().index._words[8:512])  # noqa: E731
        with copies.for_number(gpu.device).together():
            first = load(client, "k")
            control.hold, waits = Hold.START, Calls("cuEventSynchronize")
            second = load(client, "l", non_blocking=True)
        eventually(lambda: waits.count or not held(), "the end of that copy is waited for")
        is_early = not held()
        control.hold = Hold.NOTHING
        right = is_right(first, 0) and is_right(second, 1)
        eventually(lambda: not held())
    return {"early": is_early, "right": right}


def holds_of_a_step_end_after_it(address: str) -> dict:
    """How often the thread that ends holds was given some by then, in a step and after it."""
    with Client(address) as client:
        pin(client)
        for key in "klmn":
            put(client, key, 3)
        together, given = copies.for_number(gpu.device).together, completions._ends._later.qsize
        may_ask = keep_ends_waiting()
        eventually(lambda: not given())
        found, loaded = [], []

        def load_and_count(key: str) -> None:
            loaded.append(load(client, key, non_blocking=True))
            found.append(given())

        with together():
            load_and_count("k")
            with together():
                load_and_count("l")
            found.append(given())
        found.append(given())
        with contextlib.suppress(KeyError), together():
            load_and_count("m")
            raise KeyError
        found.append(given())
        many, completions.MAX_GATHERED = completions.MAX_GATHERED, 1
        with together():
            load_and_count("n")
        completions.MAX_GATHERED = many  # the thread, given one amid the step, would mark its end
        may_ask.set()
        await_ends()
        recorded = Calls("cuEventRecord")
        loaded += load_together(client, "klmn")
        await_ends()
        right = all(is_right(each, 3) for each in loaded)
    return {"given": found, "records": recorded.count, "right": right}


def one_load_of_a_step_fails(address: str) -> dict:
    """The driver refuses one item's copy: the others of the step are whole, and every hold ends."""
    with Client(address) as client:
        pin(client)
        for byte, key in enumerate("klm"):
            put(client, key, byte)
        control.delay_us = 20_000
        loaded, errors = {}, []
        with copies.for_number(gpu.device).together():
            for key in "klm":
                control.fail({"cuMemcpyAsync": int(os.environ["CODE"])} if key == "l" else {})
                try:
                    loaded[key] = load(client, key, non_blocking=True)
                except DeviceError as error:
                    errors.append(type(error).__name__)
        right = [is_right(loaded[key], byte) for byte, key in enumerate("klm") if key in loaded]
        eventually(lambda: not any(client._connection.session().index._words[8:512]))
    return {"errors": errors, "right": right, "faults": control.counters().faults}


def end_of_a_step_fails(address: str) -> dict:
    """The driver refuses to mark the end of a step's loads: it comes when they are over."""
    with Client(address) as client:
        pin(client)
        for byte, key in enumerate("kl"):
            put(client, key, byte)
        found = {}
        for name, failing in (
            ("the wait alone", {"cuStreamWaitEvent": 1}),
            ("all of it", {"cuEventRecord": 1}),
        ):
            control.delay_us, may_ask = 20_000, keep_ends_waiting()
            try:
                with copies.for_number(gpu.device).together():
                    loaded = [load(client, key, non_blocking=True) for key in "kl"]
                    control.fail(failing)
                raised = ""
            except DeviceError as error:
                raised = str(error)
            counted = control.counters()
            control.fail({})
            may_ask.set()
            is_over = counted.finished == counted.copies
            found[name] = [raised, is_over, [is_right(each, n) for n, each in enumerate(loaded)]]
        eventually(lambda: not any(client._connection.session().index._words[8:512]))
    return found


def pool_of(client: Client):
    return client._connection.session().pools.granted


def pin(client: Client) -> None:
    client.pin()
    eventually(lambda: pool_of(client)._pinned and pool_of(client)._dma.may_write)
    eventually(lambda: pool_of(client)._pinned.pinned_bytes == pool_of(client).nbytes)


def put(client: Client, key: str, byte: int) -> bool:
    return client.put(key, gpu.encode(SHAPE, torch.uint8, byte))


def load(client: Client, key: str, **options: bool) -> torch.Tensor:
    with client.get(key, HANG_S) as item:
        return item.to("cuda", **options)


def registered_after() -> int:
    """Bytes that stay registered, once nothing more is being unregistered."""
    eventually(lambda: not pinned._leaving)
    return control.counters().registered_bytes - gpu._out.nbytes


def is_right(tensor: torch.Tensor, byte: int) -> bool:
    return set(gpu.content(tensor)) == {byte}


def nothing_waits(address: str) -> dict:
    """A put_async and a load that is not waited for, with copies that do not go on."""
    with Client(address) as client:
        pin(client)
        before = control.counters()
        output = gpu.encode(SHAPE, torch.uint8, 5)
        control.hold = Hold.START
        stored = client.put_async("k", output)
        saved = control.counters().finished - before.finished
        del output
        is_early = bool(client.contains(["k"])[0])
        control.hold = Hold.NOTHING
        stored.result(HANG_S)
        finished = control.counters().finished
        control.hold = Hold.START
        copy = load(client, "k", non_blocking=True)
        loaded = control.counters().finished - finished
        control.hold = Hold.NOTHING
        waits = control.counters().main_waits - before.main_waits
        right = is_right(copy, 5)
        after = control.counters()
    return {
        "put returned before its copy": saved == 0,
        "stored before its copy": is_early,
        "load returned before its copy": loaded == 0,
        "waits": waits,
        "right": right,
        "pageable": after.pageable_copies - before.pageable_copies,
        "registered after": registered_after(),
    }


def registration_is_refused(address: str) -> dict:
    control.fail({"cuMemHostRegister": int(os.environ["CODE"])})
    with Client(address) as client:
        client.pin()
        eventually(lambda: client.pinning.failure)
        control.fail({})
        stored = put(client, "k", 6)
        right = is_right(load(client, "k"), 6)
        right &= is_right(load(client, "k", non_blocking=True), 6)
        failure = client.pinning.failure
    return {"stored": stored, "right": right, "failure": failure, "warnings": warnings}


def pins_in_turn(address: str) -> dict:
    """Pins the pool when a line comes; counts the driver's calls.

    As each begins, and as it ends, the process is added to a list that engines may share.
    """
    pinned.PINNED_PIECE_BYTES = MIB
    if "PATIENT" in os.environ:  # on a busy machine, too
        pinned.TURN_S = HANG_S
    calls, register = [], driver.register
    pinning = os.open(os.environ["PINNING"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    own = f"{os.getpid()}\n".encode()

    def note(at: int, nbytes: int) -> None:
        os.write(pinning, own)
        register(at, nbytes)
        os.write(pinning, own)
        calls.append(at)

    driver.register = note
    with Client(address) as client:
        print("ready", flush=True)
        sys.stdin.readline()
        pin(client)
        return {"calls": len(calls)}


def half_of_it_is_refused(address: str) -> dict:
    """Registration in pieces of 8 MiB stops half way: what lies before is pinned all the same."""
    pinned.PINNED_PIECE_BYTES = 8 * MIB
    control.fail({"cuMemHostRegister": 2}, after=4)
    with Client(address) as client:
        client.pin()
        eventually(lambda: client.pinning.failure)
        right = [put(client, str(n), n) and is_right(load(client, str(n)), n) for n in range(60)]
        counters = control.counters()
    return {
        "right": all(right),
        "pinned": 0 < counters.pageable_copies < counters.copies,
        "faults": counters.faults,
        "registered after": registered_after(),
    }


def pieces_are_not_crossed(address: str) -> dict:
    pinned.PINNED_PIECE_BYTES = MIB + 4096
    with Client(address) as client:
        pin(client)
        right = [put(client, str(n), n) and is_right(load(client, str(n)), n) for n in range(50)]
        counters = control.counters()
    return {
        "right": all(right),
        "split": counters.split_copies,
        "pageable": counters.pageable_copies,
        "faults": counters.faults,
    }


def pinning_is_off(address: str) -> dict:
    os.environ["ECD_PIN"] = "off"
    with Client(address) as client:
        client.pin()
        right = put(client, "k", 8) and is_right(load(client, "k"), 8)
        counters = control.counters()
    return {"right": right, "registered": counters.registered_bytes - gpu._out.nbytes}


def contexts() -> int:
    """The GPUs on which this process has a context."""
    if isinstance(control, Control):
        return control.counters().contexts
    cuda = driver.cuda
    _, count = cuda.cuDeviceGetCount()
    devices = [cuda.cuDeviceGet(number)[1] for number in range(count)]
    states = [cuda.cuDevicePrimaryCtxGetState(device) for device in devices]
    return sum(is_active for _, _, is_active in states)


def second_gpu(address: str) -> dict:
    """A process that uses the second GPU has no context on the first."""
    with Client(address) as client:
        client.pin("cuda")
        eventually(lambda: client.pinning.nbytes)
        right = put(client, "k", 8) and is_right(load(client, "k", non_blocking=True), 8)
        with client.get("k") as item:
            right &= is_right(item.to(f"cuda:{gpu.device}"), 8)
        return {"right": right, "contexts": contexts()}


def copies_fail(address: str) -> dict:
    """A copy faults, which is the end of the process's context: puts fail and store nothing."""
    with Client(address) as client:
        pin(client)
        put(client, "k", 17)
        control.fail({"copy": 700})
        error = client.put_async("l", gpu.encode(SHAPE, torch.uint8, 18)).exception(HANG_S)
        control.fail({})
        stored = client.put("m", torch.full(SHAPE, 19, dtype=torch.uint8))
        contained = client.contains(["k", "l", "m"])
    return {"error": type(error).__name__, "stored": stored, "contained": contained}


def two_clients_pin_once(address: str) -> dict:
    registered = Calls("cuMemHostRegister")
    with Client(address) as one, Client(address) as two:
        pin(one)
        pin(two)
        right = put(one, "k", 9) and is_right(load(two, "k"), 9)
        one.close()
        eventually(lambda: pool_of(two)._pinned.users == 1)
        still = is_right(load(two, "k"), 9) and put(two, "l", 10)
    eventually(lambda: control.counters().registrations == 1)
    return {"calls": registered.count, "right": right, "still": still, "warnings": warnings}


def closed_amid_copies(address: str) -> dict:
    """The client is closed while a load is under way: memory stays mapped and pinned until then."""
    with Client(address) as client:
        pin(client)
        put(client, "k", 11)
        control.hold = Hold.MIDDLE
        copy = load(client, "k", non_blocking=True)
    closed_early = control.counters().finished < control.counters().copies
    control.hold = Hold.NOTHING
    right = is_right(copy, 11)
    eventually(lambda: control.counters().registrations == 1)
    return {"closed early": closed_early, "right": right, "faults": control.counters().faults}


def fill_anew(client: Client, rounds: int = 4) -> list[tuple[int, int]]:
    """Put more than the pool holds; returns the entries there whose bytes are wrong."""
    numbers = [(turn, number) for turn in range(rounds) for number in range(60)]
    for turn, number in numbers:
        client.put_bytes(f"{turn} {number}", bytes([7]) * MIB, "uint8", (MIB,))
    control.hold = Hold.NOTHING
    eventually(lambda: control.counters().finished == control.counters().copies)
    wrong = []
    for turn, number in numbers:
        if item := client.get(f"{turn} {number}"):
            with item:
                if set(item.view.tobytes()) != {7}:
                    wrong.append((turn, number))
    return wrong


def memory_is_left_for_the_model(address: str) -> dict:
    """The device has no memory but what torch keeps for the model's stream."""
    with Client(address) as client:
        pin(client)
        put(client, "k", 12)
        kept = gpu.encode(SHAPE, torch.uint8, 1)
        gpu.wait()
        del kept
        control.fail({"cuMemAlloc": 2})
        control.hold = Hold.START
        copy = load(client, "k", non_blocking=True)
        is_early = control.counters().finished == control.counters().copies
        control.hold = Hold.NOTHING
        return {"waited for": is_early, "right": is_right(copy, 12)}


def memory_is_left_for_loads(address: str) -> dict:
    """The device has no memory but what torch keeps for loads from the host's pool."""
    with Client(address) as client:
        put_by_cpu(address, "k", bytes([7]) * MIB)
        near_of(client)
        eventually(lambda: is_right(load(client, "k"), 7) and is_near(client, "k"))
        gpu.wait()
        control.fail({"cuMemAlloc": 2})
        of_the_model = []
        with contextlib.suppress(MemoryError):
            while True:
                of_the_model.append(gpu.encode(SHAPE, torch.uint8, 1))
        before = control.counters().bytes_d2d
        right = is_right(load(client, "k", non_blocking=True), 7)
        return {"right": right, "device to device": control.counters().bytes_d2d - before}


def holds_of_a_failed_device(address: str) -> dict:
    """Its time for copies that it may continue is the same for all of them."""
    all_added = threading.Event()

    class Clock:
        """Time that passes where the ending thread sleeps, once all is added."""

        at_s = 0.0

        def now_s(self) -> float:
            return self.at_s

        def sleep(self, seconds: float) -> None:
            assert all_added.wait(HANG_S)
            self.at_s += seconds

    completions.clock = own = Clock()
    ended = []
    control.fail({"cuEventSynchronize": 719})
    with driver.on(gpu.device):
        events = [driver.Event(gpu.device, gpu.stream.cuda_stream) for _ in range(20)]
    for number, event in enumerate(events):
        completions.after([event], partial(ended.append, number))
        completions.after_failure(partial(ended.append, number))
    all_added.set()
    eventually(lambda: len(ended) == 2 * len(events))
    return {"times": round(own.at_s / completions.FAILED_S, 1), "warnings": len(warnings)}


def default_stream_is_named(address: str) -> dict:
    """What torch calls 0 is the legacy default stream, whatever the bindings take 0 for."""
    streams = set()
    record = driver.cuda.cuEventRecord

    def note(event: object, stream: object) -> object:
        streams.add(int(stream))
        return record(event, stream)

    driver.cuda.cuEventRecord = note
    driver.Event(gpu.device, 0).wait()
    return {"streams": sorted(streams)}


def waiting_is_refused_for_a_while(address: str) -> dict:
    """The driver refuses to wait for a save whose copy has not begun: its extent is kept."""
    with Client(address) as client:
        pin(client)
        tensor = gpu.encode(SHAPE, torch.uint8, 12)
        gpu.content(tensor)
        control.hold = Hold.START
        control.fail({"cuEventSynchronize": 900})
        refused = Calls("cuEventSynchronize")
        stored = client.put_async("k", tensor)
        refused.await_more()
        is_early = stored.done()
        wrong = fill_anew(client)
        control.fail({})
        stored = stored.result(HANG_S)
        right = is_right(load(client, "k"), 12)
    return {"stored early": is_early, "wrong": wrong, "stored": stored, "right": right}


def loads_cannot_be_waited_for(address: str) -> dict:
    """As above, with loads: until when the driver refuses, before the copy goes on and after it."""
    right, refused = [], Calls("cuEventSynchronize")
    with Client(address) as client:
        pin(client)
        for number in range(2):
            put(client, f"k{number}", 3)
            control.hold = Hold.START
            control.fail({"cuEventSynchronize": 900, "cuEventQuery": 900})
            copy = load(client, f"k{number}", non_blocking=True)
            refused.await_more()
            if number == 0:
                control.fail({})
            wrong = fill_anew(client)
            control.fail({})
            right.append(not wrong and is_right(copy, 3))
            eventually(lambda: not any(client._connection.session().index._words[8:512]))
    return {"right": right, "faults": control.counters().faults}


def put_until(client: Client, tensor: torch.Tensor, interruption: type[BaseException]) -> dict:
    """Put a tensor: was that interrupted, and had its copy ended by then?"""
    finished = None
    try:
        client.put("k", tensor)
    except interruption:
        counters = control.counters()
        finished = counters.finished == counters.copies
    return {"interrupted": finished is not None, "copy had ended": finished}


def codes_are_unknown(address: str) -> dict:
    """The driver is newer than the bindings, and answers with codes that these do not know."""
    driver.MAX_FREE_EVENTS = 0  # so that each one is made
    calls = "cuCtxPushCurrent", "cuMemcpyAsync", "cuEventCreate", "cuEventRecord"
    with Client(address) as client:
        pin(client)
        put(client, "k", 3)
        control.fail({"cuEventSynchronize": UNKNOWN, "cuEventQuery": UNKNOWN})
        error = client.put_async("l", gpu.encode(SHAPE, torch.uint8, 4)).exception(HANG_S)
        found = {"save": type(error).__name__, "says": str(error)}
        copy = load(client, "k", non_blocking=True)
        words = client._connection.session().index._words
        eventually(lambda: not any(words[8:512]), "the load's hold has ended")
        control.fail({"cuCtxPopCurrent": UNKNOWN, "cuEventDestroy": UNKNOWN})
        found["right"] = is_right(load(client, "k"), 3)  # what only undoes something
        control.fail({})
        found["right"] &= is_right(copy, 3) and is_right(load(client, "k"), 3)
        for call in calls:
            control.fail({call: UNKNOWN})
            with contextlib.suppress(DeviceError):
                load(client, "k", non_blocking=True)
                found[call] = "loaded"
        control.fail({})
        found["put again"] = put(client, "l", 4)
    return found


def interrupted_before_the_wait(address: str) -> dict:
    """An exception of a signal's handler comes between a put's copy and the wait for it."""
    wait, is_first = driver.Event.wait, [True]
    raised = {"exit": SystemExit, "timeout": TimeoutError}[os.environ["RAISED"]]

    def wait_late(event: driver.Event) -> None:
        if is_first.pop() if is_first else False:
            raise raised
        control.hold = Hold.NOTHING
        wait(event)

    with Client(address) as client:
        pin(client)
        tensor = gpu.encode(SHAPE, torch.uint8, 12)
        gpu.content(tensor)
        control.hold = Hold.START
        driver.Event.wait = wait_late
        return put_until(client, tensor, raised)


def graph_is_captured(address: str) -> dict:
    """A capture goes on while other threads pin, save, load, and pin anew."""
    from cuda.bindings import driver as cuda

    from support.cuda.gpu import call

    captured = cuda.CUstream(gpu.new_stream(gpu.device).cuda_stream)

    def beside_a_capture(do: Callable[[], object]) -> object:
        """What another thread does from a capture's begin to its end, which finds it whole."""
        found: list[object] = []
        with driver.on(gpu.device):
            call(cuda.cuStreamBeginCapture, captured, cuda.CUstreamCaptureMode(0))
        thread = threading.Thread(target=lambda: found.append(do()))
        thread.start()
        thread.join()
        with driver.on(gpu.device):
            call(cuda.cuStreamEndCapture, captured)
        return found.pop()

    def save_and_load() -> tuple[bool, torch.Tensor]:
        stored = client.put_async("k", tensor).result(HANG_S)
        copy = load(client, "k", non_blocking=True)
        eventually(lambda: not any(client._connection.session().index._words[8:512]))
        return stored, copy

    def pin_anew() -> bool:
        client.close()
        eventually(lambda: not pinned._leaving)
        with Client(address) as another:
            pin(another)
        eventually(lambda: not pinned._leaving)
        return control.counters().registrations == 1

    client = Client(address)
    beside_a_capture(lambda: pin(client))
    tensor = gpu.encode(SHAPE, torch.uint8, 4)
    control.delay_us = 50_000
    stored, copy = beside_a_capture(save_and_load)
    right = is_right(copy, 4)
    control.delay_us = 1000
    return {"stored": stored, "right": right, "unpinned": beside_a_capture(pin_anew)}


def item_of_two_threads(address: str) -> dict:
    """One thread loads an item while another closes it, or loads it too."""
    from ecd_client import pools

    load_parts, is_loading = pools.MappedPool.load_parts, threading.Event()

    def load_parts_late(pool: pools.MappedPool, extent: object) -> object:
        parts = load_parts(pool, extent)
        is_loading.set()
        eventually(lambda: len(threads) > 1 or not item._open, "the other thread acts, too")
        return parts

    pools.MappedPool.load_parts = load_parts_late
    outcomes = {"right": 0, "wrong": 0, "refused": 0}
    with Client(address) as client:
        pin(client)
        control.delay_us = 40_000

        def use(item: Item, byte: int) -> None:
            try:
                copies.append((item.to("cuda", non_blocking=True), byte))
            except EcdError:
                outcomes["refused"] += 1

        for number in range(1, 31):
            put(client, str(number), number)
            copies: list[tuple[torch.Tensor, int]] = []
            item = client.get(str(number))
            users = range(1 + number % 2)
            is_loading.clear()
            threads = [threading.Thread(target=use, args=(item, number)) for _ in users]
            for thread in threads:
                thread.start()
            if len(threads) == 1:
                assert is_loading.wait(HANG_S)
                item.close()
            for thread in threads:
                thread.join()
            item.close()
            for filler in range(64):
                client.put_bytes(f"{number} {filler}", bytes([255]) * MIB, "uint8", (MIB,))
            for copy, byte in copies:
                outcomes["right" if is_right(copy, byte) else "wrong"] += 1
    return outcomes


def threads_run_out(address: str) -> dict:
    """No thread can be started: copies are made all the same, and every hold ends."""
    start = threading.Thread.start
    refused: set[str] = set()
    refusing = {"ecd-ends", "ecd-put"}

    def refuse(thread: threading.Thread) -> None:
        name = thread.name.partition("_")[0]
        if name in refusing:
            refused.add(name)
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse
    with Client(address) as client:
        pin(client)
        put(client, "k", 3)
        control.delay_us = 50_000
        right = [is_right(load(client, "k", non_blocking=True), 3) for _ in range(3)]
        try:
            client.put_async("l", gpu.encode(SHAPE, torch.uint8, 4))
        except EcdError:
            right.append(put(client, "l", 4) and is_right(load(client, "l"), 4))
        held = any(client._connection.session().index._words[8:512])
    registered = registered_after()
    for name in ("ecd-pin", "ecd-attach"):
        refusing.add(name)
        with Client(address) as client:
            client.pin()
            eventually(lambda name=name: name in refused)
            right.append(is_right(load(client, "k", non_blocking=True), 3))
            right.append(put(client, name, 4) and is_right(load(client, name), 4))
    return {"refused": sorted(refused), "right": all(right), "held": held, "registered": registered}


def await_ends() -> None:
    """Wait until all has ended that is to end after copies, or on the side, and may end now."""
    done = threading.Event()
    completions.aside(done.set)
    assert done.wait(HANG_S)


def let_go(ends: list[bool]) -> None:
    """Let the copies go on, and say so first."""
    ends.append(True)
    control.hold = Hold.NOTHING


def load_breaks_off(address: str) -> dict:
    """The driver refuses a call after a load's copy is queued: the hold lasts as long as that."""
    outlast, driver.MAX_FREE_EVENTS = copies.Copies._outlast, 0  # each event is made
    asked = Calls("cuEventCreate"), Calls("cuEventSynchronize")

    def go_on_late(count: int) -> None:
        """Once it waits, or has been refused to wait and asks again."""
        eventually(lambda: sum(calls.count for calls in asked) > count + 1)
        control.fail({})
        let_go(ends)

    def outlast_refusals(self: copies.Copies, stream: int) -> BaseException | None:
        count = sum(calls.count for calls in asked)
        threading.Thread(target=go_on_late, args=(count,), daemon=True).start()
        return outlast(self, stream)

    with Client(address) as client:
        pin(client)
        put(client, "k", 3)
        copies.Copies._outlast = outlast_refusals
        errors = []
        for call in ("cuEventCreate", "cuStreamWaitEvent"):
            gpu.content(gpu.encode((16,), torch.uint8, 1))
            control.hold = Hold.START
            control.fail({call: 900})
            ends: list[bool] = []
            try:
                load(client, "k", non_blocking=True)
            except EcdError as error:
                errors.append((type(error).__name__, bool(ends)))
    registered = registered_after()
    return {"errors": errors, "faults": control.counters().faults, "registered": registered}


def interrupted_in_a_pause(address: str) -> dict:
    """Ctrl-C comes while the driver refuses to wait for a put's copy."""
    with Client(address) as client:
        pin(client)
        tensor = gpu.encode(SHAPE, torch.uint8, 12)
        gpu.content(tensor)
        control.hold = Hold.START
        control.fail({"cuEventSynchronize": 2})
        refused = Calls("cuEventSynchronize")

        def interrupt() -> None:
            for _ in range(3):
                refused.await_more()
                os.kill(os.getpid(), signal.SIGINT)
            refused.await_more()
            control.fail({})
            let_go([])

        threading.Thread(target=interrupt, daemon=True).start()
        return put_until(client, tensor, KeyboardInterrupt)


# -- a device pool ---------------------------------------------------------------------------------


def near_of(client: Client):
    """The client's device pool, which its first copy begins to map."""
    client.pin()
    eventually(lambda: client._connection.session().near)
    return client._connection.session().near


def copies_in_pools(address: str) -> int:
    with open_channel(address) as channel:
        return pb_grpc.CacheStub(channel).Status(pb.StatusRequest(), timeout=HANG_S).counters.copies


def put_by_cpu(address: str, key: str, content: bytes) -> None:
    """Put an entry of which no copy is made."""
    with Client(address) as client, open_channel(address) as channel:
        client.put_bytes(key, content, "uint8", (len(content),))
        pb_grpc.CacheStub(channel).Status(pb.StatusRequest(), timeout=HANG_S)  # it is listed


def evict(address: str, mm_hash: str) -> None:
    with open_channel(address) as channel:
        key = pb.Key(namespace="default", mm_hash=mm_hash)
        pb_grpc.CacheStub(channel).Evict(pb.EvictRequest(key=key), timeout=HANG_S)


def promote(client: Client, key: str) -> None:
    """Have a copy of the entry made, if the daemon has room, and refused none a moment ago."""
    session = client._connection.session()
    with client.get(key) as item:
        session.near.promote_soon(session, ("default", key), item._hold.entry)


def make_near(client: Client, key: str, refusals: float = math.inf) -> None:
    """Have a copy made until there is one, or the daemon has refused it so often."""
    near = near_of(client)
    quiet = {near._quiet_until_s}  # each refusal sets another time

    def is_over() -> bool:
        quiet.add(near._quiet_until_s)
        return is_near(client, key) or len(quiet) > refusals or bool(promote(client, key))

    eventually(is_over, f"a copy of {key}")


def is_listed(client: Client, key: str) -> bool:
    """Whether the daemon has taken the put up: until then no copy of it is looked for."""
    with client.get(key) as item:
        return item._hold.entry > 0


def is_near(client: Client, key: str) -> bool:
    session = client._connection.session()
    with client.get(key) as item:
        found = near_of(client).hold(session, ("default", key), item._hold.entry, item.nbytes)
        if found is not None:
            found.end()
        return found is not None


def puts_near(address: str) -> dict:
    """What a GPU's engine puts is in the device pool too, and read over PCIe by nobody for that.

    Of a put that is waited for, whose tensor is the caller's again, a copy is made later.
    """
    device_pool.LISTED_WITHIN_S = HANG_S  # nobody asks for these copies again
    with Client(address) as client:
        near_of(client)
        stored = []
        for key, byte in (("by calls", 3), ("k", 5)):
            tensor = gpu.encode(SHAPE, torch.uint8, byte)
            stored.append(client.put_async(key, tensor).result(HANG_S))
            gpu.fill(tensor, 255)  # its next use
        at_once = control.counters()
        stored.append(put(client, "l", 6))
        eventually(lambda: all(is_near(client, key) for key in ("by calls", "k", "l")))
        later = control.counters()
        return {
            "stored": all(stored),
            "copies": copies_in_pools(address),
            "device to device": at_once.bytes_d2d,
            "host to device": at_once.bytes_h2d,
            "host to device later": later.bytes_h2d,
        }


def loads_near(address: str) -> dict:
    """Both come from the device, and no byte from the host."""
    with Client(address) as client:
        near_of(client)
        before = control.counters()
        stored = {"by calls": 3, "k": 5, "l": 6}
        right = [is_right(load(client, key), byte) for key, byte in stored.items()]
        right.append(is_right(load(client, "k", non_blocking=True), 5))
        after = control.counters()
    return {
        "right": all(right),
        "host to device": after.bytes_h2d - before.bytes_h2d,
        "device to device": after.bytes_d2d - before.bytes_d2d,
    }


def promoted_by_a_hit(address: str) -> dict:
    """An entry that a CPU has put is loaded from the host once."""
    with Client(address) as client:
        put_by_cpu(address, "k", bytes([7]) * MIB)
        near_of(client)
        eventually(lambda: is_right(load(client, "k"), 7) and is_near(client, "k"))
        before = control.counters().bytes_h2d
        right = is_right(load(client, "k"), 7)
        return {"right": right, "host to device": control.counters().bytes_h2d - before}


def more_than_it_holds(address: str) -> dict:
    """Copies are evicted and made anew: all bytes are right."""
    with Client(address) as client:
        near_of(client)
        right = []

        def use_all(non_blocking: bool) -> None:
            for number in range(24):
                put(client, f"{number}", number)
                right.append(is_right(load(client, f"{number}", non_blocking=non_blocking), number))

        for turn in range(4):
            use_all(turn % 2 > 0)
        # A put of which the daemon learns late has no copy made.
        eventually(lambda: copies_in_pools(address) > 24 or use_all(True))
        return {"right": all(right), "faults": control.counters().faults}


def another_entry_of_the_key(address: str) -> dict:
    """An item that outlives its entry never gets the bytes of the key's next one."""
    device_pool.LISTED_WITHIN_S = HANG_S  # nobody asks for these copies again
    with Client(address) as client:
        near_of(client)
        copies = copies_in_pools(address) + 1
        put(client, "k", 1)
        eventually(lambda: copies_in_pools(address) == copies)
        item = client.get("k")
        if os.environ.get("WITHOUT") == "the second look":
            before = item._hold.entry
            index.row_entry = lambda row: before
        with open_channel(address) as channel:
            stub = pb_grpc.CacheStub(channel)
            key = pb.Key(namespace="default", mm_hash="k")
            stub.Evict(pb.EvictRequest(key=key), timeout=HANG_S)
            put(client, "k", 2)
            eventually(lambda: copies_in_pools(address) == copies + 1)
        old, new = is_right(item.to("cuda"), 1), is_right(load(client, "k"), 2)
        item.close()
        return {"old": old, "new": new}


def put_again_before_the_copy(address: str) -> dict:
    """A copy of a tensor is never one of the key's next entry, which others have put meanwhile."""
    may_go, has_ended = threading.Event(), threading.Event()
    promote = device_pool.DevicePool._promote

    def promote_late(*arguments: object) -> None:
        assert may_go.wait(HANG_S)
        promote(*arguments)
        has_ended.set()

    device_pool.DevicePool._promote = promote_late
    if os.environ.get("WITHOUT") == "the hold":
        pin_own = index.IndexReader.pin_own

        def forget(reader: index.IndexReader, number: int, offset: int) -> int:
            pin = pin_own(reader, number, offset)
            reader._words[pin] = 0
            return pin

        index.IndexReader.pin_own = forget
        device_pool.JustPut.is_at = lambda put, extent: True
    found = {}
    with Client(address) as client, open_channel(address) as channel:
        near_of(client)
        stub = pb_grpc.CacheStub(channel)
        for way in ("by calls", "into granted memory"):  # the first of a namespace
            may_go.clear()
            has_ended.clear()
            stored = client.put_async(way, gpu.encode(SHAPE, torch.uint8, 1))
            eventually(lambda way=way: client.contains([way])[0])
            key = pb.Key(namespace="default", mm_hash=way)
            stub.Evict(pb.EvictRequest(key=key), timeout=HANG_S)
            put_by_cpu(address, way, bytes([2]) * MIB)
            may_go.set()
            assert stored.result(HANG_S)
            assert has_ended.wait(HANG_S)
            found[way] = is_right(load(client, way), 2)
    return found


def views(address: str) -> dict:
    """A view keeps its memory until what uses it is over, whatever is evicted meanwhile."""
    device_pool.LISTED_WITHIN_S = HANG_S  # nobody asks for these copies again
    with Client(address) as client:
        put_by_cpu(address, "l", b"abcd" * 4)
        near_of(client)
        put(client, "k", 5)
        eventually(lambda: is_near(client, "k"))
        with client.get("l") as item:
            none_yet = item.device_view("cuda") is None
        eventually(lambda: is_near(client, "l"))
        before = control.counters()
        with client.get("k") as item:
            view = item.device_view("cuda")
        copied = control.counters().copies - before.copies
        exported = to_dlpack(view.view(4, -1)[2])
        del view
        gc.collect()
        for number in range(40):
            put(client, f"{number}", 255)
            load(client, f"{number}")
        row = from_dlpack(exported)
        right = is_right(row, 5)
        held = lambda: any(client._connection.session().index._words[8:512])  # noqa: E731
        await_ends()
        control.hold = Hold.FILLS
        gpu.encode((16,), torch.uint8, 1)  # work that is queued, and may use the view
        waits = Calls("cuEventSynchronize")
        del row, exported
        gc.collect()
        eventually(lambda: waits.count or not held(), "the end of that work is waited for")
        is_early = not held()
        control.hold = Hold.NOTHING
        eventually(lambda: not held())
        with client.get("l") as item:
            item.to("cuda")
            eventually(lambda: is_near(client, "l") or promote(client, "l"))
            view = item.device_view("cuda")
        content = [str(view.dtype), list(view.shape), gpu.content(view) == b"abcd" * 4]
        del view
    return {"none yet": none_yet, "copies": copied, "right": right, "early": is_early, "l": content}


def view_of_k(client: Client) -> torch.Tensor:
    """A view of the copy of k, which this makes and puts first."""
    device_pool.LISTED_WITHIN_S = HANG_S  # nobody asks for this copy again
    near_of(client)
    put(client, "k", 5)
    eventually(lambda: is_near(client, "k"))
    with client.get("k") as item:
        view = item.device_view("cuda")
    gpu.wait()
    await_ends()
    return view


def view_dropped_by_another_thread(address: str) -> dict:
    """The last reference goes in a thread on another stream, while the model's work goes on."""
    asked: set[int] = set()
    begin, wait = driver.Event.__init__, driver.Event.wait

    def begin_and_note(event: driver.Event, device: int, stream: int) -> None:
        event.of = stream
        begin(event, device, stream)

    def note_and_wait(event: driver.Event) -> None:
        asked.add(event.of)
        wait(event)

    driver.Event.__init__, driver.Event.wait = begin_and_note, note_and_wait
    with Client(address) as client:
        views = [view_of_k(client)]
        held = lambda: any(client._connection.session().index._words[8:512])  # noqa: E731

        def drop() -> None:
            gpu.use_stream(gpu.new_stream(gpu.device))
            views.clear()

        was_held = held()
        asked.clear()  # of the copies before
        control.hold = Hold.FILLS
        gpu.encode((16,), torch.uint8, 1)  # work that may use the view
        dropping = threading.Thread(target=drop)
        dropping.start()
        dropping.join()
        waits_for_it = lambda: gpu.stream.cuda_stream in asked  # noqa: E731
        eventually(lambda: waits_for_it() or not held(), "the end of that work is waited for")
        is_early = not held()
        control.hold = Hold.NOTHING
        eventually(lambda: not held())
    return {"held": was_held, "early": is_early}


def view_dropped_amid_a_capture(address: str) -> dict:
    """The model's stream is being captured as the last reference goes, in this thread or another.

    The graph is whole, and the hold lasts until the work from before the capture is over.
    """
    from cuda.bindings import driver as cuda

    from support.cuda.gpu import call

    stream, found = cuda.CUstream(gpu.stream.cuda_stream), []
    with Client(address) as client:
        held = lambda: any(client._connection.session().index._words[8:512])  # noqa: E731
        for elsewhere in (False, True):
            views = [view_of_k(client)]
            control.hold = Hold.FILLS
            gpu.encode((16,), torch.uint8, 1)  # work that may use the view
            asked = Calls("cuStreamIsCapturing"), Calls("cuEventRecord"), Calls("cuEventQuery")
            with driver.on(gpu.device):
                call(cuda.cuStreamBeginCapture, stream, cuda.CUstreamCaptureMode(0))
            if elsewhere:
                dropping = threading.Thread(target=views.clear)
                dropping.start()
                dropping.join()
            else:
                views.clear()
            eventually(lambda asked=asked: sum(calls.count for calls in asked) > 3 or not held())
            is_early, waits = not held(), Calls("cuEventSynchronize")
            with driver.on(gpu.device):
                [code, _] = cuda.cuStreamEndCapture(stream)
            eventually(lambda waits=waits: waits.count or not held())
            found.append([str(code.name), is_early, not held()])
            control.hold = Hold.NOTHING
            eventually(lambda: not held())
    return {"found": found, "warnings": warnings}


def import_is_refused(address: str) -> dict:
    control.fail({"cuMemImportFromShareableHandle": 1})
    with Client(address) as client:
        pin(client)
        right = put(client, "k", 8) and is_right(load(client, "k"), 8)
        near = client._connection.session().near
    return {"right": right, "near": near is not None, "warnings": warnings}


def has_no_pool_of_its_own(address: str) -> dict:
    """A process on a GPU without a device pool uses the host's."""
    with Client(address) as client:
        pin(client)
        right = put(client, "k", 8) and is_right(load(client, "k"), 8)
        return {"right": right, "near": client._connection.session().near is not None}


def before_and_after_the_memory_came(address: str) -> dict:
    """A session that has attached before uses the host's pool, until the device's is there."""
    with Client(address) as client:
        pin(client)
        right = [put(client, "k", 8), is_right(load(client, "k"), 8)]
        has_near = client._connection.session().near is not None
        control.device_bytes = 0
        eventually(lambda: client._connection.session().near is not None)
        eventually(lambda: is_right(load(client, "k"), 8) and is_near(client, "k"))
        return {"right": all(right), "had it before": has_near}


def copies_near_fail(address: str) -> dict:
    """The device fails while an entry is promoted: nothing is committed, or tried again."""
    with Client(address) as client:
        put_by_cpu(address, "k", bytes([7]) * MIB)
        near_of(client)
        session = client._connection.session()
        with client.get("k") as item:
            entry = item._hold.entry
        control.fail({"copy": 700})
        session.near.promote_soon(session, ("default", "k"), entry)
        eventually(lambda: session.near._has_failed)
        control.fail({})
        return {"copies": copies_in_pools(address), "kept": client.contains(["k"])}


def loads_near_fail(address: str) -> dict:
    """A load of a copy is refused, at its start or after it: the host's bytes are loaded."""
    with Client(address) as client:
        put_by_cpu(address, "k", bytes([7]) * MIB)
        near = near_of(client)
        eventually(lambda: is_right(load(client, "k"), 7) and is_near(client, "k"))
        words = client._connection.session().index._words
        fail = near.fail

        def fail_and_recover(error: BaseException) -> None:
            control.fail({})
            fail(error)

        near.fail = fail_and_recover
        before = control.counters()
        with client.get("k") as item:
            control.fail({os.environ["CALL"]: 1})
            right = [is_right(item.to("cuda", non_blocking=True), 7)]
        after = control.counters()
        right.append(is_right(load(client, "k"), 7))
        eventually(lambda: not any(words[8:512]), what="all pins have ended")
        return {
            "right": all(right),
            "from the host": after.bytes_h2d - before.bytes_h2d,
            "near again": control.counters().bytes_d2d > after.bytes_d2d,
            "warnings": warnings,
        }


def goes_on_through_restarts(address: str) -> dict:
    """Puts and loads until a line comes: misses are allowed, errors and wrong bytes are not."""
    wrong, number = 0, 0
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), done.set()), daemon=True).start()
    print("ready", flush=True)
    with Client(address) as client:
        client.pin()
        while not done.is_set():
            number += 1
            byte = number % 16
            try:
                put(client, str(byte), byte)
                if item := client.get(str(byte)):
                    with item:
                        wrong += not is_right(item.to("cuda", non_blocking=True), byte)
            except EcdError:
                eventually(lambda: client.connected or done.is_set(), "the daemon is back")
    return {"wrong": wrong, "some": number > 12, "faults": control.counters().faults}


def dies_amid_a_promotion(address: str) -> dict:
    """Killed between the halves of a copy into the device pool, which lasts or is held there."""
    put_by_cpu(address, "dead", bytes([7]) * NEAR_BYTES)
    client = Client(address)
    near_of(client)
    before = control.counters().halfway
    control.delay_us = 400_000
    if os.environ.get("HELD"):
        control.hold = Hold.MIDDLE
    eventually(lambda: control.counters().halfway > before or promote(client, "dead"))
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def dies_amid_a_save(address: str) -> dict:
    """Killed between the halves of a copy into the host pool, which is held there."""
    copy_to = TensorSource.copy_to

    def say_where(source: TensorSource, pool: object, extent: Extent) -> None:
        print(f"its second half lies at {extent.offset + extent.nbytes // 2}", flush=True)
        copy_to(source, pool, extent)

    TensorSource.copy_to = say_where
    client = Client(address)
    pin(client)
    tensor = gpu.encode(SHAPE, torch.uint8, 7)
    assert is_right(tensor, 7)
    before = control.counters().halfway
    control.hold = Hold.MIDDLE
    client.put_async("dead", tensor)
    eventually(lambda: control.counters().halfway > before)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


# -- the rules for a device pool with room for one copy; WITHOUT names what is left out ------------


def copies_after_a_death(address: str) -> dict:
    """Another engine is killed amid its copy; this one's takes its place, once that may be."""
    with Client(address) as client:
        put_by_cpu(address, "k", bytes([5]) * NEAR_BYTES)
        near_of(client)
        print("ready", flush=True)
        sys.stdin.readline()  # it is dead
        make_near(client, "k", refusals=3)
        print("tried", flush=True)
        sys.stdin.readline()  # its copy is over, too, and the daemon has waited for that
        make_near(client, "k")
        return {"right": is_right(load(client, "k"), 5)}


def displaced_before_its_pin(address: str) -> dict:
    """A reader is late to pin the copy that it has found: another entry's lies there by then."""
    announce, may_displace = index.IndexReader._announce, []
    if os.environ.get("WITHOUT") == "recheck":
        index.row_mark = lambda row: b""

    def announce_late(reader: index.IndexReader, named: int) -> int:
        if may_displace:
            make_near(may_displace.pop(), "other")
        return announce(reader, named)

    index.IndexReader._announce = announce_late
    with Client(address) as client, Client(address) as another:
        for key, byte in (("k", 5), ("other", 6)):
            put_by_cpu(address, key, bytes([byte]) * NEAR_BYTES)
        make_near(client, "k")
        near_of(another)
        with client.get("k") as item:
            may_displace.append(another)
            copy = item.to("cuda")
        return {"right": not may_displace and is_right(copy, 5)}


def next_entry_of_the_key(address: str) -> dict:
    """An entry that had a copy is evicted, and its key stored anew."""
    with Client(address) as client:
        put_by_cpu(address, "k", bytes([5]) * NEAR_BYTES)
        make_near(client, "k")
        evict(address, "k")
        put_by_cpu(address, "k", bytes([6]) * NEAR_BYTES)
        eventually(lambda: is_listed(client, "k"))
        return {"right": is_right(load(client, "k"), 6)}


def committed_after_its_original(address: str) -> dict:
    """The entry goes, and its key is stored anew, between a copy's end and its commit."""
    move, is_copied, may_commit = copies.Copies.move, threading.Event(), threading.Event()

    def move_and_wait(*arguments: object) -> None:
        move(*arguments)
        is_copied.set()
        assert may_commit.wait(HANG_S)

    copies.Copies.move = move_and_wait
    with Client(address) as client:
        put_by_cpu(address, "k", bytes([5]) * NEAR_BYTES)
        near = near_of(client)
        eventually(lambda: is_copied.is_set() or promote(client, "k"))
        evict(address, "k")
        put_by_cpu(address, "k", bytes([6]) * NEAR_BYTES)
        may_commit.set()
        near._side.submit(int).result(HANG_S)  # behind the commit
        eventually(lambda: is_listed(client, "k"))
        return {"right": is_right(load(client, "k"), 6)}


def copied_from_a_tensor(address: str) -> dict:
    """One tensor ends while its copy is on its way, another is written once its put is done."""
    without, move = os.environ.get("WITHOUT"), copies.Copies.move
    is_moving = threading.Event()

    def move_late(*arguments: object) -> None:
        control.hold = Hold.START
        is_moving.set()
        move(*arguments)

    def forget_and_copy(source: TensorSource, address: int) -> None:
        part, source._tensor = (source._tensor.data_ptr(), source._tensor.nbytes), None
        source._copies.move([part], address, source._ready)

    class Done(device_pool.JustPut):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            self._then.pop()()

    copies.Copies.move = move_late
    device_pool.LISTED_WITHIN_S = HANG_S  # nobody asks for these copies again
    if without == "the reference":
        TensorSource.copy_near = forget_and_copy
    if without == "the wait":
        device_pool.JustPut = Done
    with Client(address) as client:
        near_of(client)
        stored = client.put_async("ended", gpu.encode(SHAPE, torch.uint8, 5))
        assert is_moving.wait(HANG_S)
        others = [gpu.encode(SHAPE, torch.uint8, 255) for _ in range(3)]
        gpu.wait()
        control.hold = Hold.NOTHING
        assert stored.result(HANG_S)
        eventually(lambda: is_near(client, "ended"))
        del others
        is_moving.clear()
        tensor = gpu.encode(SHAPE, torch.uint8, 6)
        stored = client.put_async("written", tensor)
        assert is_moving.wait(HANG_S)
        if stored.done():  # too early
            gpu.fill(tensor, 255)
            gpu.wait()
        control.hold = Hold.NOTHING
        assert stored.result(HANG_S)
        gpu.fill(tensor, 255)
        eventually(lambda: is_near(client, "written"))
        right = [is_right(load(client, key), byte) for key, byte in (("ended", 5), ("written", 6))]
    return {"ended": right[0], "written": right[1]}


def closed_amid_use(address: str) -> dict:
    """The client is closed while a view is in use, and a copy into the pool on its way."""
    if os.environ.get("WITHOUT") == "R4":
        end = Session.end

        def let_all_go(session: Session) -> None:
            end(session)
            session._dma.end()

        Session.end = let_all_go
    counters = control.counters
    with Client(address) as client:
        for key in ("k", "l"):
            put_by_cpu(address, key, bytes([5]) * MIB)
        make_near(client, "k")
        with client.get("k") as item:
            view = item.device_view("cuda")
        before = counters().halfway
        control.hold = Hold.MIDDLE
        is_view = os.environ["USE"] == "view"
        if is_view:
            with driver.on(gpu.device):
                to, stream = gpu._out.address, gpu.stream.cuda_stream
                driver.copy(to, view.data_ptr(), view.nbytes, stream)
        else:
            del view
        eventually(lambda: counters().halfway > before or (not is_view and promote(client, "l")))
    await_ends()  # whatever is let go of is unmapped
    control.hold = Hold.NOTHING
    eventually(lambda: counters().faults or counters().finished == counters().copies)
    return {"right": counters().faults == 0}


def no_memory_to_make_it_dense(address: str) -> dict:
    def contiguous(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with Client(address) as client:
        pin(client)
        tensor = gpu.encode(SHAPE, torch.uint8, 3)
        torch.Tensor.contiguous = contiguous
        try:
            client.put_async("k", tensor)
        except EcdError as error:
            return {"error": str(error)}
    return {}


def unpinning_takes_long(address: str) -> dict:
    """Whoever lets go of the last item does not wait for the pool to be unregistered."""
    unregister, may_end, ended = driver.unregister, threading.Event(), []

    def unregister_late(at: int) -> None:
        ended.append(not may_end.wait(HANG_S))
        unregister(at)

    driver.unregister = unregister_late
    client = Client(address)
    pin(client)
    put(client, "k", 3)
    item = client.get("k")
    client.close()
    before = control.counters()
    item.close()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    meanwhile = not ended
    may_end.set()
    waits = control.counters().main_waits - before.main_waits
    eventually(lambda: control.counters().registrations == 1)
    return {"closed and forked meanwhile": meanwhile, "waits": waits}


def collected_amid_a_load(address: str) -> dict:
    """An item in a cycle is collected with its session, when its copy is still under way."""
    gc.disable()
    client = Client(address)
    pin(client)
    put(client, "k", 3)
    control.delay_us = 200_000
    item = client.get("k")
    copy = item.to("cuda", non_blocking=True)
    cycle: list[object] = [item]
    cycle.append(cycle)
    client.close()
    del client, item, cycle
    gc.collect()
    right = is_right(copy, 3)
    eventually(lambda: control.counters().registrations == 1)
    return {"right": right, "faults": control.counters().faults}


def copies_outlast_their_process(address: str) -> dict:
    """What the session's page says of copies before a fork, after it, and of the next session."""
    words = []
    with Client(address) as client:
        pin(client)
        dma = client._connection.session()._dma
        words.append(dma._words[DMA_WORD])
        put(client, "k", 3)
        words.append(dma._words[DMA_WORD])
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        words.append(dma._words[DMA_WORD])
        put(client, "l", 3)
        words.append(dma._words[DMA_WORD])
    words.append(dma._words[DMA_WORD])
    with Client(address) as client:
        pin(client)
        put(client, "m", 3)
        words.append(client._connection.session()._dma._words[DMA_WORD])
    return {"words": words}


def child_after_its_parents_client(address: str) -> dict:
    """A child of a process that has no client any more is told that it cannot make one."""
    with Client(address) as client:
        pin(client)
        put(client, "k", 3)
        control.delay_us = 50_000
        right = is_right(load(client, "k", non_blocking=True), 3)
    del client
    gc.collect()
    child = os.fork()
    if child == 0:
        try:
            Client(address)
        except DaemonUnavailable as error:
            os._exit(0 if "had a client" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    return {"right": right, "child": status}


def shown_to_operators(address: str) -> dict:
    from ecd_client.session.channel import open_channel
    from ecd_proto.v1 import cache_pb2 as pb
    from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

    with open_channel(address) as channel:
        status = pb_grpc.CacheStub(channel).Status
        before = status(pb.StatusRequest()).pinning
        with Client(address), Client(address) as client:
            pin(client)
            eventually(lambda: status(pb.StatusRequest()).pinning == 1)
        eventually(lambda: status(pb.StatusRequest()).pinning == 0)
    return {"before": before}


def interrupted_put(address: str) -> dict:
    """Ctrl-C in the middle of a put's copy: its extent is not given back before the copy ends."""
    with Client(address) as client:
        pin(client)
        put(client, "first", 1)
        tensor = gpu.encode(SHAPE, torch.uint8, 12)
        gpu.content(tensor)
        control.hold = Hold.MIDDLE
        halfway = control.counters().halfway

        def interrupt() -> None:
            eventually(lambda: control.counters().halfway > halfway)
            os.kill(os.getpid(), signal.SIGINT)
            control.hold = Hold.NOTHING

        threading.Thread(target=interrupt, daemon=True).start()
        return put_until(client, tensor, KeyboardInterrupt)


def lost(client: Client, *uses: Callable[[], object]) -> dict:
    """The device fails for good: what each use raises, and whether the bytes are on the host."""
    control.lost = 999
    errors = []
    for use in (
        lambda: load(client, "k"),
        lambda: load(client, "k", non_blocking=True),
        *uses,
        lambda: client.put("l", torch.frombuffer(bytearray(MIB), dtype=torch.uint8)),
    ):
        try:
            use()
        except EcdError as error:
            errors.append(type(error).__name__)
    with client.get("k") as item:
        on_host = set(item.view.tobytes()) == {13}
    return {"errors": errors, "on the host": on_host}


def device_is_lost(address: str) -> dict:
    with Client(address) as client:
        pin(client)
        put(client, "k", 13)
        found = lost(client)
    return found | {"warnings": len(warnings)}


def device_is_lost_near(address: str) -> dict:
    """What is in the lost device's pool is on the host, too."""
    with Client(address) as client:
        near_of(client)
        put_by_cpu(address, "k", bytes([13]) * MIB)
        eventually(lambda: is_right(load(client, "k"), 13) and is_near(client, "k"))
        return lost(client, lambda: client.get("k").device_view("cuda"))


def forked_amid_copies(address: str) -> dict:
    """A child ends what its parent has, while the parent's copies are under way."""
    with Client(address) as client:
        pin(client)
        put(client, "k", 14)
        control.delay_us = 100_000
        item = client.get("k")
        copy = item.to("cuda", non_blocking=True)
        child = os.fork()
        if child == 0:
            destroyed = Calls("cuEventDestroy")  # which a driver may never return from
            with contextlib.suppress(EcdError):
                item.close()
            client.close()
            item._loads.clear()
            gc.collect()
            os._exit(destroyed.count)
        _, status = os.waitpid(child, 0)
        right = is_right(copy, 14)
        item.close()
        again = put(client, "l", 15) and is_right(load(client, "l"), 15)
        counters = control.counters()
    return {"child": status, "right": right, "again": again, "faults": counters.faults}


def daemon_refuses_attaching(address: str) -> dict:
    """The daemon does not learn of the process: only copies from the pool are of pinned memory."""
    from ecd_client.device import dma

    def refuse(path: str, token: str, uid: int) -> None:
        raise EcdError("no")

    dma.attach = refuse
    with Client(address) as client:
        client.pin()
        eventually(lambda: pool_of(client)._pinned)
        eventually(lambda: pool_of(client)._pinned.pinned_bytes == pool_of(client).nbytes)
        before = control.counters()
        stored = put(client, "k", 16)
        saved = control.counters()
        right = is_right(load(client, "k"), 16)
        loaded = control.counters()
        word = client._connection.session()._dma._words[DMA_WORD]
    return {
        "stored": stored,
        "right": right,
        "pageable saves": saved.pageable_copies - before.pageable_copies,
        "pageable loads": loaded.pageable_copies - saved.pageable_copies,
        "word": word,
    }


def tensors_of_all_kinds(address: str) -> dict:
    """Empty, transposed, of several dtypes: each comes back as its dense bytes."""
    with Client(address) as client:
        pin(client)
        right = []
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int8, torch.bool)):
            tensor = gpu.encode((3, 5, 7), dtype, 1)
            right.append(client.put(str(number), tensor))
            copy = load(client, str(number))
            right.append(copy.dtype == dtype and copy.shape == (3, 5, 7) and is_right(copy, 1))
        client.put("empty", torch.empty(0, 4))
        right.append(load(client, "empty").shape == (0, 4))
    return {"right": right}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
