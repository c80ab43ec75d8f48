"""The recipes: their commands are right, and print what the page says."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import ecd_client.vllm
from e2e.servers import PROXY, PROXY_VERSION
from ecd.settings.config import Config
from ecd_client import Client
from ecd_client.vllm.base.settings import KEYS
from ecd_proto.engines import Engine
from support.cli import cli
from support.daemon import Daemon
from support.manifests import K8S, Manifest, build, chart, kinds, pods
from support.pages import DOCS, PAGES, ROOT, blocks, commands, options, printed

PAGE = DOCS / "recipes.md"
MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
ROLES = "ec_producer", "ec_consumer", "ec_both"


def shown(command: str) -> list[list[str]]:
    """The recipes' commands that begin with these words."""
    begin = command.split()
    return [words for words in commands(PAGE) if words[: len(begin)] == begin]


def engines(page: Path) -> list[list[str]]:
    return [words for words in commands(page) if "--ec-transfer-config" in str(words)]


def test_every_engine_that_is_shown_has_settings_that_vllm_and_ecd_take() -> None:
    found = [words for page in PAGES for words in engines(page)]
    assert len(found) >= 8
    for words in found:
        for name in options(words, "--middleware"):
            module, _, middleware = name.rpartition(".")
            assert (module, middleware) == ("ecd_client.vllm", "ReuseMiddleware")
        [said] = options(words, "--ec-transfer-config")
        if said == "...":
            continue
        config = json.loads(said)
        assert config.pop("ec_connector") in ecd_client.vllm.__all__
        assert config.pop("ec_connector_module_path") == ecd_client.vllm.__name__
        assert config.pop("ec_role") in ROLES
        assert set(config.pop("ec_connector_extra_config", {})) <= set(KEYS)
        assert not config
    four = engines(PAGE)[:4]
    devices, ports = {words[0] for words in four}, {options(words, "--port")[0] for words in four}
    assert (len(devices), len(ports)) == (4, 4)
    assert len({str(words[6:]) for words in four}) == 1, "all share one way"


