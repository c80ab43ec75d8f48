"""The daemon as a process: how it starts, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ecd_client import Client, DaemonUnavailable, EcdError
from ecd_client.session.channel import open_channel
from ecd_proto.contract import CONTRACT_VERSION, POPULATING, size_text
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.cli import as_json
from support.daemon import Daemon, changed
from support.processes import child, run
from support.waiting import HANG_S, eventually, value_of

MIB = 1 << 20
MISTAKEN = f"mistaken-{uuid.uuid4().hex[:8]}"
"""The name of a daemon that does not start."""
SHM = Path("/dev/shm", f"ecd-{MISTAKEN}")
MakeDaemon = Callable[..., Daemon]
Ecd = Callable[..., subprocess.CompletedProcess]
COMMANDS = """
import json, os, sys
import ecd.commands
from ecd.__main__ import main
for line in sys.stdin:
    arguments, environ, output = json.loads(line)
    pid = os.fork()
    if not pid:
        os.environ.clear()
        os.environ.update(environ)
        for fd, name in (1, "out"), (2, "err"):
            os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT), fd)
        sys.argv = ["ecd", *arguments]
        main()
    with open(f"{output}.code", "w") as code:
        code.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""
"""Forks for each command, as importing the daemon takes most of the time of one that refuses."""


