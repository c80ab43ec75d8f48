"""Secrets stand neither in arguments nor in what is shown."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from redis import Redis
from typer.testing import CliRunner

from ecd.commands import app
from ecd.settings.config import Config, ConfigError
from ecd.settings.config_sources import load, unknown_variables
from ecd.settings.redaction import answer_without_password, without_password
from ecd_proto.contract import NODE_PATTERN
from support.processes import run

SECRET = "hunter2"
WITH_SECRET = [
    f"redis://:{SECRET}@h:6379/0",
    f"redis://u:{SECRET}@h/0",
    f"redis://{SECRET}@h/0",
    f"redis://u:pa%2F{SECRET}@h/0",
    f"redis://u:pa/{SECRET}@h/0",
    f"redis://u:{SECRET}/x@h/0",
    f"redis://u:123/{SECRET}@h/0",
    f"redis://u:pa?{SECRET}@h/0",
    f"redis://u:pa#{SECRET}@h/0",
    f"redis://u:p@{SECRET}@h/0",
    f"redis://u:{SECRET}@x@h/0",
    f"redis://h/0?password={SECRET}",
    f"redis://h/0?password=x@{SECRET}",
    f"redis://h/0?username={SECRET}&db=1",
    f"redis://h/0?%70assword={SECRET}",
    f"redis://h/0?ssl_password={SECRET}",
    f"redis://h/0?{SECRET}2",
    f"redis://h/0#{SECRET}",
    f"redis://h/{SECRET}",
    f"redis://:{SECRET}",
    f"redis://h:{SECRET}",
    f"redis://[{SECRET}",
    f"rediss+cluster://u:{SECRET}@h:1",
]


@pytest.mark.parametrize("url", WITH_SECRET)
def test_no_form_of_a_password_is_shown_or_taken_as_a_flag(url: str) -> None:
    shown = without_password(url)
    assert shown is not None
    assert SECRET not in shown
    assert shown.startswith(url.partition("://")[0] + "://")
    with pytest.raises(ConfigError, match="ECD_DIRECTORY") as refused:
        load({"directory": url}, None)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}%21@h/0",
        f"redis://h/0?password={SECRET}!",
        f"redis+cluster://u:{SECRET}%21@h",
    ],
)
def test_no_answer_of_a_server_is_shown_with_the_password(url: str) -> None:
    for said in (f"ERR no such login: {SECRET}!", f"ERR x, with args beginning with: '{SECRET}"):
        assert SECRET not in answer_without_password(said, url)
    assert answer_without_password("Connection refused", url) == "Connection refused"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (None, None),
        ("static", "static"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("rediss://[fd00::1]:6379", "rediss://[fd00::1]:6379"),
        ("redis://u:p@10.0.0.1:6379/3", "redis://***@10.0.0.1:6379/3"),
        ("redis://h?socket_timeout=1&password=p", "redis://h?socket_timeout=***&password=***"),
    ],
)
def test_what_is_no_secret_is_shown(url: str | None, shown: str | None) -> None:
    assert without_password(url) == shown


def test_redis_takes_a_password_among_the_parameters() -> None:
    """Passwords may stand in a URL's parameters, so these are hidden too."""
    client = Redis.from_url(f"redis://h/0?%70assword={SECRET}")
    assert client.connection_pool.connection_kwargs["password"] == SECRET


