"""Writes what is generated of the code, the alerts and docs/pictures/: pages, pictures, manifests.

python docs/reference.py [--check]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import indent

import yaml
from examples import sizing
from pictures import pictures
from plots import plots
from programs import described, man_page
from pydantic.fields import FieldInfo
from typer import Typer

from ecd.base.clock import REAL
from ecd.commands import app as ecd
from ecd.core.counters import Counters
from ecd.memory.disk.disk_limits import DiskCounters
from ecd.ops.events import EventCounters
from ecd.ops.metrics.registry import Metrics
from ecd.settings.config import ENV_PREFIX, RELOADABLE, SECRETS, Config
from ecd_client.cli.main import app as ecd_cli
from ecd_proto.v1 import cache_pb2 as pb

DOCS = Path(__file__).parent
CONFIGURATION = """# Settings

`ecd config` prints the effective settings, and where each came from. A flag (`--lease-ttl-s`) wins
over a variable (`ECD_LEASE_TTL_S`), a variable over the TOML file of `--config`, the file over the
default.

Sizes and durations need a unit, here and in every command's options: `B`, `KiB` or `Ki`, `MiB`,
`GiB`, `TiB`, or decimal `kB` or `k`, `MB`, `GB`, `TB`; `ms`, `s`, `m`, `h`, `d`. Only 0 needs none.
Where a name ends in `_bytes`, `_bytes_per_s` or `_s`, a plain number counts in that unit. No
duration is longer than 3,650 days.

"""
COMMANDS = """# Commands

