"""The Helm chart: the manifests of deploy/k8s with values laid over them, by Helm itself."""

from __future__ import annotations

import json
from pathlib import Path

import kubernetes_validate
import yaml

from support.manifests import (
    CHART,
    K8S,
    ROOT,
    VERSIONS,
    build,
    chart,
    containers,
    environment,
    kinds,
    only,
    overlay_with,
    tool,
)


def test_the_chart_makes_what_the_daemonsets_directory_makes() -> None:
    tool("helm", "lint", "--strict", CHART)
    ours, theirs = kinds(build(K8S / "daemonset")), kinds(chart())
    del ours["ConfigMap", "ecd-size"]  # which only carries the values
    for manifest in (*ours.values(), *theirs.values()):
        manifest["metadata"].pop("namespace", None)
        for container in (*containers([manifest], "ecd"), *containers([manifest], "directory")):
            container.pop("imagePullPolicy", None)
            container.get("env", []).sort(key=lambda each: each["name"])
    assert theirs == ours


def test_the_charts_values_change_what_they_name(tmp_path: Path) -> None:
    switched = {part: {"enabled": True} for part in ("podMonitor", "prometheusRule", "dashboard")}
    switched["podMonitor"]["labels"] = {"release": "prometheus"}
    built = chart(
        **switched,
        image={"repository": "a.registry/ecd", "tag": "7"},
        size="5Gi",
        memory="6Gi",
        cpu="2",
        tolerations=[],
        affinity={},
        nodeSelector={"a": "b"},
        priorityClassName="theirs",
        imagePullSecrets=[{"name": "s"}],
        settings={"ECD_WARM_RESTART": "false", "ECD_LOG_FORMAT": "text"},
        peers={"enabled": True, "directory": "redis://redis:6379/0"},
        networkPolicy={"enabled": False},
    )
    for manifest in built:
        if "monitoring.coreos.com" not in manifest["apiVersion"]:
            kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    assert {kind for kind, _ in kinds(built)} == {
        *("DaemonSet", "PodMonitor", "PrometheusRule", "ConfigMap")
    }
    pod = only(built, "DaemonSet")["spec"]["template"]["spec"]
    assert [pod[name] for name in ("tolerations", "affinity", "nodeSelector")] == [
        [],
        {},
        {"a": "b"},
    ]
    assert pod["priorityClassName"] == "theirs"
    assert pod["imagePullSecrets"] == [{"name": "s"}]
    [ecd], [prepare] = containers(built, "ecd"), containers(built, "directory")
    assert ecd["image"] == prepare["image"] == "a.registry/ecd:7"
    assert ecd["resources"] == {"requests": {"cpu": "2", "memory": "6Gi"}}
    [with_redis] = containers(overlay_with(tmp_path, "daemonset", "redis"), "ecd")
    expected = environment(with_redis) | {
        "ECD_HOST_POOL_BYTES": "5Gi",
        "ECD_DIRECTORY": "redis://redis:6379/0",
        "ECD_WARM_RESTART": "false",
        "ECD_LOG_FORMAT": "text",
    }
    assert environment(ecd) == expected
    assert ecd["env"][0]["name"] == "POD_IP", "before the variable that names it"
    assert only(built, "PodMonitor")["metadata"]["labels"] == {"release": "prometheus"}
    rules = ROOT / "deploy" / "prometheus" / "ecd.rules.yml"
    assert only(built, "PrometheusRule")["spec"] == yaml.safe_load(rules.read_text())
    switched["prometheusRule"]["runbook"] = "https://docs.example/runbook/"
    [group] = only(chart(**switched), "PrometheusRule")["spec"]["groups"]
    for rule in group["rules"]:
        url = f"https://docs.example/runbook/#{rule['alert'].lower()}"
        assert rule["annotations"].pop("runbook_url") == url
    assert {"groups": [group]} == yaml.safe_load(rules.read_text())
    dashboard = only(built, "ConfigMap", "ecd-dashboard")["data"]["ecd.json"]
    assert json.loads(dashboard) == json.loads((ROOT / "deploy/grafana/ecd.json").read_text())


def test_the_chart_is_whole_without_the_repository(tmp_path: Path) -> None:
    """Its files are links into deploy/, which a package has as files."""
    tool("helm", "package", "-d", tmp_path, CHART)
    [package] = tmp_path.iterdir()
    assert tool("helm", "template", "ecd", package) == tool("helm", "template", "ecd", CHART)