@pytest.fixture(scope="module")
def ecd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ecd]:
    """Runs `ecd` with these arguments and variables."""
    outputs, count = tmp_path_factory.mktemp("outputs"), 0
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ECD_")}
    command = [sys.executable, "-c", COMMANDS]
    with child(command, stdin=subprocess.PIPE, text=True, bufsize=1) as interpreter:

        def run_ecd(*arguments: str, **environ: str) -> subprocess.CompletedProcess:
            nonlocal count
            count += 1
            output = outputs / str(count)
            print(
                json.dumps([arguments, {**clean, **environ}, str(output)]), file=interpreter.stdin
            )
            file = output.with_suffix(".code")
            code = value_of(lambda: file.exists() and file.read_text(), f"ecd {arguments} ends")
            said = (output.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
            return subprocess.CompletedProcess(arguments, int(code), *said)

        yield run_ecd


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


@pytest.fixture
def stub(daemon: Daemon) -> Iterator[pb_grpc.CacheStub]:
    with open_channel(daemon.address) as channel:
        yield pb_grpc.CacheStub(channel)


# -- start -----------------------------------------------------------------------------------------


def test_a_second_daemon_touches_nothing_of_the_first(
    ecd: Ecd, daemon: Daemon, tmp_path: Path
) -> None:
    with Client(daemon.address) as client:
        client.put("k", torch.ones(10))
        other = "--name", "other", "--metrics-address", "[::1]:0"
        done = ecd("serve", "--address", daemon.address, *other)
        assert done.returncode == 1
        assert f"another daemon (pid {daemon.pid}) listens on" in done.stderr
        done = ecd("serve", "--address", f"unix://{tmp_path}/other.sock", "--name", daemon.name)
        assert done.returncode == 1
        assert f"another daemon (pid {daemon.pid}) uses" in done.stderr
        assert "--name" in done.stderr
        assert not (tmp_path / "other.sock").exists()
        assert client.contains(["k"]) == [True]
    with Client(daemon.address) as client:
        assert client.contains(["k"]) == [True]


def test_what_a_dead_daemon_left_is_cleared_by_the_next(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    first = set(daemon.shm.iterdir())
    daemon.kill()
    assert set(daemon.shm.iterdir()) == first, "a killed daemon cleans up nothing"
    daemon.start()
    eventually(lambda: len([*daemon.shm.iterdir()]) == 7)
    left = {path.name for path in daemon.shm.iterdir()}
    assert not {path.name for path in first} & left - {"lock"}


def test_too_little_shared_memory_says_what_to_do(ecd: Ecd, tmp_path: Path) -> None:
    shm = os.statvfs("/dev/shm")
    wanted = shm.f_blocks * shm.f_frsize + (1 << 30)
    place = "--address", f"unix://{tmp_path}/s", "--name", MISTAKEN
    done = ecd("serve", *place, "--host-pool-bytes", str(wanted))
    assert done.returncode == 1
    for text in (size_text(wanted), "less free", "--shm-size", "sizeLimit", "--host-pool-bytes"):
        assert text in done.stderr
    assert "remove what else" not in done.stderr, "it would not be enough"
    assert "Traceback" not in done.stderr
    assert not SHM.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (
            "2m",
            "MiB free; a quarter of that is too little for a pool. `ecd-cli doctor` says what",
        ),
        ("64m", "MiB free: few items fit. `ecd-cli doctor` says what daemons have left there"),
    ],
)
def test_a_default_pool_of_a_small_dev_shm_is_told(
    make_daemon: MakeDaemon, size: str, says: str
) -> None:
    """Docker gives its containers 64 MiB."""
    mounted = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
    if run(["unshare", "--mount", "sh", "-c", mounted, "sh", "true"]).returncode:
        pytest.skip("NO SMALL /dev/shm IS TRIED: this user mounts nothing")
    daemon = make_daemon()
    unset = "env", "-u", "ECD_HOST_POOL_BYTES"
    daemon.prefix = ("unshare", "--mount", "sh", "-c", mounted, "sh", *unset)
    daemon.start(wait=False)
    eventually(lambda: says in daemon.text(), says)
    assert "Traceback" not in daemon.text()


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "says"),
    [
        (["--host-pool-bytes", "lots"], {}, 2, "host_pool_bytes (from flag)"),
        ([], {"ECD_HOST_POOL_BYTES": "-1"}, 2, "host_pool_bytes (from environment)"),
        (["--host-pool-bytes", "100%"], {}, 2, "host_pool_bytes (from flag)"),
        (["--health-address", "203.0.113.1:9"], {}, 1, "ECD_HEALTH_ADDRESS"),
        (["--lease-ttl-s", "0"], {}, 2, "lease_ttl_s (from flag)"),
        (["--log-level", "loud"], {}, 2, "log_level (from flag)"),
        (["--name", "../up"], {}, 2, "name (from flag)"),
        (["--metrics-address", "nowhere"], {}, 2, "metrics_address (from flag)"),
        (["--metrics-address", "203.0.113.1:9"], {}, 1, "ECD_METRICS_ADDRESS"),
        (["--address", "tcp://0.0.0.0:1"], {}, 1, "unix:///path/to/socket"),
        (["--address", "unix:///proc/nope/s"], {}, 1, "cannot listen"),
        (["--address", "SHM/no/s"], {}, 1, "SHM/no. ECD_ADDR"),
        (["--address", "unix:///" + "x" * 200], {}, 1, "at most 106 bytes"),
        (["--shm-dir", "/nowhere"], {}, 1, "/dev/shm is the usual one"),
        (["--group", "nobodys-group"], {}, 1, "no such group"),
        (["--group", "4294967295"], {}, 1, "no such group"),
        (["--config", "/nowhere.toml"], {}, 2, "no such file"),
        (["--config", "/dev/shm"], {}, 2, "/dev/shm is a directory"),
    ],
)
def test_settings_that_cannot_be(
    ecd: Ecd, tmp_path: Path, arguments: list[str], environ: dict[str, str], code: int, says: str
) -> None:
    defaults = {
        "ECD_ADDRESS": f"unix://{tmp_path}/s",
        "ECD_HOST_POOL_BYTES": "1MiB",
        "ECD_METRICS_ADDRESS": "127.0.0.1:0",  # the default may be taken
    }
    arguments = [each.replace("SHM", str(SHM)) for each in arguments]
    done = ecd("serve", *arguments, **{"ECD_NAME": MISTAKEN, **defaults, **environ})
    assert done.returncode == code, done.stderr
    assert says.replace("SHM", str(SHM)) in done.stderr
    assert "Traceback" not in done.stderr
    assert not SHM.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_this_user_may_not_look_for_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)
    weak = "setpriv", "--bounding-set=-dac_override,-dac_read_search"
    command = [*weak, sys.executable, "-m", "ecd", "config", "--config", str(place / "ecd.toml")]
    done = run(command, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"{place}/ecd.toml cannot be read: [Errno 13] Permission denied" in done.stderr


@pytest.mark.parametrize("name", ["s", "s~"])
def test_a_file_where_the_socket_belongs_is_not_removed(
    ecd: Ecd, tmp_path: Path, name: str
) -> None:
    """The daemon binds `s~` and renames it."""
    address, file = tmp_path / "s", tmp_path / name
    file.write_text("precious")
    small = "--name", MISTAKEN, "--host-pool-bytes", "1MiB"
    done = ecd("serve", "--address", f"unix://{address}", *small)
    assert done.returncode == 1
    assert f"{file} is not a socket" in done.stderr
    assert "Traceback" not in done.stderr
    assert file.read_text() == "precious"


def test_config_says_where_each_value_comes_from(ecd: Ecd, tmp_path: Path) -> None:
    file = tmp_path / "ecd.toml"
    file.write_text('name = "from-file"\nlease_ttl_s = 5\nhost_pool_bytes = "2GiB"\n')
    environ = {"ECD_LEASE_TTL_S": "7", "ECD_LOG_LEVL": "debug"}
    done = ecd("config", "--json", "--config", str(file), **environ)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert rows["name"] == {"value": "from-file", "origin": str(file)}
    assert rows["lease_ttl_s"] == {"value": 7.0, "origin": "environment"}
    assert rows["host_pool_bytes"] == {"value": 2 << 30, "origin": str(file)}
    assert rows["log_level"]["origin"] == "default"
    assert "ECD_LOG_LEVL" in done.stderr, "a misspelt variable is named"
    file.write_text("nmae = 1\n")
    done = ecd("serve", "--config", str(file))
    assert done.returncode == 2
    assert "nmae" in done.stderr


class Stepwise:
    """A daemon that populates its pool of 32 MiB in four steps, and waits after each."""

    def __init__(self, daemon: Daemon, pipe: Path) -> None:
        os.mkfifo(pipe)
        self.daemon, self._pipe = daemon, pipe
        daemon.command = changed(
            "import ecd.daemon",
            "from ecd.memory import host",
            "ecd.daemon.PROGRESS_S, host.CHUNK_BYTES = 0.0, 8 << 20",
            "populate = host.HostPool.populate",
            "def stepwise(pool, progress):",
            f"    populate(pool, lambda nbytes: (progress(nbytes), open({str(pipe)!r}).read()))",
            "host.HostPool.populate = stepwise",
        )
        daemon.start(wait=False)

    def wait_for(self, step: int) -> pb.StatusReply:
        """The daemon's status, once it waits after this step."""

        def at_step() -> pb.StatusReply | None:
            status = self.daemon.status()
            return status if status.pools[0].populated_bytes == step * 8 * MIB else None

        return value_of(at_step, f"step {step}")

    def go_on(self) -> None:
        def has_let_go() -> bool:
            try:
                os.close(os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK))
                return True
            except OSError:  # it is not there yet
                return False

        eventually(has_let_go)