@pytest.mark.parametrize("url", [f"redis://u:pa/{SECRET}@h", f"redis://u:{SECRET}[@h/0"])
def test_an_url_that_is_none_is_refused_unquoted(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("ECD_DIRECTORY", url)
    monkeypatch.setenv("ECD_PEER_ADDRESS", "127.0.0.1:9465")
    with pytest.raises(ConfigError, match=r"directory.*environment.*not a URL") as refused:
        load({}, None)
    assert SECRET not in str(refused.value)


def ecd(*arguments: str, **environ: str) -> Any:
    """Run the command in this process; its `exit_code`, `stdout` and `stderr`."""
    about = {"ECD_PEER_ADDRESS": "127.0.0.1:9465", **environ}
    with mock.patch.object(sys, "argv", ["ecd", *arguments]):
        return CliRunner().invoke(app, arguments, env=about)


def wide_ecd(*arguments: str) -> str:
    """What the command prints in a process of its own, on a terminal of 400 columns."""
    command = [sys.executable, "-m", "ecd", *arguments]
    about = {"env": {**os.environ, "COLUMNS": "400"}, "text": True}
    return run(command, capture_output=True, check=True, **about).stdout


def test_a_flag_with_the_token_is_refused() -> None:
    done = ecd("serve", "--peer-token", SECRET)
    assert done.exit_code == 2
    assert "ECD_PEER_TOKEN" in done.stderr
    assert SECRET not in done.stderr
    assert "peer-token" not in ecd("serve", "--help").stdout


def test_config_shows_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "ecd.toml"
    file.write_text("[namespace_ttls]\nx = '30m'\n")
    token = "t" * 16 + SECRET
    environ = {"ECD_DIRECTORY": f"redis://h/?password={SECRET}", "ECD_PEER_TOKEN": token}
    for form in ((), ("--json",)):
        done = ecd("config", *form, "--config", str(file), **environ)
        assert done.exit_code == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
    assert json.loads(done.stdout)["namespace_ttls"]["value"] == {"x": 1800.0}


@pytest.mark.parametrize("name", ["ECD_PEERS", "ECD_PEER_ADDRESS", "ECD_HEALTH_ADDRESS"])
@pytest.mark.parametrize("url", [f"redis://u:{SECRET}@h/0", f"redis://u:x,{SECRET}@h/0"])
def test_a_url_in_the_wrong_setting_is_refused_unquoted(name: str, url: str) -> None:
    done = ecd("config", **{name: url})
    assert done.exit_code == 2
    assert name.removeprefix("ECD_").lower() in done.stderr
    assert f"got {len(url)} characters" in done.stderr
    assert SECRET not in done.stdout + done.stderr


def test_a_node_that_is_none_is_quoted() -> None:
    with pytest.raises(ConfigError, match=r"peers \(from flag\).*host:port, got .*nowhere"):
        load({"peers": "h:1,nowhere"}, None)


@pytest.mark.parametrize(
    "name",
    ["peer_address", "peers", "metrics_address", "events_address", "health_address"],
)
def test_a_port_is_one(name: str) -> None:
    """Python reads any script's digits as a number; Mooncake and gRPC do not."""
    with pytest.raises(ConfigError, match=name):
        load({name: "127.0.0.1:\uff11\uff12\uff13"}, None)
    with pytest.raises(ConfigError, match=f"{name} .*must have a port of at most 65535"):
        load({name: "127.0.0.1:65536"}, None)
    assert re.fullmatch(NODE_PATTERN, "127.0.0.1:9465")
    assert not re.fullmatch(NODE_PATTERN, "127.0.0.1:\uff19465")


@pytest.mark.parametrize("name", ["peer_address", "peers"])
@pytest.mark.parametrize(
    ("host", "says"),
    [
        *((host, "four numbers") for host in ("0", "0.0", "127.1", "0x7f.1", "300.0.0.1")),
        *((host, "by which other nodes reach") for host in ("0.0.0.0", "224.0.0.1")),
    ],
)
def test_a_node_has_an_address_of_its_own(name: str, host: str, says: str) -> None:
    given = {"peer_address": "127.0.0.1:9465", name: f"{host}:9465", "peer_insecure": "true"}
    with pytest.raises(ConfigError, match=f"^{name} .*{says}.*, got .*'{host}:9465'"):
        load(given, None)


@pytest.mark.parametrize("name", ["peer_address", "peers", "health_address"])
def test_a_port_that_nobody_can_know_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .*must have a port of 1 or more"):
        load({name: "127.0.0.1:0"}, None)


def test_the_port_after_that_of_the_events_is_one() -> None:
    with pytest.raises(ConfigError, match=r"events_address .* at most 65534, as the next one"):
        load({"events_address": "127.0.0.1:65535"}, None)
    load({"events_address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0"}, None)


def test_settings_come_through_a_pipe() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as file:
        file.write("zone = 'west'\n")
    settings, origins = load({}, Path(f"/dev/fd/{ours}"))
    os.close(ours)
    assert (settings.zone, origins["zone"]) == ("west", f"/dev/fd/{ours}")


def test_values_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    done = ecd("config", ECD_LOG_LEVEL="[/x]")
    assert done.exit_code == 2
    assert "got '[/x]'" in done.stderr
    assert "Traceback" not in done.stderr
    file = tmp_path / "[red].toml"
    file.write_text("zone = '[/y]'\n")
    shown = wide_ecd("config", "--config", str(file))
    assert "[red].toml" in shown
    assert "[/y]" in shown


def test_a_misspelt_secret_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "ecd.toml"
    file.write_text(f'peer_tokn = "{SECRET}"\n')
    done = ecd("config", "--config", str(file))
    assert done.exit_code == 2
    assert "peer_tokn" in done.stderr
    assert SECRET not in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"metrics_address": "9464"}, "metrics_address (from flag): got '9464'. host:port of"),
        ({"name": "a/b"}, "name (from flag): got 'a/b'. Tells daemons on one node apart. Letters"),
    ],
)
def test_a_wrong_value_is_told_what_is_wanted(flags: dict[str, str], says: str) -> None:
    """In one line, without a regular expression."""
    with pytest.raises(ConfigError) as refused:
        load(flags, None)
    [line] = str(refused.value).splitlines()
    assert line.startswith(says)
    assert "pattern" not in line


