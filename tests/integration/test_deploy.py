"""Manifests and image: valid, of one mind with the daemon's defaults, and run as they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from grpc_health.v1 import health_pb2

from ecd.config import Config
from support.daemon import eventually
from support.nodes import LET_OTHERS_IN, SEEN

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
OVERLAYS = ("daemonset", "sidecar", "example")
VERSIONS = ("1.33", "1.36")
Manifest = dict[str, Any]


def build(directory: Path) -> list[Manifest]:
    built = subprocess.run(["kubectl", "kustomize", directory], capture_output=True, text=True)
    assert built.returncode == 0, f"kubectl 1.27 or newer is needed: {built.stderr}"
    assert "deprecated" not in built.stderr, built.stderr
    return list(yaml.safe_load_all(built.stdout))


@pytest.fixture(scope="module")
def manifests() -> dict[str, list[Manifest]]:
    return {overlay: build(K8S / overlay) for overlay in OVERLAYS}


def pods(manifests: list[Manifest]) -> list[Manifest]:
    return [each["spec"]["template"]["spec"] for each in manifests if "template" in each["spec"]]


def containers(manifests: list[Manifest], name: str) -> list[Manifest]:
    return [
        container
        for pod in pods([each for each in manifests if "spec" in each])
        for container in (*pod.get("initContainers", ()), *pod["containers"])
        if container["name"] == name
    ]


def environment(container: Manifest) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


def only(manifests: list[Manifest], kind: str, name: str = "ecd") -> Manifest:
    [found] = [
        each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("kubernetes", VERSIONS)
def test_kubernetes_takes_them(
    manifests: dict[str, list[Manifest]], overlay: str, kubernetes: str
) -> None:
    """A plain cluster does: no kind is an operator's."""
    for manifest in manifests[overlay]:
        kubernetes_validate.validate(manifest, kubernetes, strict=True)


@pytest.mark.parametrize("overlay", ["daemonset", "sidecar"])
def test_one_value_sizes_everything(tmp_path: Path, overlay: str) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / "k8s" / overlay / "kustomization.yaml"
    assert file.read_text().count("size=8Gi") == 1
    file.write_text(file.read_text().replace("size=8Gi", "size=5Gi"))
    built = build(file.parent)
    text = yaml.safe_dump_all(built)
    assert "8Gi" not in text
    assert "set by size" not in text
    [ecd] = containers(built, "ecd")
    assert ecd["resources"]["requests"]["memory"] == "5Gi"
    if overlay == "sidecar":
        [pod] = pods([each for each in built if each["kind"] == "Deployment"])
        assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "5Gi"}
        assert ecd["resources"]["limits"]["memory"] == "5Gi"
    else:
        assert environment(ecd)["ECD_HOST_POOL_BYTES"] == "5Gi"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_they_agree_with_the_daemon(manifests: dict[str, list[Manifest]], overlay: str) -> None:
    built = manifests[overlay]
    [ecd] = containers(built, "ecd")
    settings = environment(ecd)
    known = {f"ECD_{name}".upper() for name in Config.model_fields} | {"POD_IP"}
    assert settings.keys() <= known
    ports = {port["name"]: port["containerPort"] for port in ecd["ports"]}
    metrics, health = settings["ECD_METRICS_ADDRESS"], settings["ECD_HEALTH_ADDRESS"]
    assert f":{ports['ecd-metrics']}" == metrics[metrics.rindex(":") :]
    assert Config.model_fields["metrics_address"].default.endswith(f":{ports['ecd-metrics']}")
    assert f":{ports['ecd-health']}" == health[health.rindex(":") :]
    for probe in ("startupProbe", "livenessProbe"):
        assert ecd[probe]["grpc"]["port"] == ports["ecd-health"]

    policy = only(built, "NetworkPolicy")["spec"]
    confined, others = policy["ingress"][0], policy["ingress"][1:]
    assert confined["from"] == [{"podSelector": policy["podSelector"]}]
    peer, engine = confined["ports"]
    assert f"{engine['port']}-{engine['endPort']}" == Config.model_fields["engine_ports"].default
    assert settings.get("ECD_PEER_ADDRESS", "$(POD_IP):9465") == f"$(POD_IP):{peer['port']}"
    open_to_all = [port["port"] for rule in others for port in rule["ports"]]
    serving = [8000] if overlay == "sidecar" else []
    assert open_to_all == [ports["ecd-metrics"], ports["ecd-health"], *serving]

    socket = settings["ECD_ADDRESS"].removeprefix("unix://")
    assert settings["ECD_GROUP"] == "10001"
    assert os.path.dirname(socket) == settings["ECD_SHM_DIR"] == ecd["volumeMounts"][0]["mountPath"]
    for engine in containers(built, "vllm"):
        assert environment(engine)["ECD_ADDRESS"] == settings["ECD_ADDRESS"]
        assert engine["volumeMounts"] == ecd["volumeMounts"]
        [transfer] = [arg for arg in engine["args"] if arg.startswith("--ec-transfer-config=")]
        connector = json.loads(transfer.partition("=")[2])
        assert connector["ec_connector_module_path"] == "ecd_client.vllm"
    workloads = pods([each for each in built if "spec" in each])
    first, *rest = [pod["volumes"] for pod in workloads if "volumes" in pod]
    assert all(volumes == first for volumes in rest)


