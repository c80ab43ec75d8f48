"""What the stand-in for CUDA's driver has to be like, for the other tests here to mean something.

Each script is the smallest that shows one property. Those that neither direct nor watch the driver
run on a GPU too, and then show where the stand-in guesses wrong.
"""

from __future__ import annotations

import fcntl
import signal
import subprocess
from pathlib import Path

import pytest

from support.cuda import standin
from support.cuda.processes import Cuda
from support.cuda.standin import Control, Hold, physical_bytes
from support.waiting import HANG_S, eventually

MIB = 1 << 20
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 1, 2, 3, 100
INVALID_CONTEXT, INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 201, 400, 600, 700
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED = 900, 901, 904
CAPTURE_ISOLATION, CAPTURE_IMPLICIT, CAPTURED_EVENT = 905, 906, 907
CAPTURE_WRONG_THREAD = 908
CONTEXT_IS_DESTROYED, HOST_REGISTERED, HOST_NOT_REGISTERED, UNKNOWN = 709, 712, 713, 999

START = """
import ctypes, os, socket, sys, threading
from support.cuda.calls import *
"""


def heard(process: subprocess.Popen[str]) -> str:
    """The next line that a script says."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def answer(process: subprocess.Popen[str]) -> None:
    """Let a script go on that has said something."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A file of zeros that scripts map, and the test reads as another process would."""
    path = tmp_path / "pool"
    path.write_bytes(bytes(2 * MIB))
    return path


# -- when work is done -----------------------------------------------------------------------------

COPY_TO_POOL = (
    START
    + """
use_device()
source, target, side = tensor(b"n" * MIB), pinned(2 * MIB, sys.argv[1]), stream()
say("ready")
call(cu.cuMemcpyAsync, target, source, MIB, side)
over = event(side)
say("queued")
if "wait" in sys.argv:
    call(cu.cuEventSynchronize, over)
say("committed")
call(cu.cuEventSynchronize, over)
"""
)


def test_a_copy_is_done_later_and_in_two_halves(cuda: Cuda, control: Control, pool: Path) -> None:
    script = cuda.start(COPY_TO_POOL, pool, "wait")
    assert heard(script) == "ready"
    made = control.counters().halfway
    control.hold = Hold.START
    answer(script)
    assert heard(script) == "queued"
    assert pool.read_bytes() == bytes(2 * MIB)
    control.hold = Hold.MIDDLE
    eventually(lambda: control.counters().halfway > made, what="halfway")
    half = MIB // 2
    assert pool.read_bytes()[:MIB] == b"n" * half + bytes(half)
    control.hold = Hold.NOTHING
    answer(script)
    assert heard(script) == "committed"
    assert pool.read_bytes()[:MIB] == b"n" * MIB


@pytest.mark.parametrize("hold", [Hold.START, Hold.MIDDLE])
def test_a_commit_that_does_not_wait_shows_wrong_bytes(
    cuda: Cuda, control: Control, pool: Path, hold: Hold
) -> None:
    """Rule W2."""
    script = cuda.start(COPY_TO_POOL, pool)
    assert heard(script) == "ready"
    control.hold = hold
    answer(script)
    assert heard(script) == "queued"
    answer(script)
    assert heard(script) == "committed"
    assert pool.read_bytes()[:MIB] != b"n" * MIB
    control.hold = Hold.NOTHING
    answer(script)
    assert script.wait(HANG_S) == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_that_does_not_wait_for_the_producer_copies_wrong_bytes(
    cuda: Cuda, control: Control, pool: Path, waits: bool
) -> None:
    """Rule W1. The fill stands for the kernel that makes a tensor."""
    control.hold = Hold.FILLS
    program = """
use_device()
source, target = tensor(b"o" * MIB), pinned(2 * MIB, sys.argv[1])
model, side = stream(), stream()
call(cu.cuMemsetD8Async, source, ord("n"), MIB, model)
if sys.argv[2] == "True":
    call(cu.cuStreamWaitEvent, side, event(model), 0)
call(cu.cuMemcpyAsync, target, source, MIB, side)
say(error(cu.cuStreamQuery, model))
call(cu.cuStreamSynchronize, side)
"""
    before = 1  # the copy that makes the tensor
    script = cuda.start(START + program, pool, waits)
    assert heard(script) == str(NOT_READY)
    if not waits:
        eventually(lambda: control.counters().finished > before, what="the copy")
    assert control.counters().finished == before + (not waits)
    control.hold = Hold.NOTHING
    answer(script)
    assert script.wait(HANG_S) == 0
    assert pool.read_bytes()[:MIB] == (b"n" if waits else b"o") * MIB