@pytest.fixture
def make_stepwise(make_daemon: MakeDaemon, tmp_path: Path) -> Callable[..., Stepwise]:
    return lambda **settings: Stepwise(make_daemon("32MiB", **settings), tmp_path / "pipe")


def test_populating_is_told_and_nothing_is_served_before(
    make_stepwise: Callable[..., Stepwise],
) -> None:
    with socket.create_server(("127.0.96.2", 0)) as free:
        probed = f"127.0.96.2:{free.getsockname()[1]}"
    stepwise = make_stepwise(ECD_HEALTH_ADDRESS=probed)
    daemon = stepwise.daemon
    hello = pb.SessionRequest(hello=pb.Hello(contract_version=CONTRACT_VERSION))
    with open_channel(daemon.address) as channel, grpc.insecure_channel(probed) as network:
        stub = pb_grpc.CacheStub(channel)
        probes = [health_pb2_grpc.HealthStub(each) for each in (channel, network)]
        for step in range(1, 5):
            assert stepwise.wait_for(step).state == pb.StatusReply.STATE_POPULATING
            for probe in probes:
                check = probe.Check(health_pb2.HealthCheckRequest())
                assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError, match=rf"populating its pool: {25 * step} %"):
                next(stub.Session(iter([hello])))
            assert over_http(daemon, "/healthz") == (200, "ok\n")
            reason = f"the daemon is populating its pool: {25 * step} %"
            assert over_http(daemon, "/readyz") == (503, json.dumps({"error": reason}))
            found = {each["check"]: each for each in as_json(daemon, "doctor")}
            assert found["daemon"]["found"] == f"is populating its pool: {25 * step} %"
            assert (found["daemon"]["state"], found["daemon"]["advice"][:4]) == ("look", "wait")
            assert "clock" not in found, "it serves its node alone"
            stepwise.go_on()
        daemon.wait_serving()
        assert over_http(daemon, "/readyz") == (200, "ok\n")
        asked = health_pb2.HealthCheckRequest(service="ecd.v1.Cache")
        for probe in probes:  # it says so once calls are answered
            eventually(
                lambda p=probe: p.Check(asked).status == health_pb2.HealthCheckResponse.SERVING
            )
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            pb_grpc.CacheStub(network).Status(pb.StatusRequest())
    assert re.findall(r"populating (\d+) %", daemon.text()) == ["25", "50", "75", "100"]
    blocks = next(daemon.shm.glob("*.pool")).stat().st_blocks * 512
    assert blocks == 32 * MIB, "every page is there before the first client"


