"""Kubernetes manifests as kubectl and Helm make them of deploy/, and what is in them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from support.processes import run

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
CHART = ROOT / "deploy" / "helm" / "ecd"
TOOLS = f"{ROOT / 'build' / 'kubernetes'}:{os.environ['PATH']}"
"""Where Helm and kubectl are; make brings them."""
VERSIONS = ("1.33", "1.36")
"""Of Kubernetes, for whose schemas the manifests are checked."""
Manifest = dict[str, Any]


def tool(*command: str | Path, status: int = 0) -> str:
    """What Helm or kubectl makes, without a warning; or, of another status, what it refuses."""
    program = shutil.which(command[0], path=TOOLS)
    assert program is not None, f"{command[0]} is missing: run make build/kubernetes/helm"
    done = run([program, *command[1:]], capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    if status:
        return done.stderr
    assert not re.search("deprecated|symbolic link", done.stderr), done.stderr
    return done.stdout


def build(directory: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(tool("kubectl", "kustomize", directory)))


def overlay_with(directory: Path, overlay: str, *components: str) -> list[Manifest]:
    """An overlay of ours with components, in a copy of the manifests."""
    copy = directory / "deploy"
    for part in ("k8s", "grafana", "prometheus"):
        shutil.copytree(ROOT / "deploy" / part, copy / part)
    own = copy / "k8s" / "own"
    own.mkdir()
    resources = {"resources": [f"../{overlay}"], "components": [f"../{c}" for c in components]}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(resources))
    return build(own)


def chart(release: str = "ecd", namespace: str = "ecd", **values: object) -> list[Manifest]:
    """What the chart makes with these values over its own."""
    told = tool("helm", "template", release, CHART, "-n", namespace, *overriding(values))
    return [manifest for manifest in yaml.safe_load_all(told) if manifest is not None]


def overriding(values: dict[str, object]) -> list[str]:
    return [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]


def kinds(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


def pods(manifests: list[Manifest]) -> list[Manifest]:
    return [
        each["spec"]["template"]["spec"] for each in manifests if "template" in each.get("spec", {})
    ]


def containers(manifests: list[Manifest], name: str) -> list[Manifest]:
    return [
        container
        for pod in pods(manifests)
        for container in (*pod.get("initContainers", ()), *pod["containers"])
        if container["name"] == name
    ]


def environment(container: Manifest) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


def only(manifests: list[Manifest], kind: str, name: str = "ecd") -> Manifest:
    return kinds(manifests)[kind, name]
