"""The Helm chart, by Helm itself: beside the manifests of deploy/k8s, and what values change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from ecd.settings.config import Config
from support.manifests import (
    CHART,
    K8S,
    ROOT,
    VERSIONS,
    Manifest,
    build,
    chart,
    containers,
    environment,
    kinds,
    only,
    overlay_with,
    overriding,
    pods,
    tool,
)

POLICY = "NetworkPolicy"


def daemon(manifests: list[Manifest]) -> Manifest:
    [ecd] = containers(manifests, "ecd")
    return ecd


def config(container: Manifest) -> Config:
    """The daemon's settings in a pod with this address, where every secret holds a URL."""
    values = {
        each["name"]: each.get("value", "redis://:a-password@redis:6379/0").replace(
            "$(POD_IP)", "10.0.0.1"
        )
        for each in container["env"]
    }
    return Config(
        **{name.removeprefix("ECD_").lower(): v for name, v in values.items() if "ECD_" in name}
    )


def refusal(**values: object) -> str:
    return tool("helm", "template", "ecd", CHART, *overriding(values), status=1)


def test_the_chart_makes_what_the_daemonsets_directory_makes() -> None:
    """But for names, which the chart derives from the release's."""
    tool("helm", "lint", "--strict", CHART)
    ours, theirs = kinds(build(K8S / "daemonset")), kinds(chart(hostPath="/dev/shm/ecd"))
    del ours["ConfigMap", "ecd-size"]  # which only carries the values
    theirs["PriorityClass", "ecd"] = theirs.pop(("PriorityClass", "ecd.ecd"))
    for manifests in (ours, theirs):
        workload = manifests["DaemonSet", "ecd"]["spec"]
        assert workload.pop("selector")["matchLabels"].items() <= (
            workload["template"].pop("metadata")["labels"].items()
        )
        pod = workload["template"]["spec"]
        assert (
            pod.pop("priorityClassName")
            == (manifests["PriorityClass", "ecd"].pop("metadata")["name"])
        )
        for container in (*pod["initContainers"], *pod["containers"]):
            container.pop("imagePullPolicy", None)
            container.get("env", []).sort(key=lambda each: each["name"])
        for manifest in manifests.values():
            manifest.pop("metadata", None)
        policy = manifests[POLICY, "ecd"]["spec"]
        own = policy.pop("podSelector")
        assert policy["ingress"][0].pop("from") == [{"podSelector": own}]
    assert theirs == ours


def host_paths(manifests: list[Manifest]) -> set[str]:
    return {
        volume["hostPath"]["path"]
        for pod in pods(manifests)
        for volume in pod["volumes"]
        if "hostPath" in volume
    }