def over_http(daemon: Daemon, path: str, method: str = "GET") -> tuple[int, str]:
    url = daemon.metrics_url().replace("/metrics", path)
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/readyz", "/status.json"])
def test_what_is_read_over_http_answers_head_and_takes_nothing(daemon: Daemon, path: str) -> None:
    assert over_http(daemon, path)[0] == 200
    assert over_http(daemon, path, "HEAD") == (200, "")
    assert over_http(daemon, path, "POST")[0] == 405


def test_a_client_waits_for_a_daemon_that_populates_its_pool(
    make_stepwise: Callable[..., Stepwise], tmp_path: Path
) -> None:
    """Longer than for one that is not there; `wait_connected` waits as long as it is told."""
    stepwise = make_stepwise()
    address = stepwise.daemon.address
    stepwise.wait_for(1)
    with ThreadPoolExecutor(1) as side, Client(address, connect_timeout=0.0) as early:
        connection = early._connection
        eventually(lambda: str(connection._cause).startswith(POPULATING), "it is told so")
        connecting = side.submit(connection.start, 2.0)  # as a client does that is to wait
        with pytest.raises(DaemonUnavailable):
            Client(f"unix://{tmp_path}/nobody", connect_timeout=2.0)
        with Client(address, connect_timeout=0.0) as client:
            with pytest.raises(DaemonUnavailable):
                client.wait_connected(0.2)
            assert not connecting.done()
        for step in range(1, 5):
            stepwise.wait_for(step)
            stepwise.go_on()
        connecting.result(HANG_S)
        assert early.contains(["k"]) == [False]


def test_a_pool_is_sized_as_one_says(tmp_path: Path, make_daemon: MakeDaemon) -> None:
    place = tmp_path / "shm"
    place.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=128m", "none", place], check=True)
    try:
        for said, nbytes in ("32Mi", 32 * MIB), ("32MiB", 32 * MIB), ("50%", 64 * MIB):
            daemon = make_daemon(said, ECD_SHM_DIR=str(place)).start()
            assert daemon.status().pools[0].pool_bytes == nbytes
            found = {each["check"]: each for each in as_json(daemon, "doctor")}
            assert "docker run --shm-size" in found["shared memory"]["advice"]
            daemon.close()
    finally:
        run(["umount", place], check=True)