def test_the_whole_example_joins_its_parts(manifests: dict[str, list[Manifest]]) -> None:
    built = manifests["example"]
    [ecd] = containers(built, "ecd")
    redis = only(built, "Service", "ecd-redis")
    expected = f"redis://{redis['metadata']['name']}:{redis['spec']['ports'][0]['port']}/0"
    assert environment(ecd)["ECD_DIRECTORY"] == expected
    roles = [
        json.loads(arg.partition("=")[2])["ec_role"]
        for engine in containers(built, "vllm")
        for arg in engine["args"]
        if "ec-transfer" in arg
    ]
    assert sorted(roles) == ["ec_consumer", "ec_producer"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_prometheus_operator_scrapes_the_daemons(tmp_path: Path, overlay: str) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    own = tmp_path / "k8s/own"
    own.mkdir()
    resources = {"resources": [f"../{overlay}"], "components": ["../podmonitor"]}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(resources))
    built = build(own)
    monitor = only(built, "PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    [ecd] = containers(built, "ecd")
    assert endpoint["port"] in {port["name"] for port in ecd["ports"]}


def test_a_device_pool_comes_with_the_engines_gpu(tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    own = tmp_path / "k8s/own"
    own.mkdir()
    resources = {"resources": ["../sidecar"], "components": ["../device-pool"]}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(resources))
    built = build(own)
    for manifest in built:
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    [ecd], [vllm] = containers(built, "ecd"), containers(built, "vllm")
    assert ecd["resources"]["claims"] == vllm["resources"]["claims"] == [{"name": "gpu"}]
    assert not vllm["resources"]["limits"], "the device plugin would give it another GPU"
    [pod] = pods([each for each in built if each["kind"] == "Deployment"])
    [claim] = pod["resourceClaims"]
    only(built, "ResourceClaimTemplate", claim["resourceClaimTemplateName"])
    size = environment(ecd)["ECD_DEVICE_POOL_BYTES"]
    assert Config(device_pool_bytes=size).device_pool_bytes == 2 << 30


def test_the_daemonset_runs_where_the_gpus_are(manifests: dict[str, list[Manifest]]) -> None:
    """The node's taint keeps away every pod that asks for no GPU, as the daemon's does not."""
    pod = only(manifests["daemonset"], "DaemonSet")["spec"]["template"]["spec"]
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert taint in pod["tolerations"]


def test_the_image_is_what_the_manifests_expect(manifests: dict[str, list[Manifest]]) -> None:
    checked = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), DOCKERFILE], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    text = DOCKERFILE.read_text()
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    user = re.search(r"^USER (\d+):\1$", text, re.MULTILINE)
    assert user is not None
    assert f"--uid {user[1]} " in text
    for built in manifests.values():
        [ecd] = containers(built, "ecd")
        assert ecd["image"] == f"ecd:{version[1]}"
        for pod in pods([each for each in built if "spec" in each]):
            security = pod.get("securityContext", {})
            shared = {security.get("fsGroup"), *security.get("supplementalGroups", ())}
            own = {security.get("runAsUser")}
            if any(volume["name"] == "ecd" for volume in pod.get("volumes", ())):
                assert int(user[1]) in shared | own