def test_a_misspelt_setting_is_told_its_name(tmp_path: Path) -> None:
    file = tmp_path / "ecd.toml"
    file.write_text('host_pool_byte = "1GiB"\nqqq = 1\n')
    with pytest.raises(ConfigError) as refused:
        load({}, file)
    assert str(refused.value).splitlines() == [
        f"host_pool_byte (from {file}) is no setting: is host_pool_bytes meant?",
        f"qqq (from {file}) is no setting: see `ecd config`",
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peer_token": "short"}, "must have at least 16 characters, got 5 characters"),
        ({"lease_ttl_s": "soon"}, "must be a duration, such as 30s, 10m, 2h or 7d, got 'soon'"),
        ({"lease_ttl_s": "0.5"}, "must be at least 1s, got '0.5'"),
        ({"lease_ttl_s": "500ms"}, "must be at least 1s, got '500ms'"),
        ({"lease_ttl_s": "nan"}, "must be a finite number, got 'nan'"),
        ({"fetch_timeout_s": "1e9"}, "must be at most 600s, got '1e9'"),
        ({"fetch_timeout_s": "9999d"}, "must be at most 3650d, got '9999d'"),
        ({"slow_log_s": "inf"}, "must be a finite number, got 'inf'"),
        ({"host_pool_bytes": "1KiB"}, "must be at least 1MiB, got '1KiB'"),
        ({"host_pool_bytes": "12"}, "must be at least 1MiB, got '12'"),
        ({"host_pool_bytes": "100%"}, "must be a share from 1% to 99%, got '100%'"),
        ({"host_pool_bytes": "12XB"}, "must be a size, such as 512MiB or 4GiB, got '12XB'"),
        ({"host_pool_bytes": True}, "must be a size, such as 512MiB or 4GiB, got True"),
        ({"disk_pool_bytes": "1GiB 2"}, "must be a size, such as 512MiB or 4GiB, got '1GiB 2'"),
        ({"disk_pool_bytes": -1}, "must be a size, such as 512MiB or 4GiB, got -1"),
        ({"disk_pool_bytes": 1.5}, "must be a size, such as 512MiB or 4GiB, got 1.5"),
        ({"disk_pool_bytes": "1__0"}, "must be a size, such as 512MiB or 4GiB, got '1__0'"),
        ({"device_pool_bytes": "99999PiB"}, "must be at most 4EiB, got '99999PiB'"),
        ({"device_pool_bytes": "9" * 20}, f"must be at most 4EiB, got '{'9' * 20}'"),
        ({"disk_write_bytes_per_s": "0"}, "must be more than 0, got '0'"),
        ({"readers_per_entry": "few"}, "must be a whole number, got 'few'"),
        ({"peer_insecure": "maybe"}, "must be true or false, got 'maybe'"),
        ({"warm_restart": "maybe"}, "must be true, false or auto, got 'maybe'"),
        ({"log_format": "xml"}, "must be 'text' or 'json', got 'xml'"),
        ({"zone": "z" * 65}, f"must have at most 64 characters, got '{'z' * 65}'"),
    ],
)
def test_what_is_allowed_is_said_in_words(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(settings, None)
    [name] = settings
    assert str(refused.value) == f"{name} (from flag): {says}"


def test_tables_and_numbers_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ecd.toml"
    file.write_text("[ecd]\nzone = 'a'\n")
    with pytest.raises(ConfigError, match="is a table: put settings at the top level"):
        load({}, file)
    file.write_text("disk_pool_bytes = 4096\nlease_ttl_s = 5\n")
    settings, _ = load({}, file)
    assert (settings.disk_pool_bytes, settings.lease_ttl_s) == (4096, 5.0)
    file.write_text("[namespace_ttls]\nx = 1800\n")
    with pytest.raises(ConfigError, match="x=1800 needs a unit, such as 1800s, 1800m"):
        load({}, file)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"namespace_quotas": "a=12"}, "a=12 needs a unit, such as 12MiB or 12GiB (10% is a share"),
        ({"namespace_quotas": "a=x"}, "a=x must be a size, such as 512MiB or 4GiB (10% is a share"),
        ({"namespace_quotas": "a=0"}, "a=0 must be more than 0"),
        ({"namespace_quotas": "a=101%"}, "a=101% must be a size, such as"),
        ({"namespace_ttls": "*=12"}, "*=12 needs a unit, such as 12s, 12m, 12h or 12d"),
        ({"namespace_ttls": "*=3651d"}, "*=3651d must be at most 3650d"),
        ({"namespace_ttls": "*=0"}, "*=0 must be more than 0"),
        ({"namespace_ttls": "5m"}, "must be PATTERN=TIME, with commas between several"),
    ],
)
def test_a_number_in_a_rule_needs_a_unit(rules: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(rules, None)
    [name] = rules
    assert str(refused.value).startswith(f"{name} (from flag): {says}")


def test_sizes_and_durations_have_units() -> None:
    settings, _ = load(
        {
            "host_pool_bytes": "4Gi",
            "disk_pool_bytes": "1.5 gib",
            "device_pool_bytes": "20M",
            "disk_write_bytes_per_s": "20000000",
            "lease_ttl_s": "5m",
            "slow_log_s": "250ms",
            "fetch_timeout_s": "2.5",
            "namespace_quotas": "a=2MiB,*=10%",
            "namespace_ttls": "a=90s,*=7d",
        },
        None,
    )
    assert settings.host_pool_bytes == 4 << 30
    assert settings.disk_pool_bytes == 3 << 29
    assert settings.device_pool_bytes == 20_000_000
    assert settings.disk_write_bytes_per_s == 20_000_000
    assert (settings.lease_ttl_s, settings.slow_log_s) == (300.0, 0.25)
    assert settings.fetch_timeout_s == 2.5
    assert settings.namespace_quotas == {"a": 2 << 20, "*": "10%"}
    assert settings.namespace_ttls == {"a": 90.0, "*": 604800.0}


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ("4GiB ", 4 << 30),
        (" 4GiB\n", 4 << 30),
        ("4  GiB", 4 << 30),
        (".5GiB", 1 << 29),
        ("4_294_967_296", 4 << 30),
        ("4294967296.0", 4 << 30),
        (4e9, 4_000_000_000),
    ],
)
def test_sizes_are_taken_as_people_and_tools_write_them(value: object, nbytes: int) -> None:
    settings, _ = load({"host_pool_bytes": value, "disk_pool_bytes": value}, None)
    assert settings.host_pool_bytes == settings.disk_pool_bytes == nbytes


