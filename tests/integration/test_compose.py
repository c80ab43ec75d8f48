"""The compose file: valid, of one mind with the image and the settings, and run as it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ecd.settings.config import Config
from support.containers import contained
from support.manifests import K8S, ROOT, build, containers
from support.processes import run
from support.waiting import eventually

DOCKER = ROOT / "deploy" / "docker"
FILE = DOCKER / "compose.yaml"


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    """The file with its variables filled in, by Compose."""
    program = shutil.which("docker-compose")
    assert program is not None, "docker-compose is missing: run make test-system"
    plain = {name: value for name, value in os.environ.items() if name != "VOLUME_SIZE"}
    made = run([program, "-f", FILE, "config"], capture_output=True, text=True, env=plain)
    assert made.returncode == 0, made.stderr
    assert not made.stderr
    read: dict[str, Any] = yaml.safe_load(made.stdout)
    return read


def mount(service: dict[str, Any]) -> str:
    """Where a service has the volume of the daemon."""
    places: list[str] = []
    for each in service["volumes"]:
        if isinstance(each, str):
            source, place, *_ = each.split(":")
            places += [place] * (source == "ecd")
        elif each["source"] == "ecd":
            places.append(each["target"])
    [place] = places
    return place


def options(composed: dict[str, Any]) -> dict[str, str]:
    volume = composed["volumes"]["ecd"]["driver_opts"]
    assert volume["type"] == volume["device"] == "tmpfs"
    return dict(each.split("=") for each in volume["o"].split(","))


def test_daemon_and_engine_share_socket_and_pool(composed: dict[str, Any]) -> None:
    ecd, vllm = composed["services"]["ecd"], composed["services"]["vllm"]
    settings = ecd["environment"]
    assert settings.keys() <= {f"ECD_{name}".upper() for name in Config.model_fields}
    config = Config(**{name.removeprefix("ECD_").lower(): v for name, v in settings.items()})
    assert mount(ecd) == mount(vllm) == config.shm_dir
    assert config.address == f"unix://{config.shm_dir}/ecd.sock"
    assert vllm["environment"] == {"ECD_ADDRESS": config.address}
    user = re.search(r"^USER (\d+):\1$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    assert ecd["user"] == f"{user[1]}:{user[1]}"
    assert vllm["group_add"] == [config.group] == [user[1]]
    volume = options(composed)
    assert volume["uid"] == volume["gid"] == user[1]
    assert not int(volume["mode"], 8) & 0o027, "the daemon's group may enter, nobody else"
    assert config.warm_restart, "it is neither systemd nor Kubernetes that starts it again"
    port = config.metrics_address.rpartition(":")[2]
    assert [each.partition("/")[0] for each in ecd["ports"]] == [f"127.0.0.1:{port}:{port}"]
    assert f"http://127.0.0.1:{port}/readyz" in ecd["healthcheck"]["test"][-1]
    assert vllm["depends_on"] == {"ecd": {"condition": "service_healthy"}}
    assert "ipc" not in ecd.keys() | vllm.keys()


def test_images_are_those_of_the_manifests(composed: dict[str, Any]) -> None:
    built = build(K8S / "example")
    [ecd], [engine, *_] = containers(built, "ecd"), containers(built, "vllm")
    services = composed["services"]
    assert services["ecd"]["image"] == ecd["image"]
    assert services["vllm"]["image"] == engine["image"]
    version = engine["image"].rpartition(":")[2]
    assert services["vllm"]["build"]["args"] == {"VLLM": f"v{version}"}
    assert f"ARG VLLM=v{version}\n" in (DOCKER / "vllm.Dockerfile").read_text()
    for service in services.values():
        context = Path(service["build"]["context"])
        assert (context / service["build"]["dockerfile"]).exists()
        assert context == ROOT
    [transfer] = [each for each in services["vllm"]["command"] if "--ec-transfer-config" in each]
    connector = json.loads(transfer.partition("=")[2])
    assert connector["ec_connector_module_path"] == "ecd_client.vllm"
    run([Path(sys.executable).with_name("hadolint"), DOCKER / "vllm.Dockerfile"], check=True)


def test_the_daemon_runs_as_the_file_says(composed: dict[str, Any], tmp_path: Path) -> None:
    """Healthy by its own check, and used by another user of its group, not by strangers."""
    service = composed["services"]["ecd"]
    volume = ",".join(f"{k}={v}" for k, v in (options(composed) | {"size": "128m"}).items())
    settings = {name: str(value) for name, value in service["environment"].items()}
    with contained(tmp_path, settings, volume) as daemon:
        _, program, *arguments = service["healthcheck"]["test"]
        assert program == "python"
        check = [*daemon.inside, sys.executable, *arguments]
        eventually(lambda: run(check, capture_output=True).returncode == 0, "healthy")
        cli = Path(sys.executable).with_name("ecd-cli")
        bench = [cli, "--address", settings["ECD_ADDRESS"], "bench", "--rounds", "1"]

        def as_user(group: str) -> list[str | Path]:
            user = [
                "setpriv",
                "--reuid=20001",
                "--regid=20001",
                f"--groups={group}",
                "--no-new-privs",
            ]
            return [*daemon.inside, *user, *bench]

        [group] = composed["services"]["vllm"]["group_add"]
        done = run(as_user(group), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert run(as_user("20001"), capture_output=True).returncode == 3, "unreachable"