def test_a_pinned_source_is_read_late_and_a_pageable_one_at_once(
    cuda: Cuda, control: Control
) -> None:
    control.hold = Hold.START
    program = """
use_device()
targets = [call(cu.cuMemAlloc, MIB) for _ in range(2)]
sources, side = [pinned(MIB), host(MIB)], stream()
for target, source in zip(targets, sources):
    ctypes.memset(source, ord("o"), MIB)
    call(cu.cuMemcpyAsync, target, source, MIB, side)
for source in sources:
    ctypes.memset(source, ord("n"), MIB)
say("queued")
print(*(read(target, 1).decode() for target in targets))
"""
    script = cuda.start(START + program)
    assert heard(script) == "queued"
    assert control.counters().finished == 0
    control.hold = Hold.NOTHING
    answer(script)
    assert heard(script) == "n o"
    assert control.counters().pageable_copies == 1 + 2  # and the two that read


def test_calls_that_wait_are_counted_by_thread(cuda: Cuda, control: Control) -> None:
    program = """
use_device()
device, side = call(cu.cuMemAlloc, MIB), stream()
pageable, registered = host(MIB), pinned(MIB)

def no_waits():
    call(cu.cuMemcpyAsync, device, registered, MIB, side)
    call(cu.cuMemcpyAsync, registered, device, MIB, side)
    call(cu.cuMemcpyAsync, device, pageable, MIB, side)
    call(cu.cuMemcpyDtoD, int(device) + 64, device, 64)
    error(cu.cuStreamQuery, side)
    error(cu.cuEventQuery, event(side))

def five_waits():
    call(cu.cuMemcpyAsync, pageable, device, MIB, side)
    call(cu.cuMemcpyDtoH, registered, device, MIB)
    call(cu.cuStreamSynchronize, side)
    call(cu.cuEventSynchronize, event(side))
    call(cu.cuCtxSynchronize)

def on_another_thread(function):
    thread = threading.Thread(target=lambda: (use_device(), function()))
    thread.start()
    thread.join()

for step in (no_waits, five_waits):
    step()
    say(step.__name__)
    on_another_thread(step)
    say(step.__name__)
"""
    script = cuda.start(START + program)
    for name, main, other in [
        ("no_waits", 0, 0),
        ("no_waits", 0, 0),
        ("five_waits", 5, 0),
        ("five_waits", 5, 5),
    ]:
        assert heard(script) == name
        counters = control.counters()
        assert (counters.main_waits, counters.other_waits) == (main, other)
        answer(script)


# -- default streams -------------------------------------------------------------------------------

DEFAULT_STREAMS = (
    START
    + f"""
from support.cuda.standin import Control, Hold
NOT_READY = {NOT_READY}
"""
    + """
use_device()
control = Control.of_this_process()
null, legacy, own = (cu.CUstream(number) for number in range(3))
blocking, another, free, witness = stream(0), stream(0), stream(), stream()

def show(first, second, is_ordered):
    # A copy on the second stream waits for a fill on the first, or does not.
    source, target, waste = (tensor(b"o" * MIB) for _ in range(3))
    control.hold = Hold.FILLS
    call(cu.cuMemsetD8Async, source, ord("n"), MIB, first)
    call(cu.cuMemcpyAsync, target, source, MIB, second)
    if is_ordered:
        call(cu.cuMemcpyAsync, waste, source, MIB, witness)
        call(cu.cuStreamSynchronize, witness)  # in which time the copy could have been done
    else:
        call(cu.cuStreamSynchronize, second)
    assert error(cu.cuStreamQuery, second) == (NOT_READY if is_ordered else 0)
    control.hold = Hold.NOTHING
    assert read(target, MIB) == (b"n" if is_ordered else b"o") * MIB
"""
)


@pytest.mark.usefixtures("control")
def test_the_legacy_default_stream_and_blocking_ones_wait_for_each_other(cuda: Cuda) -> None:
    cuda.run(
        DEFAULT_STREAMS
        + """
for other in blocking, own:
    for default in null, legacy:
        show(default, other, True)
        show(other, default, True)
show(blocking, another, False)
for default in legacy, own:
    show(free, default, False)
    show(default, free, False)
"""
    )


@pytest.mark.usefixtures("control")
def test_each_thread_has_a_default_stream_of_its_own(cuda: Cuda) -> None:
    cuda.run(
        DEFAULT_STREAMS
        + """
show(own, blocking, False)
source = tensor(b"o" * MIB)
codes = []

def fill():
    use_device()
    codes.append(error(cu.cuStreamQuery, own))
    call(cu.cuMemsetD8Async, source, ord("n"), MIB, own)
    codes.append(error(cu.cuStreamQuery, own))

control.hold = Hold.FILLS
thread = threading.Thread(target=fill)
thread.start()
thread.join()
fill()
control.hold = Hold.NOTHING
assert codes == [0, NOT_READY] * 2
"""
    )