# -- what clients may get wrong --------------------------------------------------------------------


def test_reflection_lists_the_services(daemon: Daemon) -> None:
    with open_channel(daemon.address) as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        [reply] = reflection.ServerReflectionInfo(iter([request]))
        names = {service.name for service in reply.list_services_response.service}
    assert {"ecd.v1.Cache", "grpc.health.v1.Health"} <= names


def test_an_incompatible_client_is_told_both_versions(stub: pb_grpc.CacheStub) -> None:
    hello = pb.Hello(contract_version=99, client="future 9.9")
    with pytest.raises(grpc.RpcError) as refused:
        next(stub.Session(iter([pb.SessionRequest(hello=hello)])))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    for text in ("99", str(CONTRACT_VERSION), "future 9.9", "upgrade"):
        assert text in refused.value.details()


def test_calls_without_a_session_or_its_lock_are_refused(stub: pb_grpc.CacheStub) -> None:
    acquire = pb.AcquireRequest(session="made up", keys=[pb.Key(namespace="n", mm_hash="k")])
    with pytest.raises(grpc.RpcError, match="not open in this daemon"):
        stub.Acquire(acquire)
    done = threading.Event()

    def requests() -> Iterator[pb.SessionRequest]:
        yield pb.SessionRequest(hello=pb.Hello(contract_version=CONTRACT_VERSION))
        done.wait(HANG_S)

    stream = stub.Session(requests())
    acquire.session = next(stream).welcome.session
    with pytest.raises(grpc.RpcError, match="lock is not held"):
        stub.Acquire(acquire)
    done.set()
    stream.cancel()


def test_what_an_exchange_refuses_ends_only_that_call(
    client: Client, stub: pb_grpc.CacheStub
) -> None:
    key = pb.Key(namespace=client.namespace, mm_hash="k")
    client.put("k", torch.ones(3))
    stranger = pb.AcquireRequest(session="made up", keys=[key])
    too_many = pb.ContainsRequest(keys=[key] * 1025)
    asked = [
        pb.ExchangeRequest(),
        pb.ExchangeRequest(acquire=stranger),
        pb.ExchangeRequest(contains=too_many),
        pb.ExchangeRequest(contains=pb.ContainsRequest(keys=[key])),
    ]
    nothing, unknown, refused, answer = stub.Exchange(iter(asked), timeout=HANG_S)
    invalid, precondition = (
        grpc.StatusCode.INVALID_ARGUMENT.value[0],
        grpc.StatusCode.FAILED_PRECONDITION.value[0],
    )
    assert (nothing.failure.code, refused.failure.code) == (invalid, invalid)
    assert "1024" in refused.failure.details
    assert unknown.failure.code in (precondition, grpc.StatusCode.UNAVAILABLE.value[0])
    assert "not open in this daemon" in unknown.failure.details
    assert answer.contains.contained == [True]
    with open_channel(client.address) as channel:
        raw = channel.stream_stream("/ecd.v1.Cache/Exchange")
        with pytest.raises(grpc.RpcError):
            next(raw(iter([b"\xff" * 100]), timeout=HANG_S))
    assert client.contains(["k"]) == [True]


@pytest.mark.parametrize(
    "first",
    [
        pb.SessionRequest(),
        pb.SessionRequest(renew=pb.Renew(leases=[1])),
        pb.SessionRequest(cancel_waits=pb.CancelWaits(tickets=[1])),
    ],
)
def test_a_session_starts_with_hello(stub: pb_grpc.CacheStub, first: pb.SessionRequest) -> None:
    with pytest.raises(grpc.RpcError, match="starts with Hello"):
        next(stub.Session(iter([first])))


