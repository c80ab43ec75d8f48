"""The sidecar's daemon as a container runtime would run it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from support.containers import Contained, contained
from support.manifests import K8S, build, containers, environment, only, pods
from support.processes import run
from support.waiting import HANG_S, eventually


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Contained]:
    """The daemon of the sidecar: its environment, user and volume, with a root it cannot write."""
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / "k8s" / "sidecar" / "kustomization.yaml"
    joined = file.read_text().replace("size=8Gi", "size=128Mi") + "components: [../redis]\n"
    file.write_text(joined)
    built = build(file.parent)
    [pod] = pods([only(built, "Deployment", "vllm")])
    [prepare] = containers(built, "directory")
    [ecd] = containers(built, "ecd")
    address = "127.0.0.1"
    settings = {
        name: value.replace("$(POD_IP)", address)
        .replace("$(REDIS_PASSWORD)", "what-the-secret-holds")
        .replace("ecd-redis", address)
        for name, value in environment(ecd).items()
    }
    settings["ECD_PEER_TOKEN"] = "what the secret holds"
    settings["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"  # the kubelet sets it in every container
    size = pod["volumes"][0]["emptyDir"]["sizeLimit"].removesuffix("i")
    kubelets = f"size={size},mode=2777,uid=0,gid=10001"
    with contained(tmp_path, settings, kubelets, prepare["command"]) as daemon:
        yield daemon


PROBE = """
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel("127.0.0.1:9466") as channel:
    print(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status)
"""


def test_the_sidecar_runs_as_its_manifest_says(sidecar: Contained) -> None:
    def is_healthy() -> bool:
        probe = run([*sidecar.inside, sys.executable, "-c", PROBE], capture_output=True, text=True)
        return probe.stdout.strip() == str(health_pb2.HealthCheckResponse.SERVING)

    eventually(is_healthy, "it says so a moment after its log")
    cli = Path(sys.executable).with_name("ecd-cli")
    command = [cli, "--address", "unix:///run/ecd/ecd.sock", "--json"]
    status = run([*sidecar.inside, *command, "status"], capture_output=True, text=True)
    told = json.loads(status.stdout)
    assert told["pools"][0]["pool_bytes"] == 96 << 20
    assert told["pools"][0]["path"].startswith("/run/ecd/")
    assert told["node"] == "127.0.0.1:9465"
    owner = Path(f"/proc/{sidecar.pid}/status").read_text()
    assert re.search(r"^Uid:\t10001\t", owner, re.MULTILINE)
    assert re.search(r"^CapEff:\t0+$", owner, re.MULTILINE)
    bench = run([*sidecar.inside, *command, "bench", "--rounds", "1"], capture_output=True)
    assert bench.returncode == 0, bench.stderr
    volume = os.open(f"/proc/{sidecar.pid}/root/run/ecd/ecd-default", os.O_RDONLY)
    assert os.fstat(volume).st_gid == 10001
    os.kill(sidecar.pid, signal.SIGTERM)
    assert sidecar.around.wait(HANG_S) == 0, sidecar.log.read_text()
    left = {Path(name).suffix for name in os.listdir(volume)}
    os.close(volume)
    assert {".pool", ".index"} <= left, "a container that is started again takes it over"
    for line in sidecar.log.read_text().splitlines():
        if line.startswith("{"):
            assert json.loads(line)["level"] in ("INFO", "WARNING"), line