def test_the_image_is_built_of_what_it_copies(tmp_path: Path) -> None:
    """The wheel, from the files that the Dockerfile and .dockerignore let in."""
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    stage = DOCKERFILE.read_text().partition("RUN ")[0]
    copied = {
        name
        for line in re.findall(r"^COPY (.*)$", stage, re.MULTILINE)
        for name in line.split()[:-1]
    }
    assert copied == let_in
    for name in copied:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("*.egg-info"))
        else:
            shutil.copy(source, tmp_path)
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path / "out", tmp_path],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    [wheel] = (tmp_path / "out").iterdir()
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True
    ).stdout
    for module in ("ecd/daemon.py", "ecd_client/cli/main.py", "ecd_proto/v1/cache_pb2.py"):
        assert module in listed


# -- as a container runtime would run it -----------------------------------------------------------

CONTAINER = f"""
set -e
mount --make-rprivate /
mkdir "$PLACE/keep"
{LET_OTHERS_IN}
mount -t tmpfs none /run
mkdir /run/ecd
mount -t tmpfs -o "size=$SIZE,mode=2777,uid=0,gid=10001" none /run/ecd  # as the kubelet does
setpriv --groups=10001 --no-new-privs --bounding-set=-all --inh-caps=-all $PREPARE
mount -o remount,bind,ro /
ip link set lo up
exec setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --bounding-set=-all \\
  --inh-caps=-all "$ECD" serve
"""


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
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
        name: value.replace("$(POD_IP)", address).replace("ecd-redis", address)
        for name, value in environment(ecd).items()
    }
    log = tmp_path / "log"
    process = subprocess.Popen(
        ["unshare", "--mount", "--net", "--fork", "--kill-child", "sh", "-c", CONTAINER],
        env={
            **settings,
            "ECD_PEER_TOKEN": "what the secret holds",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",  # the kubelet sets it in every container
            "PATH": os.environ["PATH"],
            "SEEN": SEEN,
            "PREPARE": shlex.join(prepare["command"]),
            "PLACE": str(tmp_path),
            "SIZE": pod["volumes"][0]["emptyDir"]["sizeLimit"].removesuffix("i"),
            "ECD": str(Path(sys.executable).with_name("ecd")),
        },
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )
    yield process, log
    for child in daemons(process):  # it changed its user, so it does not die with its parent
        os.kill(child, signal.SIGKILL)
    process.kill()
    process.wait()


def daemons(process: subprocess.Popen[bytes]) -> list[int]:
    """The children of a process."""
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(child) for child in file.read_text().split()] if file.exists() else []


PROBE = """
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel("127.0.0.1:9466") as channel:
    print(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status)
"""


def test_the_sidecar_runs_as_its_manifest_says(
    sidecar: tuple[subprocess.Popen[bytes], Path],
) -> None:
    process, log = sidecar
    eventually(lambda: '"serving on ' in log.read_text(), 30.0, log.read_text())
    [daemon] = daemons(process)
    inside = ["nsenter", "--target", str(daemon), "--mount", "--net"]
    probe = subprocess.run([*inside, sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert probe.stdout.strip() == str(health_pb2.HealthCheckResponse.SERVING), probe.stderr
    cli = Path(sys.executable).with_name("ecd-cli")
    command = [cli, "--address", "unix:///run/ecd/ecd.sock", "--json"]
    status = subprocess.run([*inside, *command, "status"], capture_output=True, text=True)
    told = json.loads(status.stdout)
    assert told["pools"][0]["pool_bytes"] == 96 << 20
    assert told["pools"][0]["path"].startswith("/run/ecd/")
    assert told["node"] == "127.0.0.1:9465"
    owner = Path(f"/proc/{daemon}/status").read_text()
    assert re.search(r"^Uid:\t10001\t", owner, re.MULTILINE)
    assert re.search(r"^CapEff:\t0+$", owner, re.MULTILINE)
    bench = subprocess.run([*inside, *command, "bench", "--rounds", "1"], capture_output=True)
    assert bench.returncode == 0, bench.stderr
    volume = os.open(f"/proc/{daemon}/root/run/ecd/ecd-default", os.O_RDONLY)
    assert os.fstat(volume).st_gid == 10001
    os.kill(daemon, signal.SIGTERM)
    assert process.wait(20.0) == 0, log.read_text()
    left = {Path(name).suffix for name in os.listdir(volume)}
    os.close(volume)
    assert {".pool", ".index"} <= left, "a container that is started again takes it over"
    for line in log.read_text().splitlines():
        if line.startswith("{"):
            assert json.loads(line)["level"] in ("INFO", "WARNING"), line
