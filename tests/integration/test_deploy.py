"""Manifests: valid, and of one mind with the daemon's defaults."""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from redis import AuthenticationError, Redis

from ecd.settings.config import Config
from support.manifests import (
    K8S,
    ROOT,
    VERSIONS,
    Manifest,
    build,
    containers,
    environment,
    only,
    overlay_with,
    pods,
)
from support.redis import RedisServer

OVERLAYS = ("daemonset", "sidecar", "example")


@pytest.fixture(scope="module")
def manifests() -> dict[str, list[Manifest]]:
    return {overlay: build(K8S / overlay) for overlay in OVERLAYS}


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("kubernetes", VERSIONS)
def test_kubernetes_takes_them(
    manifests: dict[str, list[Manifest]], overlay: str, kubernetes: str
) -> None:
    """A plain cluster does: no kind is an operator's."""
    for manifest in manifests[overlay]:
        kubernetes_validate.validate(manifest, kubernetes, strict=True)


@pytest.mark.parametrize("overlay", ["daemonset", "sidecar"])
def test_sizes_and_images_are_set_in_one_place(tmp_path: Path, overlay: str) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / "k8s" / overlay / "kustomization.yaml"
    assert file.read_text().count("size=8Gi") == 1
    text = file.read_text().replace("size=8Gi", "size=5Gi").replace("memory=9Gi", "memory=6Gi")
    file.write_text(text.replace("newName: ecd,", "newName: a.registry/ecd,"))
    built = build(file.parent)
    text = yaml.safe_dump_all(built)
    assert "8Gi" not in text
    assert "set by" not in text
    [ecd], [prepare] = containers(built, "ecd"), containers(built, "directory")
    tag = version("encoder-cache-daemon")
    assert ecd["image"] == prepare["image"] == f"a.registry/ecd:{tag}"
    asked = "5Gi" if overlay == "sidecar" else "6Gi"
    assert ecd["resources"]["requests"]["memory"] == asked
    if overlay == "sidecar":
        [pod] = pods([each for each in built if each["kind"] == "Deployment"])
        assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "5Gi"}
        assert ecd["resources"]["limits"]["memory"] == "5Gi"
    else:
        assert environment(ecd)["ECD_HOST_POOL_BYTES"] == "5Gi"


PROTOCOLS = ("TCP", "UDP", "SCTP")