@pytest.mark.usefixtures("control")
def test_the_legacy_default_stream_is_waited_for_with_all_blocking_ones(cuda: Cuda) -> None:
    cuda.run(
        DEFAULT_STREAMS
        + """
from support.waiting import eventually
target = tensor(b"o" * MIB)
control.hold = Hold.FILLS
call(cu.cuMemsetD8Async, target, ord("n"), MIB, free)
call(cu.cuStreamSynchronize, legacy)
call(cu.cuMemsetD8Async, target, ord("n"), MIB, blocking)
assert error(cu.cuStreamQuery, legacy) == NOT_READY
before = control.counters().main_waits

def let_go():
    eventually(lambda: control.counters().main_waits > before)
    control.hold = Hold.NOTHING

threading.Thread(target=let_go).start()
call(cu.cuStreamSynchronize, legacy)
assert error(cu.cuStreamQuery, blocking) == 0
"""
    )


def test_the_calls_of_a_threads_own_stream_are_found_where_they_are_asked_for(cuda: Cuda) -> None:
    cuda.run(
        START
        + f"""
call(cu.cuInit, 0)

def found(name, flags):
    return call(cu.cuGetProcAddress, name, 12000, flags)

for name in b"cuMemcpyHtoDAsync", b"cuMemcpy", b"cuEventRecord", b"cuStreamQuery":
    assert found(name, 0) == found(name, 1) != found(name, 2)
assert found(b"cuMemCreate", 0) == found(b"cuMemCreate", 2)
assert error(cu.cuGetProcAddress, b"cuInit", 12000, 4) == {INVALID_VALUE}
"""
    )


