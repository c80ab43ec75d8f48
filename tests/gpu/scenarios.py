"""One client of a real daemon on the stand-in's GPU, and what may go wrong there.

    python scenarios.py NAME ADDRESS

Prints what came of the scenario, as one line of JSON.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time

import torch

from ecd_client import Client, EcdError
from ecd_client.device import pinned
from ecd_proto.shm.session_page import DMA_WORD
from support.cuda.gpu import StandinGpu
from support.cuda.standin import Control, Hold
from support.daemon import eventually

MIB = 1 << 20
SHAPE = (MIB,)
warnings: list[str] = []


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


logging.getLogger("ecd_client").addHandler(Listener(logging.WARNING))
control = Control.of_this_process()
gpu = StandinGpu.use(int(os.environ.get("GPU", "0")))


def pool_of(client: Client):
    return client._connection.session().pools.granted


def pin(client: Client) -> None:
    client.pin()
    eventually(lambda: pool_of(client)._pinned and pool_of(client)._dma.may_write)
    eventually(lambda: pool_of(client)._pinned.pinned_bytes == pool_of(client).nbytes)


def put(client: Client, key: str, byte: int) -> bool:
    return client.put(key, gpu.encode(SHAPE, torch.uint8, byte))


def load(client: Client, key: str, **options: bool) -> torch.Tensor:
    with client.get(key, 5.0) as item:
        return item.to("cuda", **options)


def is_right(tensor: torch.Tensor, byte: int) -> bool:
    return set(gpu.content(tensor)) == {byte}


def nothing_waits(address: str) -> dict:
    """A put_async and a load that is not waited for, with copies that take 200 ms."""
    with Client(address) as client:
        pin(client)
        control.delay_us = 200_000
        before, started = control.counters(), time.monotonic()
        output = gpu.encode(SHAPE, torch.uint8, 5)
        stored = client.put_async("k", output)
        del output
        saved_s, started = time.monotonic() - started, time.monotonic()
        is_early = bool(client.contains(["k"])[0])
        stored.result(20)
        started = time.monotonic()
        copy = load(client, "k", non_blocking=True)
        loaded_s = time.monotonic() - started
        waits = control.counters().main_waits - before.main_waits
        right = is_right(copy, 5)
        after = control.counters()
    return {
        "put returned at once": saved_s < 0.1,
        "stored before its copy": is_early,
        "load returned at once": loaded_s < 0.1,
        "waits": waits,
        "right": right,
        "pageable": after.pageable_copies - before.pageable_copies,
        "registered after": control.counters().registered_bytes - gpu._out.nbytes,
    }


def registration_is_refused(address: str) -> dict:
    control.fail({"cuMemHostRegister": 2})
    with Client(address) as client:
        client.pin()
        eventually(lambda: client.pinning.failure)
        control.fail({})
        stored = put(client, "k", 6)
        right = is_right(load(client, "k"), 6)
        right &= is_right(load(client, "k", non_blocking=True), 6)
        failure = client.pinning.failure
    return {"stored": stored, "right": right, "failure": failure, "warnings": warnings}


def half_of_it_is_refused(address: str) -> dict:
    """Registration in pieces of 8 MiB stops half way: what lies before is pinned all the same."""
    pinned.PIECE_BYTES = 8 * MIB
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
        "registered after": control.counters().registered_bytes - gpu._out.nbytes,
    }


def pieces_are_not_crossed(address: str) -> dict:
    pinned.PIECE_BYTES = MIB + 4096
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


def second_gpu(address: str) -> dict:
    """A process that uses the second GPU has no context on the first."""
    with Client(address) as client:
        client.pin("cuda")
        eventually(lambda: client.pinning.nbytes)
        right = put(client, "k", 8) and is_right(load(client, "k", non_blocking=True), 8)
        with client.get("k") as item:
            right &= is_right(item.to(f"cuda:{gpu.device}"), 8)
        return {"right": right, "contexts": control.counters().contexts}


def copies_fail(address: str) -> dict:
    """A copy faults, which is the end of the process's context: puts fail and store nothing."""
    with Client(address) as client:
        pin(client)
        put(client, "k", 17)
        control.fail({"copy": 700})
        error = client.put_async("l", gpu.encode(SHAPE, torch.uint8, 18)).exception(20)
        control.fail({})
        stored = client.put("m", torch.full(SHAPE, 19, dtype=torch.uint8))
        contained = client.contains(["k", "l", "m"])
    return {"error": type(error).__name__, "stored": stored, "contained": contained}


def two_clients_pin_once(address: str) -> dict:
    with Client(address) as one, Client(address) as two:
        pin(one)
        pin(two)
        calls = control.counters().register_calls
        right = put(one, "k", 9) and is_right(load(two, "k"), 9)
        one.close()
        eventually(lambda: pool_of(two)._pinned.users == 1)
        still = is_right(load(two, "k"), 9) and put(two, "l", 10)
    eventually(lambda: control.counters().registrations == 1)
    return {"calls": calls - 1, "right": right, "still": still, "warnings": warnings}


def closed_amid_copies(address: str) -> dict:
    """The client is closed while a load is under way: memory stays mapped and pinned until then."""
    with Client(address) as client:
        pin(client)
        put(client, "k", 11)
        control.hold = Hold.MIDDLE
        copy = load(client, "k", non_blocking=True)
        threading.Timer(0.5, lambda: setattr(control, "hold", Hold.NOTHING)).start()
    closed_early = control.hold is not Hold.NOTHING
    right = is_right(copy, 11)
    eventually(lambda: control.counters().registrations == 1)
    return {"closed early": closed_early, "right": right, "faults": control.counters().faults}


def shown_to_operators(address: str) -> dict:
    from ecd_client.calls import open_channel
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
        control.hold = Hold.MIDDLE
        tensor = gpu.encode(SHAPE, torch.uint8, 12)
        asked = control.counters().copies

        def interrupt() -> None:
            eventually(lambda: control.counters().copies > asked)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            control.hold = Hold.NOTHING

        threading.Thread(target=interrupt).start()
        finished = None
        try:
            client.put("k", tensor)
        except KeyboardInterrupt:
            counters = control.counters()
            finished = counters.finished == counters.copies
        return {"interrupted": finished is not None, "copy had ended": finished}


def device_is_lost(address: str) -> dict:
    with Client(address) as client:
        pin(client)
        put(client, "k", 13)
        control.lost = 999
        errors = []
        for use in (
            lambda: load(client, "k"),
            lambda: load(client, "k", non_blocking=True),
            lambda: client.put("l", torch.frombuffer(bytearray(MIB), dtype=torch.uint8)),
        ):
            try:
                use()
            except EcdError as error:
                errors.append(type(error).__name__)
        with client.get("k") as item:
            on_host = set(item.view.tobytes()) == {13}
    return {"errors": errors, "on the host": on_host, "warnings": len(warnings)}


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
            with contextlib.suppress(EcdError):
                item.close()
            client.close()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        right = is_right(copy, 14)
        item.close()
        again = put(client, "l", 15) and is_right(load(client, "l"), 15)
        counters = control.counters()
    return {"child": status, "right": right, "again": again, "faults": counters.faults}


def daemon_refuses_attaching(address: str) -> dict:
    """The daemon does not learn of the process: copies into the pool are not DMA, others are."""
    from ecd_client.device import dma

    def refuse(path: str, token: str) -> None:
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
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