def test_impossible_requests_are_refused_and_change_nothing(
    daemon: Daemon, client: Client, stub: pb_grpc.CacheStub
) -> None:
    session = client._connection.session().token
    key = pb.Key(namespace="n", mm_hash="k")
    huge = 1 << 62
    contents = [
        pb.Content(dtype="float32", shape=[1], nbytes=5),
        pb.Content(dtype="float31", shape=[1], nbytes=4),
        pb.Content(dtype="int8", shape=[huge, huge], nbytes=huge),
        pb.Content(dtype="int8", shape=[1] * 17, nbytes=1),
        pb.Content(dtype="int8", shape=[0, 1 << 63], nbytes=0),
        pb.Content(dtype="int8", shape=[1], nbytes=1, metadata=b"x" * 4097),
        *(
            pb.Content(dtype="int8", shape=[1], nbytes=1, metadata=b"\x01" + said)
            for said in (b"{", b"{" * 4000, b'{"image":{"image_grid_thw":[1,-16,-24]}}')
        ),
        pb.Content(dtype="int8", shape=[1], nbytes=1, cost_s=float("-inf")),
    ]
    requests = [
        pb.ReserveRequest(session=session, items=[pb.ReserveItem(key=key, content=content)])
        for content in contents
    ]
    fine = pb.Content(dtype="int8", shape=[1], nbytes=1)
    requests.append(
        pb.ReserveRequest(session=session, items=[pb.ReserveItem(key=key, content=fine)] * 1025)
    )
    for request in requests:
        with pytest.raises(grpc.RpcError) as refused:
            stub.Reserve(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
    large = pb.Content(dtype="int8", shape=[huge], nbytes=huge)
    request = pb.ReserveRequest(session=session, items=[pb.ReserveItem(key=key, content=large)])
    outcome = stub.Reserve(request).outcomes[0]
    assert outcome.entry_too_large.pool_bytes == 64 << 20
    assert stub.Commit(pb.CommitRequest(session=session, reservations=[7])).committed == [False]
    assert stub.Release(pb.ReleaseRequest(session=session, leases=[7])).released == [False]
    status = daemon.status()
    assert (status.entries, status.pools[0].used_bytes) == (0, 0)


def test_an_answer_whose_caller_has_gone_is_a_line_of_log() -> None:
    """gRPC raises it where the call's end is heard of after the failed write: by chance."""
    script = """
import logging
from grpc._cython.cygrpc import ExecuteBatchError
from ecd.commands import _log_to_stderr
from ecd.settings.config import Config
_log_to_stderr(Config())
for error in (ExecuteBatchError("no"), ValueError("yes")):
    try:
        raise error
    except Exception:
        logging.getLogger("grpc._cython.cygrpc").exception("raised by [%s]", "/Exchange")
"""
    done = run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    gone, other = done.stderr.splitlines()[0], done.stderr.partition("\n")[2]
    assert gone.endswith(
        "WARNING grpc._cython.cygrpc: an answer was not sent: raised by [/Exchange]"
    )
    assert "ERROR grpc._cython.cygrpc: raised by [/Exchange]\nTraceback" in other
    assert other.count("Traceback") == 1
    assert other.endswith("ValueError: yes\n")


def test_metrics_tell_what_happened(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        client.put("k", torch.zeros(4096, dtype=torch.int8))
        client.put("k", torch.zeros(4096, dtype=torch.int8))
        client.get("missing")
        item = client.get("k")
        with pytest.raises(EcdError):
            client.put("large", torch.zeros(65 << 20, dtype=torch.int8))
        eventually(lambda: "lag_seconds_count 0.0" not in daemon.metrics())
        eventually(
            lambda: 'ecd_hits_total{use="handed_over"} 1.0' in daemon.metrics(),
            what="a look at the readers",
        )
        text = daemon.metrics()
        found = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line and not line.startswith("#")
        }
        assert found["process_resident_memory_bytes"] > 64 << 20, "the pool"
        assert found['ecd_hits_total{use="handed_over"}'] == 1
        assert found['ecd_hits_total{use="reused"}'] == 0
        assert found["ecd_misses_total"] == 1
        assert found["ecd_puts_total"] == 1
        assert found["ecd_duplicates_total"] == 1
        assert found["ecd_bytes_in_total"] == found["ecd_bytes_out_total"] == 4096
        for what in ("put", "hit"):
            assert found[f'ecd_{what}_bytes_bucket{{le="4096.0"}}'] == 1
            assert found[f"ecd_{what}_bytes_sum"] == 4096
        pool = {
            name.removeprefix("ecd_pool_").removesuffix('{pool="host"}'): value
            for name, value in found.items()
            if name.startswith("ecd_pool_")
        }
        assert pool["bytes"] == 64 << 20
        assert pool["leased_bytes"] == pool["used_bytes"] == 4096
        granted = pool["granted_bytes"]
        assert granted > 0, "who has put something may put more of it"
        assert pool["largest_free_bytes"] == pool["free_bytes"] - granted
        assert found["ecd_entries"] == found["ecd_sessions"] == found["ecd_leases"] == 1
        assert found['ecd_refused_total{cause="entry_too_large"}'] == 1
        assert found['ecd_evictions_total{reason="capacity"}'] == 0
        assert found['ecd_call_seconds_count{method="Reserve"}'] == 2, "a duplicate makes no call"
        assert found["ecd_event_loop_lag_seconds_count"] >= 1
        assert not any(name.startswith("ecd_fetch") for name in found), "there are no other nodes"
        item.close()
    with Client(daemon.address) as small:
        for index in range(40):
            small.put(f"fill{index}", torch.zeros(4 << 20, dtype=torch.int8))
    evictions = re.findall(r'ecd_evictions_total\{reason="\w+"\} (\d+)', daemon.metrics())
    assert sum(map(int, evictions)) >= 24
    evicted = re.findall(r'ecd_evicted_bytes_total\{reason="\w+"\} (\S+)', daemon.metrics())
    assert sum(map(float, evicted)) >= 23 * (4 << 20)


# -- the end ---------------------------------------------------------------------------------------


def test_sigterm_during_work_loses_no_read_and_leaves_nothing(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon(ECD_WARM_RESTART="false").start()
    tensors = {f"k{i}": torch.full((1 << 20,), i, dtype=torch.uint8) for i in range(8)}
    with Client(daemon.address) as client:
        for key, tensor in tensors.items():
            client.put(key, tensor)
    wrong: list[str] = []
    reads = 0
    over = threading.Event()

    def read(reader: Client) -> None:
        nonlocal reads
        with reader:
            while True:
                for key, tensor in tensors.items():
                    try:
                        item = reader.get(key)
                    except DaemonUnavailable:
                        over.set()
                        return
                    if item is None:
                        wrong.append(f"{key} is gone")
                        continue
                    if not all(torch.equal(item.tensor, tensor) for _ in range(10)):
                        wrong.append(f"{key} reads wrong")
                    item.close()
                    reads += 1

    def write(writer: Client) -> None:
        with writer:
            index = 0
            while not over.is_set():
                index = index % 150 + 1  # with all of them, nothing has to be evicted
                try:
                    writer.put(f"new{index}", torch.zeros(1 << 18, dtype=torch.uint8))
                except EcdError:
                    return

    threads = [
        threading.Thread(target=work, args=(Client(daemon.address),))
        for work in (*[read] * 4, write)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: reads > 50)
    assert daemon.terminate() == 0
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert wrong == []
    assert not daemon.shm.exists()
    assert [path.name for path in daemon.directory.iterdir()] == [daemon.log.name]
    assert "Traceback" not in daemon.text()
    with pytest.raises(ProcessLookupError):
        os.killpg(daemon.pid, 0)