@pytest.mark.usefixtures("control")
def test_the_bindings_take_the_null_stream_for_the_threads_own_if_they_are_told_to(
    cuda: Cuda,
) -> None:
    program = """
show(own, null, True)
show(null, own, True)
show(blocking, null, False)
show(null, blocking, False)
control.fail({name: NOT_READY for name in ("cuStreamQuery", "cuMemcpy", "cuMemcpyHtoDAsync")})
assert error(cu.cuStreamQuery, null) == error(cu.cuMemcpy, 0, 0, 1) == NOT_READY
assert error(cu.cuMemcpyHtoDAsync, 0, b"n", 1, null) == NOT_READY
"""
    cuda.run(DEFAULT_STREAMS + program, CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1")


# -- registered host memory ------------------------------------------------------------------------


def test_memory_is_registered_once_and_unregistered_by_its_first_byte(cuda: Cuda) -> None:
    cuda.run(
        START
        + f"""
use_device()
address = host(3 * MIB)
call(cu.cuMemHostRegister, address, 2 * MIB, 0)
for where, nbytes in ((0, 2 * MIB), (MIB, MIB), (MIB, 2 * MIB)):
    assert error(cu.cuMemHostRegister, address + where, nbytes, 0) == {HOST_REGISTERED}
assert error(cu.cuMemHostUnregister, address + MIB) == {INVALID_VALUE}
assert error(cu.cuMemHostUnregister, address) == 0
assert error(cu.cuMemHostUnregister, address) == {HOST_NOT_REGISTERED}
assert error(cu.cuMemHostRegister, address, 0, 0) == {INVALID_VALUE}
assert error(cu.cuMemHostRegister, address, MIB, 0) == 0
"""
    )


def test_registrations_are_counted(cuda: Cuda, control: Control) -> None:
    program = """
use_device()
address = pinned(2 * MIB)
pinned(MIB)
error(cu.cuMemHostRegister, address, MIB, 0)
say()
call(cu.cuMemHostUnregister, address)
"""
    script = cuda.start(START + program)
    heard(script)
    assert control.counters().registered_bytes == 3 * MIB
    answer(script)
    assert script.wait(HANG_S) == 0
    counters = control.counters()
    assert (counters.register_calls, counters.registrations) == (3, 1)
    assert counters.registered_bytes == MIB


def test_a_mapping_for_reading_is_registered_for_reading_only(cuda: Cuda, pool: Path) -> None:
    cuda.run(
        START
        + f"""
use_device()
address, device, side = host(MIB, sys.argv[1], writable=False), tensor(b"n" * MIB), stream()
assert error(cu.cuMemHostRegister, address, MIB, 0) == {INVALID_VALUE}
assert error(cu.cuMemHostRegister, address, MIB, cu.CU_MEMHOSTREGISTER_READ_ONLY) == 0
call(cu.cuMemcpyAsync, device, address, MIB, side)
assert read(device, MIB) == bytes(MIB)
assert error(cu.cuMemcpyAsync, address, device, MIB, side) == {INVALID_VALUE}
""",
        pool,
    )
    assert pool.read_bytes() == bytes(2 * MIB)


def test_a_copy_that_crosses_the_edge_of_a_registration_is_refused(cuda: Cuda) -> None:
    cuda.run(
        START
        + f"""
use_device()
device, side, address = call(cu.cuMemAlloc, 2 * MIB), stream(), host(4 * MIB)
for piece in range(2):
    call(cu.cuMemHostRegister, address + piece * MIB, MIB, 0)
for at in (address, address + MIB):  # into the next registration, and out of the last one
    assert error(cu.cuMemcpyAsync, device, at, MIB + 1, side) == {INVALID_VALUE}
    assert error(cu.cuMemcpyAsync, at, device, MIB + 1, side) == {INVALID_VALUE}
    call(cu.cuMemcpyAsync, device, at, MIB, side)
call(cu.cuMemcpyAsync, device, address + 2 * MIB, MIB, side)
"""
    )
    if cuda.is_standin:
        counters = cuda.control.counters()
        assert (counters.split_copies, counters.pageable_copies, counters.copies) == (4, 1, 3)


@pytest.mark.usefixtures("control")
def test_other_threads_queue_nothing_while_memory_is_being_registered(cuda: Cuda) -> None:
    cuda.run(
        START
        + """
from support.cuda.standin import Control
from support.waiting import eventually
use_device()
control = Control.of_this_process()
device, address, side = call(cu.cuMemAlloc, MIB), pinned(MIB), stream()
over = event(side)

def register():
    use_device()
    pinned(MIB)

def let_go():
    eventually(lambda: returned.is_set() or control.counters().register_waits == number)
    control.register_delay_us *= returned.is_set()

for number, asked in enumerate((
    (cu.cuMemcpyAsync, address, device, MIB, side),
    (cu.cuMemsetD8Async, device, 1, MIB, side),
    (cu.cuEventRecord, over, side),
    (cu.cuStreamWaitEvent, side, over, 0),
), 1):
    call(cu.cuCtxSynchronize)
    control.register_delay_us, returned = 60_000_000, threading.Event()
    threading.Thread(target=register, daemon=True).start()
    eventually(lambda: control.counters().register_calls == number + 1)
    call(cu.cuEventQuery, over)
    assert control.counters().registrations == number
    threading.Thread(target=let_go, daemon=True).start()
    call(*asked)
    returned.set()
    assert control.counters().registrations == number + 1
"""
    )


# -- graphs ----------------------------------------------------------------------------------------

CAPTURE = (
    START
    + """
use_device()
GLOBAL, OF_THREAD, RELAXED = (cu.CUstreamCaptureMode(number) for number in range(3))
side, fork, other = stream(), stream(), stream()
source, target = tensor(b"n" * MIB), tensor(b"o" * MIB)
outside = event(other)
call(cu.cuCtxSynchronize)

def begin(mode=GLOBAL):
    call(cu.cuStreamBeginCapture, side, mode)

def end():
    return error(cu.cuStreamEndCapture, side)

def in_a_thread(*asked, mode=None):
    codes = []
    def ask():
        use_device()
        if mode is not None:
            call(cu.cuThreadExchangeStreamCaptureMode, mode)
        codes.append(error(*asked))
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return codes.pop()
"""
)


def test_work_on_a_captured_stream_is_not_done(cuda: Cuda) -> None:
    cuda.run(
        CAPTURE
        + f"""
begin()
call(cu.cuMemcpyAsync, target, source, MIB, side)
over = event(side)
assert int(call(cu.cuStreamIsCapturing, side)) == 1
assert int(call(cu.cuStreamIsCapturing, other)) == 0
assert end() == 0
assert int(call(cu.cuStreamIsCapturing, side)) == 0
assert read(target, MIB) == b"o" * MIB
assert error(cu.cuEventQuery, over) == error(cu.cuEventSynchronize, over) == {CAPTURED_EVENT}
call(cu.cuEventRecord, over, side)
call(cu.cuEventSynchronize, over)
"""
    )


def test_a_capture_takes_in_the_streams_that_wait_for_it(cuda: Cuda) -> None:
    cuda.run(
        CAPTURE
        + f"""
begin()
call(cu.cuStreamWaitEvent, fork, event(side), 0)
call(cu.cuMemcpyAsync, target, source, MIB, fork)
assert int(call(cu.cuStreamIsCapturing, fork)) == 1
assert end() == {CAPTURE_UNJOINED}
begin()
call(cu.cuStreamWaitEvent, fork, event(side), 0)
call(cu.cuMemcpyAsync, target, source, MIB, fork)
call(cu.cuStreamWaitEvent, side, event(fork), 0)
assert end() == 0
assert int(call(cu.cuStreamIsCapturing, fork)) == 0
assert read(target, MIB) == b"o" * MIB
"""
    )


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ("cu.cuStreamWaitEvent, side, outside, 0", CAPTURE_ISOLATION),
        ("cu.cuStreamSynchronize, side", CAPTURE_UNSUPPORTED),
        ("cu.cuStreamQuery, side", CAPTURE_UNSUPPORTED),
        ("cu.cuMemcpy, target, source, MIB", CAPTURE_UNSUPPORTED),
    ],
)
def test_a_capture_is_broken_by_calls_that_conflict_with_it(
    cuda: Cuda, asked: str, code: int
) -> None:
    cuda.run(
        CAPTURE
        + f"""
begin()
assert error({asked}) == {code}
assert int(call(cu.cuStreamIsCapturing, side)) == 2
assert end() == {CAPTURE_INVALIDATED}
begin()
assert end() == 0
"""
    )