def reachable(rules: list[Manifest]) -> set[tuple[str, int]]:
    return {
        (each["protocol"], port)
        for rule in rules
        for each in rule["ports"]
        for port in range(each["port"], each.get("endPort", each["port"]) + 1)
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_they_agree_with_the_daemon(manifests: dict[str, list[Manifest]], overlay: str) -> None:
    built = manifests[overlay]
    [ecd] = containers(built, "ecd")
    settings = environment(ecd)
    known = {f"ECD_{name}".upper() for name in Config.model_fields}
    known |= {"POD_IP", "REDIS_PASSWORD"}
    assert settings.keys() <= known
    ports = {port["name"]: port["containerPort"] for port in ecd["ports"]}
    metrics, health = settings["ECD_METRICS_ADDRESS"], settings["ECD_HEALTH_ADDRESS"]
    assert f":{ports['ecd-metrics']}" == metrics[metrics.rindex(":") :]
    assert Config.model_fields["metrics_address"].default.endswith(f":{ports['ecd-metrics']}")
    assert f":{ports['ecd-health']}" == health[health.rindex(":") :]
    for probe in ("startupProbe", "livenessProbe"):
        assert ecd[probe]["grpc"]["port"] == ports["ecd-health"]

    first, last = map(int, Config.model_fields["engine_ports"].default.split("-"))
    peer = int(settings.get("ECD_PEER_ADDRESS", "$(POD_IP):9465").removeprefix("$(POD_IP):"))
    confined = {peer, *range(first, last + 1)}
    policy = only(built, "NetworkPolicy")["spec"]
    selected = policy["podSelector"]["matchLabels"].items()
    workload = (
        only(built, "Deployment", "vllm") if overlay == "sidecar" else only(built, "DaemonSet")
    )
    assert selected <= workload["spec"]["template"]["metadata"]["labels"].items()
    to_all = reachable([rule for rule in policy["ingress"] if "from" not in rule])
    to_daemons = reachable([rule for rule in policy["ingress"] if "from" in rule])
    assert all(
        rule.get("from", [{"podSelector": policy["podSelector"]}])
        == [{"podSelector": policy["podSelector"]}]
        for rule in policy["ingress"]
    )
    assert to_daemons == {("TCP", port) for port in confined}
    own = {("TCP", port) for port in (ports["ecd-metrics"], ports["ecd-health"])}
    others = {(protocol, port) for protocol in PROTOCOLS for port in range(1, 65536)} - to_daemons
    assert to_all == (others if overlay == "sidecar" else own), "vLLM's ports are not ours to close"

    socket = settings["ECD_ADDRESS"].removeprefix("unix://")
    assert settings["ECD_GROUP"] == "10001"
    assert os.path.dirname(socket) == settings["ECD_SHM_DIR"] == ecd["volumeMounts"][0]["mountPath"]
    for engine in containers(built, "vllm"):
        assert environment(engine)["ECD_ADDRESS"] == settings["ECD_ADDRESS"]
        assert engine["volumeMounts"] == ecd["volumeMounts"]
        [transfer] = [arg for arg in engine["args"] if arg.startswith("--ec-transfer-config=")]
        connector = json.loads(transfer.partition("=")[2])
        assert connector["ec_connector_module_path"] == "ecd_client.vllm"
    workloads = pods(built)
    first, *rest = [pod["volumes"] for pod in workloads if "volumes" in pod]
    assert all(volumes == first for volumes in rest)


def test_the_whole_example_joins_its_parts(manifests: dict[str, list[Manifest]]) -> None:
    built = manifests["example"]
    [ecd] = containers(built, "ecd")
    redis = only(built, "Service", "ecd-redis")
    host = f"{redis['metadata']['name']}:{redis['spec']['ports'][0]['port']}"
    assert environment(ecd)["ECD_DIRECTORY"] == f"redis://:$(REDIS_PASSWORD)@{host}/0"
    roles = [
        json.loads(arg.partition("=")[2])["ec_role"]
        for engine in containers(built, "vllm")
        for arg in engine["args"]
        if "ec-transfer" in arg
    ]
    assert sorted(roles) == ["ec_consumer", "ec_producer"]


def test_the_redis_asks_for_the_password_that_the_daemons_have(
    manifests: dict[str, list[Manifest]], tmp_path: Path
) -> None:
    built = manifests["example"]
    [ecd], [redis] = containers(built, "ecd"), containers(built, "redis")
    names = [each["name"] for each in ecd["env"]]
    assert names.index("REDIS_PASSWORD") < names.index("ECD_DIRECTORY"), "which names it"
    [password] = [each for each in ecd["env"] if each["name"] == "REDIS_PASSWORD"]
    assert redis["env"] == [password]
    options = [each.replace("$(REDIS_PASSWORD)", "its-password") for each in redis["args"]]
    server = RedisServer(tmp_path, options=options, cli=["-a", "its-password"]).start()
    try:
        url = environment(ecd)["ECD_DIRECTORY"].replace("$(REDIS_PASSWORD)", "its-password")
        url = url.replace("ecd-redis:6379", f"{server.host}:{server.port}")
        with Redis.from_url(url) as with_password, Redis.from_url(server.url) as without:
            assert with_password.ping()
            with pytest.raises(AuthenticationError):
                without.ping()
    finally:
        server.kill()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_monitoring_is_added_by_components(tmp_path: Path, overlay: str) -> None:
    parts = "podmonitor", "../prometheus", "../grafana"
    built = overlay_with(tmp_path, overlay, *parts)
    monitor = only(built, "PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    [ecd] = containers(built, "ecd")
    assert endpoint["port"] in {port["name"] for port in ecd["ports"]}
    rules = ROOT / "deploy" / "prometheus" / "ecd.rules.yml"
    assert only(built, "PrometheusRule")["spec"] == yaml.safe_load(rules.read_text())
    dashboard = only(built, "ConfigMap", "ecd-dashboard")
    assert dashboard["data"]["ecd.json"] == (ROOT / "deploy/grafana/ecd.json").read_text()
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}


def test_a_device_pool_comes_with_the_engines_gpu(tmp_path: Path) -> None:
    built = overlay_with(tmp_path, "sidecar", "device-pool")
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
    built = manifests["daemonset"]
    pod = only(built, "DaemonSet")["spec"]["template"]["spec"]
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    engines = *pods(manifests["sidecar"]), *pods(manifests["example"])
    for each in (pod, *engines):
        assert taint in each.get("tolerations", ()) or "redis" in each["containers"][0]["name"]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = pod["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    labels = [each["key"] for term in terms for each in term["matchExpressions"]]
    assert len(labels) == len(terms), "one label is enough"
    clouds = {"cloud.google.com/gke-accelerator", "kubernetes.azure.com/accelerator"}
    clouds |= {
        f"{group}/instance-gpu-manufacturer" for group in ("eks.amazonaws.com", "karpenter.k8s.aws")
    }
    assert {"nvidia.com/gpu.present", "ecd", *clouds} == set(labels)
    only(built, "PriorityClass", pod["priorityClassName"])


def test_a_full_pool_stays_below_what_the_pod_asks_for(
    manifests: dict[str, list[Manifest]],
) -> None:
    """The kubelet evicts first what uses more than it asked for."""
    [ecd] = containers(manifests["daemonset"], "ecd")
    size = int(Config(host_pool_bytes=environment(ecd)["ECD_HOST_POOL_BYTES"]).host_pool_bytes or 0)
    asked = Config(host_pool_bytes=ecd["resources"]["requests"]["memory"]).host_pool_bytes
    assert int(asked or 0) - size >= 1 << 30


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_of_the_baseline_standard_only_the_hosts_directory_is_outside(
    manifests: dict[str, list[Manifest]], overlay: str
) -> None:
    """Pod Security: the sidecar's namespace may enforce "baseline", the others' may not."""
    mounts_host = False
    for pod in pods(manifests[overlay]):
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        mounts_host |= any("hostPath" in volume for volume in pod.get("volumes", ()))
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            security = container.get("securityContext", {})
            assert "privileged" not in security
            assert set(security.get("capabilities", {}).get("add", ())) <= {"CHOWN", "FOWNER"}
            assert not any("hostPort" in port for port in container.get("ports", ()))
    assert mounts_host == (overlay != "sidecar")