def test_releases_side_by_side_share_nothing() -> None:
    """Tenants that do not trust each other have a daemon each, on the same nodes."""
    switched = {part: {"enabled": True} for part in ("podMonitor", "prometheusRule", "dashboard")}
    values = {"disk": {"size": "10Gi"}, **switched}
    places = [
        ("ecd", "ecd"),
        ("ecd", "tenant-a"),
        ("ecd-b", "tenant"),
        ("b", "tenant-ecd"),
        ("other", "ecd"),
        ("other", "tenant-a"),
    ]
    seen: set[object] = set()
    for release, namespace in places:
        built = chart(release, namespace, **values)
        objects: set[object] = {
            (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
            for each in built
        }
        assert {kind for kind, place, _ in objects if place is None} == {"PriorityClass"}
        paths = host_paths(built)
        assert len(paths) == 2, "pool and disk"
        assert not seen & (objects | paths)
        seen |= objects | paths
    assert host_paths(build(K8S / "daemonset")).isdisjoint(seen)

    def closed(release: str) -> tuple[Manifest, Manifest]:
        built = chart(release, "ecd", fullnameOverride=f"the-{release}")
        policy = only(built, POLICY, f"the-{release}")["spec"]
        own = policy["podSelector"]["matchLabels"]
        assert policy["ingress"][0]["from"] == [{"podSelector": {"matchLabels": own}}]
        workload = only(built, "DaemonSet", f"the-{release}")["spec"]
        assert own == workload["selector"]["matchLabels"]
        return own, workload["template"]["metadata"]["labels"]

    for one, other in (("ecd", "b"), ("b", "ecd")):
        own, _ = closed(one)
        _, labels = closed(other)
        assert not own.items() <= labels.items(), "the other's pods would reach every byte"


def test_the_charts_values_change_what_they_name(tmp_path: Path) -> None:
    switched = {part: {"enabled": True} for part in ("podMonitor", "prometheusRule", "dashboard")}
    switched["podMonitor"]["labels"] = {"release": "prometheus"}
    values = {
        "image": {"repository": "a.registry/ecd", "tag": "7"},
        "size": "5Gi",
        "memory": "7Gi",
        "cpu": "2",
        "limits": {"memory": "8Gi"},
        "hostPath": "/dev/shm/cache",
        "tolerations": [],
        "nodeSelector": {"a": "b"},
        "priorityClassName": "theirs",
        "imagePullSecrets": [{"name": "s"}],
        "serviceAccountName": "ecd-on-hosts",
        "updateStrategy": {"type": "OnDelete"},
        "podLabels": {"team": "vision", "ecd": "ours", "app.kubernetes.io/name": "ours"},
        "podAnnotations": {"a": "b"},
        "podSecurityContext": {"seLinuxOptions": {"type": "spc_t"}},
        "settings": {"ECD_WARM_RESTART": "false", "ECD_LOG_FORMAT": "text"},
        "extraVolumes": [{"name": "tls", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "tls", "mountPath": "/etc/ecd"}],
        "envFrom": [{"secretRef": {"name": "more"}}],
        "peers": {"enabled": True, "directory": "redis://redis:6379/0"},
        "networkPolicy": {"enabled": False},
    }
    built = chart(**switched, **values)
    for manifest in built:
        if "monitoring.coreos.com" not in manifest["apiVersion"]:
            kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    assert {kind for kind, _ in kinds(built)} == {
        *("DaemonSet", "PodMonitor", "PrometheusRule", "ConfigMap")
    }
    workload = only(built, "DaemonSet")["spec"]
    assert workload["updateStrategy"] == {"type": "OnDelete"}
    metadata, pod = workload["template"]["metadata"], workload["template"]["spec"]
    own = {"ecd": "node", **workload["selector"]["matchLabels"]}
    assert metadata == {"labels": {"team": "vision", **own}, "annotations": {"a": "b"}}
    assert not pod.keys() & {"tolerations", "affinity"}, "a nodeSelector says which nodes"
    for name in ("nodeSelector", "priorityClassName", "imagePullSecrets", "serviceAccountName"):
        assert pod[name] == values[name]
    assert pod["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert pod["securityContext"]["runAsUser"] == 10001
    assert host_paths(built) == {"/dev/shm/cache"}
    assert pod["volumes"][1:] == values["extraVolumes"]
    [ecd], [prepare] = containers(built, "ecd"), containers(built, "directory")
    assert ecd["image"] == prepare["image"] == "a.registry/ecd:7"
    assert ecd["resources"] == {
        "requests": {"cpu": "2", "memory": "7Gi"},
        "limits": {"memory": "8Gi"},
    }
    assert ecd["volumeMounts"][1:] == values["extraVolumeMounts"]
    assert ecd["envFrom"] == values["envFrom"]
    [with_redis] = containers(overlay_with(tmp_path, "daemonset", "redis"), "ecd")
    expected = environment(with_redis) | {
        "ECD_HOST_POOL_BYTES": "5Gi",
        "ECD_DIRECTORY": "redis://redis:6379/0",
        "ECD_WARM_RESTART": "false",
        "ECD_LOG_FORMAT": "text",
    }
    del expected["REDIS_PASSWORD"]
    assert environment(ecd) == expected
    assert ecd["env"][0]["name"] == "POD_IP", "before the variable that names it"
    assert only(built, "PodMonitor")["metadata"]["labels"]["release"] == "prometheus"
    assert "priorityClassName" not in pods(chart(priorityClassName=""))[0]


def test_monitoring_is_that_of_the_repository() -> None:
    switched = {part: {"enabled": True} for part in ("podMonitor", "prometheusRule", "dashboard")}
    built = chart(**switched)
    endpoints = only(built, "PodMonitor")["spec"]["podMetricsEndpoints"]
    overlay = yaml.safe_load((K8S / "podmonitor" / "podmonitor.yaml").read_text())
    assert endpoints == overlay["spec"]["podMetricsEndpoints"]
    rules = ROOT / "deploy" / "prometheus" / "ecd.rules.yml"
    assert only(built, "PrometheusRule")["spec"] == yaml.safe_load(rules.read_text())
    switched["prometheusRule"]["runbook"] = "https://docs.example/runbook/"
    [group] = only(chart(**switched), "PrometheusRule")["spec"]["groups"]
    for rule in group["rules"]:
        url = f"https://docs.example/runbook/#{rule['alert'].lower()}"
        assert rule["annotations"].pop("runbook_url") == url
    assert {"groups": [group]} == yaml.safe_load(rules.read_text())
    dashboard = only(built, "ConfigMap", "ecd-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    ours = json.loads((ROOT / "deploy/grafana/ecd.json").read_text())
    assert json.loads(dashboard["data"]["ecd.json"]) == ours


@pytest.mark.parametrize(
    ("size", "memory"),
    [("8Gi", "9Gi"), ("1536Mi", "2560Mi"), ("512Gi", "513Gi"), ("1Ti", "1025Gi")],
)
def test_the_pod_requests_more_than_its_pool(size: str, memory: str) -> None:
    ecd = daemon(chart(size=size))
    assert ecd["resources"]["requests"]["memory"] == memory
    assert environment(ecd)["ECD_HOST_POOL_BYTES"] == size
    asked = int(Config(host_pool_bytes=memory).host_pool_bytes or 0)
    assert asked - int(config(ecd).host_pool_bytes or 0) == 1 << 30
    assert f"memory={size} does not hold size={size}" in refusal(size=size, memory=size)


@pytest.mark.parametrize(
    ("said", "values"),
    [
        ("'siz' not allowed", {"siz": "4Gi"}),
        ("at '/size': 'lots' does not match", {"size": "lots"}),
        ("at '/size': '16G' does not match", {"size": "16G"}),
        ("at '/size'", {"size": 16}),
        ("at '/disk': additional properties 'sise'", {"disk.sise": "4Gi"}),
        ("at '/disk/size'", {"disk.size": "4"}),
        ("invalid propertyName 'ECD_ZOEN'", {"settings.ECD_ZOEN": "a"}),
        ("invalid propertyName 'ECD_PEER_TOKEN'", {"settings.ECD_PEER_TOKEN": "a" * 16}),
        ("invalid propertyName 'ECD_HOST_POOL_BYTES'", {"settings.ECD_HOST_POOL_BYTES": "9Gi"}),
        ("at '/hostPath'", {"hostPath": "/dev/shm"}),
        ("at '/hostPath'", {"hostPath": "/dev/shm/../../etc"}),
        ("at '/ports/metrics'", {"ports.metrics": 123456}),
        ("at '/peers/directory'", {"peers.directory": "redis.example:6379"}),
        ("at '/networkPolicy/enabled'", {"networkPolicy.enabled": "no"}),
        ("which Redis?", {"peers.enabled": True}),
    ],
)
def test_the_chart_refuses(said: str, values: dict[str, object]) -> None:
    assert said in refusal(**values)


def test_secrets_stay_in_secrets() -> None:
    peers = {"enabled": True, "directory": "redis://:a-password@redis:6379/0"}
    said = refusal(peers=peers)
    assert "ECD_DIRECTORY has a password in it" in said
    assert "a-password" not in said
    peers = {"enabled": True, "directorySecret": "theirs", "tokenSecret": "ours"}
    ecd = daemon(chart(peers=peers))
    named = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef") for each in ecd["env"]}
    assert named["ECD_DIRECTORY"] == {"name": "theirs", "key": "url"}
    assert named["ECD_PEER_TOKEN"] == {"name": "ours", "key": "token"}
    assert config(ecd).directory_kind == "redis"
    password = {
        "name": "REDIS_PASSWORD",
        "valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}},
    }
    peers = {"enabled": True, "directory": "redis://:$(REDIS_PASSWORD)@redis:6379/0"}
    ecd = daemon(chart(peers=peers, extraEnv=[password]))
    assert ecd["env"][0] == password, "before the variable that names it"
    # A variable of extraEnv is in place of the chart's.
    directory = {"name": "ECD_DIRECTORY", "value": "none"}
    level = {"name": "ECD_LOG_FORMAT", "value": "text"}
    ecd = daemon(chart(peers={"enabled": True, "tokenSecret": ""}, extraEnv=[directory, level]))
    assert [each for each in ecd["env"] if each["name"] in ("ECD_DIRECTORY", "ECD_LOG_FORMAT")] == [
        directory,
        level,
    ]
    assert "ECD_PEER_TOKEN" not in environment(ecd)
    token = {"name": "ECD_PEER_TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
    ecd = daemon(chart(peers=peers, extraEnv=[password, token]))
    assert [each for each in ecd["env"] if each["name"] == "ECD_PEER_TOKEN"] == [token]


def test_a_disk_tier_has_a_volume_that_the_daemon_may_write() -> None:
    assert len(pods(chart())[0]["volumes"]) == 1
    for volume, source in (
        (None, {"hostPath": {"path": "/var/cache/ecd.ecd", "type": "DirectoryOrCreate"}}),
        ({"emptyDir": {"sizeLimit": "210Gi"}}, {"emptyDir": {"sizeLimit": "210Gi"}}),
    ):
        built = chart(disk={"size": "200Gi", "volume": volume})
        kubernetes_validate.validate(only(built, "DaemonSet"), VERSIONS[-1], strict=True)
        [ecd], [prepare] = containers(built, "ecd"), containers(built, "directory")
        settings = config(ecd)
        assert settings.disk_pool_bytes == 200 << 30
        place = str(settings.disk_dir)
        mount = {"name": "disk", "mountPath": place}
        assert mount in ecd["volumeMounts"]
        assert mount in prepare["volumeMounts"]
        assert place in prepare["command"]
        assert pods(built)[0]["volumes"][1] == {"name": "disk", **source}


def test_a_disk_that_is_not_mounted_is_not_made_on_the_root_disk() -> None:
    """And the mount's root keeps its owner: the daemon gets a directory in it."""
    built = chart("ecd", "tenant", disk={"size": "200Gi", "hostPath": "/mnt/nvme/ecd"})
    kubernetes_validate.validate(only(built, "DaemonSet"), VERSIONS[-1], strict=True)
    place = {"path": "/mnt/nvme/ecd", "type": "Directory"}
    assert pods(built)[0]["volumes"][1] == {"name": "disk", "hostPath": place}
    [ecd], [prepare] = containers(built, "ecd"), containers(built, "directory")
    mount = {"name": "disk", "mountPath": str(config(ecd).disk_dir)}
    assert mount in prepare["volumeMounts"]
    assert prepare["command"][-1] == f"{mount['mountPath']}/tenant.ecd"
    assert mount["mountPath"] not in prepare["command"]
    assert {**mount, "subPath": "tenant.ecd"} in ecd["volumeMounts"]


def test_a_number_in_the_settings_is_written_in_digits(tmp_path: Path) -> None:
    settings = {"ECD_DEVICE_POOL_BYTES": 4294967296, "ECD_SLOW_LOG_S": 0.25, "ECD_TRACE": False}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"settings": settings}))
    from_file = tool("helm", "template", "ecd", CHART, "-f", file)
    for built in (chart(settings=settings), list(yaml.safe_load_all(from_file))):
        env = environment(daemon([each for each in built if each]))
        assert {name: env[name] for name in settings} == {
            "ECD_DEVICE_POOL_BYTES": "4294967296",
            "ECD_SLOW_LOG_S": "0.25",
            "ECD_TRACE": "false",
        }


@pytest.mark.parametrize("limit", ["4Gi", "9215Mi", "9G", 4294967296, "0.5Ti"])
def test_a_limit_holds_what_is_requested(limit: object) -> None:
    if limit == "0.5Ti":
        assert daemon(chart(limits={"memory": limit}))["resources"]["limits"] == {"memory": limit}
    else:
        said = f"limits.memory={limit} is below the request of 9Gi: raise it, or leave it out"
        assert said in refusal(limits={"memory": limit})


def test_the_notes_say_how_a_node_gets_its_memory_back() -> None:
    """A stopped daemon leaves its pool, the one of a chart with another directory too."""
    dry = ("helm", "install", "ecd", CHART, "-n", "tenant", "--dry-run=client")
    notes = tool(*dry).partition("NOTES:")[2]
    assert "kubectl -n tenant set env daemonset/ecd ECD_WARM_RESTART=false" in notes
    assert "kubectl -n tenant rollout status daemonset/ecd" in notes
    assert "rm -r /dev/shm/ecd on the node" in notes
    assert "rm -r" not in tool(*dry, "--set=hostPath=/dev/shm/ecd").partition("NOTES:")[2]


def test_on_the_hosts_network_the_ports_are_values() -> None:
    ports = {"metrics": 19464, "peer": 19465, "health": 19466, "engine": "19200-19240"}
    peers = {"enabled": True, "directory": "redis://redis:6379/0"}
    built = chart(hostNetwork=True, ports=ports, peers=peers)
    for manifest in built:
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    [pod] = pods(built)
    assert pod["hostNetwork"] is True
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet", "else a Redis of the cluster has no name"
    ecd = daemon(built)
    settings = environment(ecd)
    assert settings["ECD_METRICS_ADDRESS"].endswith(":19464")
    assert settings["ECD_HEALTH_ADDRESS"].endswith(":19466")
    assert settings["ECD_PEER_ADDRESS"] == "$(POD_IP):19465"
    assert config(ecd).engine_ports == "19200-19240"
    assert {port["containerPort"] for port in ecd["ports"]} == {19464, 19466}
    probes = {ecd[f"{when}Probe"]["grpc"]["port"] for when in ("startup", "readiness", "liveness")}
    assert probes == {19466}
    to_daemons, to_all = only(built, POLICY)["spec"]["ingress"]
    assert [port["port"] for port in to_daemons["ports"]] == [19465, 19200]
    assert to_daemons["ports"][1]["endPort"] == 19240
    assert [port["port"] for port in to_all["ports"]] == [19464, 19466]


def test_the_chart_is_whole_without_the_repository(tmp_path: Path) -> None:
    """Copied by itself, as into another repository, and as a package."""
    copy = shutil.copytree(CHART, tmp_path / "vendored", symlinks=True)
    assert not [file for file in copy.rglob("*") if file.is_symlink()]
    tool("helm", "package", "-d", tmp_path, CHART)
    [package] = tmp_path.glob("*.tgz")
    switched = ("prometheusRule.enabled=true", "dashboard.enabled=true")
    options = [f"--set={each}" for each in switched]
    made = tool("helm", "template", "ecd", CHART, *options)
    assert "EcdDown" in made
    for each in (copy, package):
        assert tool("helm", "template", "ecd", each, *options) == made