def test_other_threads_break_a_global_capture_unless_they_are_relaxed(cuda: Cuda) -> None:
    cuda.run(
        CAPTURE
        + f"""
ask = cu.cuEventQuery, outside
begin()
assert in_a_thread(cu.cuStreamEndCapture, side) == {CAPTURE_WRONG_THREAD}
assert in_a_thread(*ask, mode=RELAXED) == in_a_thread(*ask, mode=OF_THREAD) == 0
assert end() == 0
begin()
assert in_a_thread(*ask) == {CAPTURE_UNSUPPORTED}
assert end() == {CAPTURE_INVALIDATED}
for mode in (OF_THREAD, RELAXED):
    begin(mode)
    assert in_a_thread(*ask) == 0
    assert end() == 0
begin(OF_THREAD)
assert error(*ask) == {CAPTURE_UNSUPPORTED}
assert end() == {CAPTURE_INVALIDATED}
begin(RELAXED)
assert error(*ask) == 0
assert end() == 0
"""
    )


def test_the_legacy_default_stream_cannot_be_used_while_a_blocking_one_is_captured(
    cuda: Cuda,
) -> None:
    cuda.run(
        CAPTURE
        + f"""
legacy, over = cu.CUstream(1), event(other)
for asked in (
    (cu.cuEventRecord, over, legacy),
    (cu.cuStreamWaitEvent, legacy, outside, 0),
    (cu.cuMemcpyAsync, target, source, MIB, legacy),
    (cu.cuStreamQuery, legacy),
    (cu.cuStreamSynchronize, legacy),
):
    begin(RELAXED)
    assert error(*asked) == 0
    assert end() == 0
    call(cu.cuCtxSynchronize)
    side = stream(0)
    begin(RELAXED)
    assert error(cu.cuStreamIsCapturing, legacy) == {CAPTURE_IMPLICIT}
    assert int(call(cu.cuStreamIsCapturing, side)) == 1
    assert error(*asked) == {CAPTURE_IMPLICIT}
    assert end() == {CAPTURE_INVALIDATED}
    side = stream()
"""
    )


def test_a_capture_is_broken_by_asking_for_its_event(cuda: Cuda) -> None:
    """A guess: no documentation says so."""
    cuda.run(
        CAPTURE
        + f"""
begin()
over = event(side)
assert in_a_thread(cu.cuEventQuery, over, mode=RELAXED) == {CAPTURED_EVENT}
assert end() == {CAPTURE_INVALIDATED}
"""
    )


def test_unknown_flags_of_events_are_refused(cuda: Cuda) -> None:
    cuda.run(
        START
        + f"""
use_device()
side = stream()
assert error(cu.cuEventCreate, 64) == error(cu.cuEventCreate, 4) == {INVALID_VALUE}
assert error(cu.cuStreamWaitEvent, side, event(side), 64) == {INVALID_VALUE}
"""
    )


# -- what fails ------------------------------------------------------------------------------------


def test_calls_fail_by_name(cuda: Cuda, control: Control) -> None:
    program = """
use_device()
for _ in range(4):
    codes = []
    for _ in range(3):
        address = host(MIB)
        codes.append(error(cu.cuMemHostRegister, address, MIB, 0))
    say((*codes, error(create, MIB << 1)))
"""
    script = cuda.start(START + program)
    assert heard(script) == "(0, 0, 0, 0)"
    control.fail({"cuMemHostRegister": INVALID_VALUE, "cuMemCreate": OUT_OF_MEMORY})
    answer(script)
    assert heard(script) == "(1, 1, 1, 2)"
    control.fail({"cuMemHostRegister": OUT_OF_MEMORY}, after=2)
    answer(script)
    assert heard(script) == "(0, 0, 2, 0)"
    control.fail({})
    answer(script)
    assert heard(script) == "(0, 0, 0, 0)"


