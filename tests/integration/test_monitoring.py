"""Rules, dashboard and metrics agree: with promtool, Grafana's own types and a real Prometheus."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from ecd.live.flights import Outcome
from ecd_client import Client
from support.daemon import Daemon, close_all
from support.processes import child, run
from support.waiting import HANG_S, eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "ecd.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "ecd.json"
EMPTY_WHEN_WELL = {"Refusals, by cause", "Directory's errors", "Slow events, by kind"}
"""Panels that may have nothing to show."""


def queries() -> list[tuple[str, str]]:
    """Title and expression of every query of the dashboard, for all of its variables."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], re.sub(r"\$(job|instance)\b", ".*", target["expr"]))
        for panel in panels
        for target in panel.get("targets", ())
    ]


def alerts() -> list[str]:
    return re.findall(r"^      - alert: (\w+)$", RULES.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    """Two daemons with a disk, of which one has fetched from the other."""
    made = []
    hosts = "127.0.82.1", "127.0.82.2"
    for host, other, first in zip(hosts, hosts[::-1], (29000, 29032), strict=True):
        place = tmp_path_factory.mktemp(host)
        (place / "disk").mkdir()
        made.append(
            Daemon(
                place,
                ECD_DISK_POOL_BYTES="16MiB",
                ECD_DISK_DIR=str(place / "disk"),
                ECD_NAMESPACE_QUOTAS="*=50%",
                ECD_PEER_ADDRESS=f"{host}:9465",
                ECD_PEERS=f"{other}:9465",
                ECD_ENGINE_PORTS=f"{first}-{first + 31}",
            ).start()
        )
    yield made
    close_all(made)


def work(nodes: list[Daemon]) -> None:
    with Client(nodes[0].address) as writer, Client(nodes[1].address) as reader:
        for key in (*(uuid.uuid4().hex for _ in range(10)), "k"):
            writer.put_bytes(key, b"x" * 5000, "uint8", (5000,), cost=0.5)
        item = reader.get("k", HANG_S)
        assert item is not None
        item.close()
        reader.get("k").close()
        nodes[1].evict_all()


@pytest.fixture(scope="module")
def exported(nodes: list[Daemon]) -> set[str]:
    work(nodes)
    told = "\n".join(node.metrics() for node in nodes)  # only one has namespaces left
    return set(re.findall(r"^(ecd_\w+?)(?:\{.*)? ", told, re.MULTILINE))


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    for command in (["check", "rules", RULES], ["test", "rules", "ecd.rules.test.yml"]):
        checked = run(["promtool", *command], cwd=RULES.parent, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_is_seen_to_fire_and_has_its_line_in_the_runbook() -> None:
    tests = RULES.with_name("ecd.rules.test.yml").read_text()
    assert len(alerts()) == RULES.read_text().count("description:")
    runbook = (DEPLOY.parent / "docs" / "runbook.md").read_text()
    for alert in alerts():
        assert re.search(rf'ALERTS{{alertname="{alert}", alertstate="firing".*value: 1', tests), (
            alert
        )
        assert f'<a id="{alert.lower()}"></a>`{alert}`' in runbook, "the chart's runbook_url"


def test_every_outcome_of_a_fetch_is_a_failure_or_is_seen_to_alert_nobody() -> None:
    [failures] = re.findall(r'ecd_fetches_total{job="ecd", outcome=~"([^"]+)"}', RULES.read_text())
    _, _, silent = (
        RULES.with_name("ecd.rules.test.yml").read_text().partition("are no EcdFetchesFail")
    )
    successes = re.findall(r'outcome="([^"]+)"', silent.partition("- name:")[0])
    assert sorted((*failures.split("|"), *successes)) == sorted(Outcome)


@pytest.mark.parametrize("source", [RULES, DASHBOARD], ids=["rules", "dashboard"])
def test_every_metric_that_is_asked_for_is_exported(source: Path, exported: set[str]) -> None:
    expressions = source.read_text()
    if source == DASHBOARD:
        expressions = "\n".join(expression for _, expression in queries())
    else:
        expressions = re.sub(r"^ *(description|summary):.*$", "", expressions, flags=re.MULTILINE)
    asked = set(re.findall(r"\becd_\w+", expressions))
    assert len(asked) > 10
    assert asked <= exported


def test_every_panel_says_what_it_shows() -> None:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        assert panel["type"] == "row" or panel["description"].endswith("."), panel["title"]


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    register_default_plugins()
    ours = json.loads(DASHBOARD.read_text())
    known = json.loads(json.dumps(Dashboard.from_json(ours), cls=JSONEncoder))

    def check(mine: object, theirs: object, where: str) -> None:
        if isinstance(mine, dict):
            assert isinstance(theirs, dict), where
            for name, value in mine.items():
                assert name in theirs, f"{where}: {name}"
                check(value, theirs[name], f"{where}.{name}")
        elif isinstance(mine, list):
            assert isinstance(theirs, list), where
            for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                check(one, other, f"{where}[{number}]")
        else:
            assert mine == theirs, where

    check(ours, known, "dashboard")


def test_prometheus_answers_every_panel(nodes: list[Daemon], tmp_path: Path) -> None:
    targets = [daemon.metrics_url().split("/")[2] for daemon in nodes]
    config = tmp_path / "prometheus.yml"
    config.write_text(
        f"""
global: {{ scrape_interval: 500ms, evaluation_interval: 500ms }}
rule_files: [{RULES}]
scrape_configs:
  - job_name: ecd
    static_configs: [{{ targets: {json.dumps(targets)} }}]
"""
    )
    with socket.create_server(("127.0.82.3", 0)) as free:  # no connection begins from there
        address = f"127.0.82.3:{free.getsockname()[1]}"
    command = [
        *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"),
        f"--web.listen-address={address}",
    ]

    def ask(expression: str) -> list[dict]:
        query = urllib.parse.urlencode({"query": expression.replace("$__rate_interval", "5m")})
        with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}") as answer:
            reply = json.load(answer)
        assert reply["status"] == "success"
        return reply["data"]["result"]

    def scraped(expression: str) -> int:
        try:
            return len(ask(expression))
        except OSError:
            return 0

    def is_shown(title: str, expression: str) -> bool:
        data = ask(expression)
        if title in ("Encodes saved", "Encoders saved", "Served", "Fetches, by outcome"):
            return any(float(series["value"][1]) > 0 for series in data)
        return bool(data) or title in EMPTY_WHEN_WELL

    log = (tmp_path / "log").open("w")
    with log, child(command, grace=True, stdout=subprocess.DEVNULL, stderr=log):
        work(nodes)
        eventually(lambda: scraped("ecd_build_info") == 2, "both daemons are scraped")
        eventually(lambda: scraped("ecd_fetches_total{outcome='fetched'} > 0"), "so is the work")
        work(nodes)
        for title, expression in queries():
            eventually(partial(is_shown, title, expression), f"{title}: {expression}")
        with urllib.request.urlopen(f"http://{address}/api/v1/rules") as answer:
            [group] = json.load(answer)["data"]["groups"]
        assert [rule["name"] for rule in group["rules"]] == alerts()
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
        assert not ask('ALERTS{alertstate="firing"}')