def test_blanks_around_a_rule_or_a_share_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "ecd.toml"
    file.write_text("[namespace_ttls]\na = ' 400d '\n[namespace_quotas]\na = ' 10%'\n")
    settings, _ = load({"host_pool_bytes": "75% "}, file)
    assert settings.host_pool_bytes == "75%"
    assert settings.namespace_ttls == {"a": 400 * 86400.0}
    assert settings.namespace_quotas == {"a": "10%"}


def test_values_in_the_pages_and_manifests_are_taken(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    names = "|".join(n for n in Config.model_fields if re.search("_bytes|_s$|^namespace_", n))
    shown = rf"\b(?:ecd_)?({names})(?:=| = |, value: )(\"[^\"]*\"|'[^']*'|[0-9][\w.%]*)"
    found, tables = list[tuple[str, str]](), list[str]()
    for path in (
        root / "README.md",
        *(root / "docs").glob("*.md"),
        *(root / "deploy").rglob("*.*"),
    ):
        if path.suffix in (".md", ".yaml", ".toml", ".env", ".service", ".conf"):
            text = path.read_text()
            found += re.findall(shown, text, re.IGNORECASE)
            tables += re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(found) > 5
    for name, value in found:
        load({name.lower(): value.strip("\"'")}, None)
    tables = [table for table in tables if "[namespace_" in table]
    assert tables
    for table in tables:
        (tmp_path / "ecd.toml").write_text(table)
        load({}, tmp_path / "ecd.toml")


def test_a_misspelt_variable_is_told_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECD_LOG_LEVL", "debug")
    assert "ECD_LOG_LEVL is not a setting of ecd: is ECD_LOG_LEVEL meant?" in unknown_variables()


def test_a_path_is_an_address() -> None:
    assert load({"address": "/x/y.sock"}, None)[0].address == "unix:///x/y.sock"


def test_help_tells_defaults_variables_and_forms() -> None:
    told = wide_ecd("serve", "--help")
    assert re.search(r"--lease-ttl-s +DURATION .*\(ECD_LEASE_TTL_S, default 30.0\)", told)
    assert re.search(r"--warm-restart +true\|false\|auto ", told)
    assert "who may connect" in told


def test_the_level_may_be_short() -> None:
    assert load({"log_level": "WARN"}, None)[0].log_level == "warning"


@pytest.mark.parametrize("share", ["1%", "75%", "99%"])
def test_a_share_of_the_directory_stays_a_share(share: str) -> None:
    assert load({"host_pool_bytes": share}, None)[0].host_pool_bytes == share