EVERY_WAIT = """
def every_wait(over, side):
    return {
        error(cu.cuEventQuery, over),
        error(cu.cuEventSynchronize, over),
        error(cu.cuStreamQuery, side),
        error(cu.cuStreamSynchronize, side),
        error(cu.cuCtxSynchronize),
        error(cu.cuMemHostRegister, host(MIB), MIB, 0),
        error(cu.cuMemcpyAsync, 0, 0, MIB, side),
        error(cu.cuMemAlloc, MIB),
    }
"""


@pytest.mark.timeout(40)  # the stand-in holds a copy for a minute at most
def test_a_lost_device_fails_all_calls_and_lets_go_of_those_that_wait(
    cuda: Cuda, control: Control
) -> None:
    control.hold = Hold.START
    program = """
use_device()
device, address, side = call(cu.cuMemAlloc, MIB), pinned(MIB), stream()
call(cu.cuMemcpyAsync, address, device, MIB, side)
over = event(side)
print("waits", flush=True)
print(error(cu.cuEventSynchronize, over))
print(every_wait(over, side), error(cu.cuInit, 0), error(create, 2 * MIB))
"""
    script = cuda.start(START + EVERY_WAIT + program)
    assert heard(script) == "waits"
    eventually(lambda: control.counters().main_waits == 1, what="the wait")
    control.lost = UNKNOWN
    assert heard(script) == str(UNKNOWN)
    assert heard(script) == f"{{{UNKNOWN}}} {UNKNOWN} {UNKNOWN}"
    assert control.counters().finished == 0


SPOIL = {
    "no mapping": "target = call(cu.cuMemAddressReserve, 2 * MIB, 0, 0, 0)",
    "read only": "target = map_handle(create(2 * MIB)[1], 2 * MIB, writable=False)",
    "unmapped": "target = map_handle(create(2 * MIB)[1], 2 * MIB)",
    "unregistered": "target = pinned(2 * MIB)",
}


@pytest.mark.parametrize("spoilt", SPOIL)
def test_a_copy_without_access_fails_the_context_for_good(
    cuda: Cuda, control: Control, spoilt: str
) -> None:
    """The last two are rule R4: the copy is under way when its memory goes."""
    program = """
use_device()
device, side = call(cu.cuMemAlloc, 2 * MIB), stream()
TARGET
call(cu.cuMemcpyAsync, target, device, 2 * MIB, side)
over = event(side)
say(error(cu.cuEventQuery, over))
if sys.argv[1] == "unmapped":
    call(cu.cuMemUnmap, target, 2 * MIB)
if sys.argv[1] == "unregistered":
    call(cu.cuMemHostUnregister, target)
say()
print(error(cu.cuEventSynchronize, over), every_wait(over, side))
"""
    control.hold = Hold.START
    program = program.replace("TARGET", SPOIL[spoilt])
    script = cuda.start(START + EVERY_WAIT + program, spoilt)
    assert heard(script) == str(NOT_READY)
    if spoilt.startswith("un"):
        control.hold = Hold.MIDDLE
        eventually(lambda: control.counters().halfway == 1, what="halfway")
    answer(script)
    heard(script)
    control.hold = Hold.NOTHING
    answer(script)
    assert heard(script) == f"{ILLEGAL_ADDRESS} {{{ILLEGAL_ADDRESS}}}"
    assert control.counters().faults == 1


def test_a_copy_fails_when_the_test_says_so(cuda: Cuda, control: Control) -> None:
    control.fail({"copy": ILLEGAL_ADDRESS}, after=1)
    program = """
use_device()
device, address, side = call(cu.cuMemAlloc, MIB), pinned(MIB), stream()
for _ in range(3):
    print(error(cu.cuMemcpyAsync, device, address, MIB, side), error(cu.cuStreamSynchronize, side))
"""
    assert cuda.run(START + program).stdout.split() == ["0", "0", "0", "700", "700", "700"]
    assert control.counters().faults == 1


def test_the_cpu_has_no_access_to_device_memory(cuda: Cuda) -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
use_device()
ctypes.string_at(int(call(cu.cuMemAlloc, MIB)), 1)
"""
    assert cuda.run(START + program, check=False).returncode == -signal.SIGSEGV


@pytest.mark.usefixtures("control")  # of a real driver's calls in such a child some never return
def test_a_forked_child_cannot_use_the_driver(cuda: Cuda) -> None:
    cuda.run(
        START
        + f"""