def test_the_request_is_one_of_a_chat() -> None:
    [block] = [block for block in blocks(PAGE) if "BODY=" in block]
    [body] = re.findall(r"BODY='(.*?)'\n", block, re.DOTALL)
    [message] = json.loads(body)["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]


def test_the_proxy_is_the_file_that_the_tests_run() -> None:
    [[*_, url]] = shown("curl -LO")
    assert url.endswith(f"/vllm-project/vllm/v{PROXY_VERSION}/{PROXY}")


def logged() -> Iterator[str]:
    """What an engine's side logs, as regular expressions."""
    for file in (ROOT / "client" / "ecd_client" / "vllm").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(ast.Attribute(ast.Name("logger")), [ast.Constant(str(said)), *_]):
                    yield ".*".join(map(re.escape, re.split(r"%[sdg]", said)))


def test_the_logs_lines_are_those_of_the_program() -> None:
    lines = [
        line for block in blocks(PAGE, "") for line in block.splitlines() if line[:5] == "ecd: "
    ]
    assert len(lines) == 5
    known = list(logged())
    for line in lines:
        assert any(re.fullmatch(each, line) for each in known), line


def plain(lines: list[str]) -> list[str]:
    """Without what differs from run to run."""
    return [re.sub(r"[\d.]+ s$", "N s", re.sub(r"pid \d+", "pid N", line)) for line in lines]


def described(client: Client, number: int) -> Client:
    namespace = f"{MODEL}|one"
    client.describe(Engine(f"{number}", "MODEL", namespace, True, True, {}, "image and video"))
    return client


@pytest.mark.parametrize(("mark", "uses_puts"), [("one node", True), ("apart", False)])
def test_status_shows_what_the_page_says(daemon: Daemon, mark: str, uses_puts: bool) -> None:
    """Clients take the part of engines, which tests/e2e/test_counted.py runs."""
    about: dict[str, Any] = {"namespace": f"{MODEL}|one"}
    page = [line.replace("|...", "|one") for line in printed(PAGE, mark)]
    rows = {line.partition(" ")[0] for line in page}
    with (
        Client(daemon.address, uses_puts=uses_puts, **about) as first,
        Client(daemon.address, **about) as second,
    ):
        described(first, 1)
        described(second, 2)
        first.count_miss()
        assert first.put_bytes("picture", bytes(7 << 20), "uint8", (7 << 20,), cost=0.2)
        daemon.wait_idle()
        item = second.get("picture")
        assert item is not None
        item.close()
        daemon.wait_idle()
        lines = cli(daemon, "status").stdout.splitlines()
        assert plain([line for line in lines if line.partition(" ")[0] in rows]) == plain(page)


def test_the_readme_shows_a_part_of_a_recipe() -> None:
    [lines] = [block.splitlines() for block in blocks(ROOT / "README.md", "")]
    assert set(lines) <= set(printed(PAGE, "apart"))


def composed() -> Manifest:
    read: Manifest = yaml.safe_load((ROOT / "deploy/docker/compose.yaml").read_text())
    return read


def test_docker_run_has_the_options_of_the_compose_file() -> None:
    runs = {options(words, "--name")[0]: words for words in shown("docker run")}
    file = composed()
    for name, words in runs.items():
        service = file["services"][name]
        environment = {key: str(value) for key, value in service["environment"].items()}
        assert dict(each.split("=", 1) for each in options(words, "-e")) == environment
        assert options(words, "-p") == service["ports"]
        assert options(words, "--restart") == [service["restart"]]
        assert service["image"] in words
    ecd, vllm = file["services"]["ecd"], file["services"]["vllm"]
    assert options(runs["ecd"], "--user") == [ecd["user"]]
    assert options(runs["ecd"], "--cap-drop") == ecd["cap_drop"]
    assert options(runs["ecd"], "--security-opt") == ecd["security_opt"]
    assert "--read-only" in runs["ecd"]
    assert f"{options(runs['ecd'], '--stop-timeout')[0]}s" == ecd["stop_grace_period"]
    [mount] = options(runs["ecd"], "--mount")
    [volume] = ecd["volumes"]
    assert mount == f"type=volume,source={volume['source']},target={volume['target']},volume-nocopy"
    assert options(runs["vllm"], "--group-add") == vllm["group_add"]
    assert options(runs["vllm"], "-v") == vllm["volumes"]
    assert options(runs["vllm"], "--shm-size") == [vllm["shm_size"]]
    at = runs["vllm"].index(vllm["image"])
    assert runs["vllm"][at + 1 :] == vllm["command"]
    [made] = shown("docker volume create")
    driver = {**file["volumes"]["ecd"]["driver_opts"]}
    driver["o"] = driver["o"].replace("${VOLUME_SIZE:-8g}", "8g")
    assert dict(each.split("=", 1) for each in options(made, "--opt")) == driver
    built = {options(words, "-t")[0]: options(words, "-f")[0] for words in shown("docker build")}
    services = file["services"].values()
    assert built == {each["image"]: each["build"]["dockerfile"] for each in services}


def test_the_patch_makes_an_engine_of_ones_own_share(tmp_path: Path) -> None:
    """With a Deployment of vLLM as it was before, it gives what the example's engines have."""
    [patch] = blocks(PAGE, "yaml")
    [example, *_] = [each for each in build(K8S / "example") if each["kind"] == "Deployment"]
    [theirs] = pods([example])
    plain = json.loads(json.dumps(example))
    [pod] = pods([plain])
    [engine] = pod["containers"]
    for where, name in ((pod, "securityContext"), (pod, "volumes"), (engine, "volumeMounts")):
        where.pop(name)
    engine["env"] = [{"name": "HF_HOME", "value": "/models"}]
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(plain))
    of = {each: example[each] for each in ("apiVersion", "kind", "metadata")}
    (tmp_path / "ecd.yaml").write_text(yaml.safe_dump(of) + patch)
    parts = {"resources": ["engine.yaml"], "patches": [{"path": "ecd.yaml"}]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(parts))
    [patched] = pods(build(tmp_path))
    assert patched["securityContext"] == theirs["securityContext"]
    [ours], [of_example] = patched["containers"], theirs["containers"]
    assert ours["volumeMounts"] == of_example["volumeMounts"]
    assert {each["name"] for each in ours["env"]} == {"HF_HOME", "ECD_ADDRESS"}
    assert all(each in ours["env"] for each in of_example["env"])
    [volume] = patched["volumes"]
    assert volume["hostPath"]["path"] == host_path(chart())


def host_path(manifests: list[Manifest]) -> str:
    [daemonset] = [each for (kind, _), each in kinds(manifests).items() if kind == "DaemonSet"]
    [path] = [each["hostPath"]["path"] for each in pods([daemonset])[0]["volumes"]]
    return str(path)


def test_each_release_has_the_directory_that_the_page_names() -> None:
    installed = shown("helm install")
    spaces = [options(words, "-n")[0] for words in installed]
    assert spaces == ["ecd", "tenant-a", "tenant-b"]
    for words, space in zip(installed, spaces, strict=True):
        given = dict(each.split("=") for each in options(words, "--set"))
        made = chart(words[2], space, **{"image.repository": given["image.repository"]})
        assert host_path(made) == f"/dev/shm/{space}.ecd"
        assert set(given) == {"image.repository", "size"}
    assert "/dev/shm/tenant-a.ecd" in PAGE.read_text()


def test_ports_of_the_firewall_are_the_defaults() -> None:
    ports = re.findall(r"^\| (\d+)(?: to (\d+))? \| `(\w+)`", PAGE.read_text(), re.MULTILINE)
    [(peer, _, one), (first, last, other)] = ports
    assert (one, other) == ("ECD_PEER_ADDRESS", "ECD_ENGINE_PORTS")
    assert Config.model_fields["engine_ports"].default == f"{first}-{last}"
    assert all(f"ECD_PEER_ADDRESS=10.0.0.{n}:{peer}" in PAGE.read_text() for n in (1, 2))