`ecd` runs the daemon, and `ecd-cli` asks a daemon that runs. Every command has `--help`, and each
of the two a man page.
[Looking after it](observe.md#commands) shows what they print.

"""
SETTINGS_TOO = """
Each [setting](configuration.md) but `peer_token` is an option, too, such as
`--host-pool-bytes 4GiB`.
"""
CLIENTS = """
## In a client's environment

| variable | default | meaning |
| --- | --- | --- |
| `ECD_ADDRESS` | as the daemon's | Unix socket of the daemon. |
| `ECD_PIN` | `auto` | `off`: [pin](gpu.md#ecd_pin) nothing for the GPU. |
| `ECD_SGLANG_NAMESPACE` | none | [SGLang's encoder](sglang.md) uses ecd, under this name. |
| `ECD_ENCODERS` | none | URLs, with commas between them, of the encoders that the middleware of \
vLLM's server [sends new media to](vllm-middleware.md#encoders-without-a-proxy), or `directory` \
for [those that register themselves](vllm-middleware.md#encoders-that-register-themselves). |
| `ECD_ENCODER_URL` | by vLLM's `--host` and `--port` | URL at which other engines reach this \
server as an encoder; `off`: it is not registered. |

The vLLM connector has [settings of its own](vllm-reference.md#settings).
"""
METRICS = """# Metrics

On `metrics_address`, for Prometheus. Metrics of peers, fetches and the directory exist once the
daemon has a `peer_address`, those of events once it has an `events_address`, those of the disk once
it has `disk_pool_bytes`.

Counters begin at 0 with each start of a daemon. A session's reads are all counted, however it ends.
A daemon that takes over the pool counts what clients have read since the last one looked. Entries
taken over do not count as puts (`ecd_recovered_total`). What `ecd-cli bench` does is only in
`ecd_bench_total`. So puts and recovered entries, minus evictions, are the entries.

An engine's lookups are those of its own `vllm:ecd_hits` and `vllm:ecd_misses`: one for each
item that a request needed and vLLM's encoder cache did not have. A miss means that the engine
encodes the item. A hit is `reused` if it took the place of an encode. It is `handed_over` if it
only brought an embedding from the engine that encoded it to the engine for which it was
encoded, as in encode-prefill disaggregation. The first hit after a put is a hand-over, unless
the engine that put the entry used it itself (`ec_both`). Reused hits, as a share of themselves
and the misses, are the encodes saved.

A read by another node is that node's hit. Here it is one of `ecd_peer_leases_total`, and there
the fetched entry is a put. Where a client reads more than 512 entries between two looks, their
use and `ecd_saved_seconds_total` are estimated. Reads that the next daemon counts, and those of
a put that the daemon has not listed yet, are `reused`, without seconds. Misses of an engine
whose daemon is away are counted by the engine alone.

By namespace, gauges have a label for each of the 50 largest, and counters for each of the first
50 that had events; all others are `other` together. Once 50 have one, namespaces without entries,
and without events for an hour, lose it to new ones; one that comes back counts from 0. A miss
without a call, in a namespace that has had no entry yet, counts for the namespace that its client
named when it connected. A client's misses in namespaces beyond its first 127 are `other`'s, and so
is what the next daemon counts of the last one's reads.

"""
DEPLOY = DOCS.parent / "deploy"
RULES = DEPLOY / "prometheus" / "ecd.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "ecd.json"
CHART = DEPLOY / "helm" / "ecd"
CHART_SETS = {
    *("address", "shm_dir", "group", "host_pool_bytes", "disk_pool_bytes", "disk_dir"),
    *("metrics_address", "health_address", "peer_address", "engine_ports", "directory", *SECRETS),
}
"""Settings that the chart sets from values of its own, or that belong in a Secret."""
RUNBOOK = """# Runbook

The alerts of `deploy/prometheus/ecd.rules.yml`, and what to do. None of them means wrong bytes, or
an engine that is down: without ecd, an engine encodes for itself.

"""
PROMETHEUS_RULE = """# Written by docs/reference.py from ecd.rules.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ecd
spec:
"""
DEFAULTS = {
    "address": "`unix:///run/ecd/ecd.sock` for root, else in `$XDG_RUNTIME_DIR`",
    "disk_dir": "`/var/cache` for root, else `$XDG_CACHE_HOME`",
}


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines
    )


def default(name: str, setting: FieldInfo) -> str:
    if name in DEFAULTS:
        return DEFAULTS[name]
    value = setting.get_default()
    if value is None or value == "" or value == () or value == {}:
        return ""
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return code(shown)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def meaning(name: str, setting: FieldInfo) -> str:
    return (setting.description or "") + (
        " A reload (SIGHUP) applies it." if name in RELOADABLE else ""
    )


def configuration() -> str:
    rows = (
        (
            f"`{name}` `{ENV_PREFIX}{name.upper()}`",
            default(name, setting),
            meaning(name, setting),
        )
        for name, setting in Config.model_fields.items()
    )
    settings = table(("setting, variable", "default", "meaning"), rows)
    return CONFIGURATION + settings + CLIENTS


def commands() -> str:
    return COMMANDS + "\n".join((*sections("ecd", ecd), *sections("ecd-cli", ecd_cli)))


def sections(program: str, app: Typer) -> Iterator[str]:
    """One for the program and one for each of its commands, with a table of the options."""
    for each in described(program, app):
        head = f"## {program}" if each.name == program else f"### {each.name}\n\n`{each.usage}`"
        rows = [
            (" ".join(f"`{name}`" for name in option.names), code(option.default), option.meaning)
            for option in each.options
        ]
        options = table(("option", "default", "meaning"), rows) if rows else ""
        settings = SETTINGS_TOO if each.takes_settings else ""
        yield f"{head}\n\n{each.help}\n\n{options}{settings}"


def man_pages() -> dict[str, str]:
    settings = [
        (ENV_PREFIX + name.upper(), default(name, setting).replace("`", ""), meaning(name, setting))
        for name, setting in Config.model_fields.items()
    ]
    address = next(each for each in settings if each[0] == "ECD_ADDRESS")
    return {
        "../ecd/ecd.1": man_page("ecd", ecd, "ecd-cli", settings),
        "../client/ecd-cli.1": man_page("ecd-cli", ecd_cli, "ecd", [address]),
    }


def metrics() -> str:
    registry = Metrics("0", REAL)
    counters = pb.Counters(**Counters().figures())
    pools = [pb.PoolStatus(kind="host")]
    disk = pb.DiskStatus(**vars(DiskCounters()))
    spaces = [pb.NamespaceStatus(namespace="n", quota_bytes=1)]
    figures = pb.StatusReply(counters=counters, pools=pools, disk=disk, namespaces=spaces)
    registry.watch_core(lambda: figures)
    registry.observe_call("Get", 0.0)
    reply = pb.PeersReply(fetches={"fetched": 1}, peers=[pb.PeerStatus(node="a:1")])
    registry.watch_peers(lambda: reply, lambda: (0, 0), set)
    registry.watch_events(lambda: vars(EventCounters()))
    registry.watch_trace(lambda: 0)
    rows = []
    for family in registry.registry.collect():
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        labels.pop("le", None)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        named = ", ".join(f"`{label}`" for label in labels)
        rows.append((f"`{name}`", family.type, named, family.documentation))
    return METRICS + table(("metric", "kind", "labels", "meaning"), sorted(rows))


def filled(page: str, **tables: str) -> str:
    """The page with each table between its marks."""
    text = (DOCS / page).read_text()
    for name, made in tables.items():
        marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(
            marks, lambda found, made=made: f"{found[1]}\n{made}\n{found[2]}", text, flags=re.S
        )
    return text


def runbook() -> str:
    rows = (
        (
            f'<a id="{rule["alert"].lower()}"></a>`{rule["alert"]}`',
            rule["labels"]["severity"],
            rule["annotations"]["description"],
        )
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    )
    return RUNBOOK + table(("alert", "severity", "what to do"), rows)


def prometheus_rule() -> str:
    """The rules file as an object of the Prometheus operator."""
    _, _, groups = RULES.read_text().partition("\n")
    return PROMETHEUS_RULE + indent(groups, "  ")


def chart_schema() -> str:
    """The schema of the chart's values, with the settings' variables that it takes."""
    names = [ENV_PREFIX + name.upper() for name in Config.model_fields if name not in CHART_SETS]
    listed = ",\n".join(f'        "{name}"' for name in sorted(names))
    file = CHART / "values.schema.json"
    kept, _, rest = file.read_text().partition('"propertyNames": { "enum": [')
    return f'{kept}"propertyNames": {{ "enum": [\n{listed}\n      ]{rest[rest.index("]") + 1 :]}'


def main() -> None:
    pages = {
        "commands.md": commands(),
        "configuration.md": configuration(),
        "metrics.md": metrics(),
        "runbook.md": runbook(),
        "sizing.md": filled("sizing.md", entries=sizing.entries(), pools=sizing.pools()),
        "../deploy/prometheus/prometheusrule.yaml": prometheus_rule(),
        # A chart that is copied by itself has no links.
        "../deploy/helm/ecd/files/prometheusrule.yaml": prometheus_rule(),
        "../deploy/helm/ecd/files/ecd.json": DASHBOARD.read_text(),
        "../deploy/helm/ecd/values.schema.json": chart_schema(),
        **man_pages(),
        **pictures(),
        **plots(),
    }
    stale = []
    for name, text in pages.items():
        file = DOCS / name
        if not file.exists() or file.read_text() != text:
            stale.append(f"docs/{name}")
            if "--check" not in sys.argv:
                file.write_text(text)
    if stale and "--check" in sys.argv:
        sys.exit(f"{', '.join(stale)}: stale. Run make docs")


if __name__ == "__main__":
    main()