use_device()
address, over = pinned(MIB), event(stream())
child = os.fork()
if not child:
    codes = {{
        error(cu.cuInit, 0),
        error(cu.cuMemHostUnregister, address),
        error(cu.cuEventQuery, over),
        error(create, 2 * MIB),
    }}
    os._exit(codes != {{{NOT_INITIALIZED}}})
assert os.waitpid(child, 0)[1] == 0
call(cu.cuMemHostUnregister, address)
"""
    )


def test_contexts_are_needed_counted_and_restored(cuda: Cuda) -> None:
    cuda.run(
        START
        + f"""
call(cu.cuInit, 0)
address = host(MIB)
assert error(cu.cuMemHostRegister, address, MIB, 0) == {INVALID_CONTEXT}
assert error(cu.cuStreamCreate, 0) == error(cu.cuCtxPopCurrent) == {INVALID_CONTEXT}
context = call(cu.cuDevicePrimaryCtxRetain, 0)
assert int(call(cu.cuCtxGetCurrent)) == 0
call(cu.cuCtxPushCurrent, context)
assert int(call(cu.cuCtxGetCurrent)) == int(context)
side = stream()
over = event(side)
assert int(call(cu.cuCtxPopCurrent)) == int(context)
assert int(call(cu.cuCtxGetCurrent)) == 0
assert error(cu.cuEventDestroy, over) == error(cu.cuStreamDestroy, side) == 0
"""
    )


def test_things_in_force_are_counted(cuda: Cuda, control: Control) -> None:
    program = f"""
call(cu.cuInit, 0)
address = map_handle(create(2 * MIB)[1], 2 * MIB)
say()
use_device()
side, other = stream(), stream()
over, another = event(side), event(side)
say()
call(cu.cuStreamDestroy, side)
call(cu.cuEventDestroy, over)
assert error(cu.cuStreamSynchronize, side) == error(cu.cuEventQuery, over) == {INVALID_HANDLE}
call(cu.cuDevicePrimaryCtxRelease, 0)
assert error(cu.cuStreamSynchronize, other) == {CONTEXT_IS_DESTROYED}
"""
    script = cuda.start(START + program)
    for expected in ((0, 0, 0), (1, 2, 2)):
        heard(script)
        counters = control.counters()
        assert (counters.contexts, counters.streams, counters.events) == expected
        answer(script)
    assert script.wait(HANG_S) == 0
    counters = control.counters()
    assert (counters.contexts, counters.streams, counters.events) == (0, 1, 1)


def test_there_are_as_many_devices_as_the_test_says(cuda: Cuda) -> None:
    program = """
print(error(cu.cuInit, 0))
result, count = cu.cuDeviceGetCount()
print(int(result))
for number in range(count or 0):
    print(call(cu.cuDeviceGetUuid, number).bytes.hex())
"""
    found = cuda.run(START + program, **cuda.environment(devices=0)).stdout.split()
    assert found == [str(NO_DEVICE), str(NOT_INITIALIZED)]
    found = cuda.run(START + program, **cuda.environment(devices=2)).stdout.split()
    assert found[:2] == ["0", "0"]
    assert len(set(found[2:])) == 2


# -- physical memory -------------------------------------------------------------------------------


def test_memory_lives_as_long_as_any_process_maps_it(cuda: Cuda, tmp_path: Path) -> None:
    owner = """
call(cu.cuInit, 0)
handle = create(4 * MIB)[1]
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen()
    print("listens", flush=True)
    fd = export(handle)
    socket.send_fds(server.accept()[0], [b"-"], [fd])
say()
"""
    user = """
use_device()
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    fd, = socket.recv_fds(client, 1, 1)[1]
handle = import_fd(fd)[1]
os.close(fd)
address = map_handle(handle, 4 * MIB)
call(cu.cuMemRelease, handle)
call(cu.cuMemcpyHtoD, address, b"n" * MIB, MIB)
call(cu.cuCtxSynchronize)
say("wrote")
assert read(address, MIB) == b"n" * MIB
call(cu.cuMemUnmap, address, 4 * MIB)
call(cu.cuMemAddressFree, address, 4 * MIB)
say("unmapped")
"""
    one = cuda.start(START + owner, tmp_path / "socket")
    assert heard(one) == "listens"
    other = cuda.start(START + user, tmp_path / "socket")
    assert heard(other) == "wrote"
    one.kill()
    one.wait()
    if cuda.is_standin:
        assert physical_bytes(cuda.control) == 4 * MIB
        assert cuda.control.counters().contexts == 1  # of the user alone
    answer(other)
    assert heard(other) == "unmapped"
    if cuda.is_standin:
        assert physical_bytes(cuda.control) == 0


def test_only_memory_that_was_made_for_it_is_exported_and_imported(cuda: Cuda) -> None:
    cuda.run(
        START
        + f"""
call(cu.cuInit, 0)
assert error(import_fd, os.pipe()[0]) == {UNKNOWN}
assert error(create, MIB) == {INVALID_VALUE}  # less than the granularity
handle = create(2 * MIB)[1]
fd = export(handle)
call(cu.cuMemRelease, handle)
same = import_fd(fd)[1]
os.close(fd)
call(cu.cuMemRelease, same)
"""
    )


def test_a_device_has_as_much_memory_as_the_test_says(cuda: Cuda, control: Control) -> None:
    control.device_bytes = 8 * MIB
    cuda.run(
        START
        + f"""
use_device()
assert call(cu.cuDeviceTotalMem, 0) == 8 * MIB
handle = create(6 * MIB)[1]
assert error(create, 4 * MIB) == error(cu.cuMemAlloc, 3 * MIB) == {OUT_OF_MEMORY}
fd = export(handle)
same = import_fd(fd)[1]
address = call(cu.cuMemAlloc, 2 * MIB)
call(cu.cuMemRelease, same)
call(cu.cuMemRelease, handle)
assert error(cu.cuMemRelease, handle) == {INVALID_VALUE}
call(cu.cuMemFree, address)
assert error(create, 8 * MIB) == {OUT_OF_MEMORY}
os.close(fd)
assert error(create, 8 * MIB) == 0
"""
    )


def test_processes_share_the_memory_of_a_device(cuda: Cuda, control: Control) -> None:
    control.device_bytes = 8 * MIB
    program = """
use_device()
taken = call(cu.cuMemAlloc, 6 * MIB)
say("took")
"""
    other = """
call(cu.cuInit, 0)
say(error(create, 4 * MIB))
say(error(create, 4 * MIB))
"""
    one = cuda.start(START + program)
    assert heard(one) == "took"
    two = cuda.start(START + other)
    assert heard(two) == str(OUT_OF_MEMORY)
    one.kill()
    one.wait()
    answer(two)
    assert heard(two) == "0"


def test_processes_that_take_memory_at_once_take_no_more_than_there_is(
    cuda: Cuda, control: Control
) -> None:
    control.device_bytes = 64 * MIB
    program = """
call(cu.cuInit, 0)
say("ready")
taken = 0
while not error(create, 2 * MIB):
    taken += 1
say(taken)
"""
    scripts = [cuda.start(START + program) for _ in range(2)]
    assert [heard(script) for script in scripts] == ["ready"] * 2
    for script in scripts:
        answer(script)
    assert sum(int(heard(script)) for script in scripts) == 32


# -- what a killed process leaves ------------------------------------------------------------------


@pytest.mark.parametrize("afterlife", [True, False])
def test_copies_outlive_a_sigkill_where_the_test_wants_it(
    cuda: Cuda, control: Control, pool: Path, afterlife: bool
) -> None:
    program = """
import fcntl
use_device()
lock = open(sys.argv[2], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
target, device, side = pinned(2 * MIB, sys.argv[1]), tensor(b"n" * MIB), stream()
say("ready")
call(cu.cuMemcpyAsync, target, device, MIB, side)
say("queued")
"""
    lock = pool.with_name("lock")
    variables = cuda.environment(afterlife=afterlife)
    script = cuda.start(START + program, pool, lock, **variables)
    assert heard(script) == "ready"
    made = control.counters().finished
    control.hold = Hold.MIDDLE
    answer(script)
    assert heard(script) == "queued"
    eventually(lambda: control.counters().halfway > made, what="halfway")
    script.kill()
    assert script.wait(HANG_S) == -signal.SIGKILL
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the copy does not hold it
    half = MIB // 2
    assert pool.read_bytes()[:MIB] == b"n" * half + bytes(half)
    control.hold = Hold.NOTHING
    if afterlife:
        eventually(lambda: control.counters().finished > made, what="the copy")
        assert pool.read_bytes()[:MIB] == b"n" * MIB
    eventually(lambda: physical_bytes(control) == 0, what="device memory freed")
    assert control.counters().finished == made + afterlife


def test_a_missing_library_fails_a_test_and_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(standin, "LIBRARY", standin.ROOT / "build/nowhere/libcuda.so.1")
    monkeypatch.delenv("ECD_TEST_CUDA", raising=False)
    with pytest.raises(pytest.fail.Exception, match=r"Run: make build/nowhere/libcuda\.so\.1"):
        Cuda(tmp_path)
