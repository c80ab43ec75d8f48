"""Values as operators write them: sizes, durations, and rules for namespaces by pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address
from typing import TypeVar

from ecd.core.model.rules import Rules
from ecd_proto.contract import bytes_of, seconds_of

T = TypeVar("T", int, float, "int | str")
N = TypeVar("N", int, float)

MIN_POOL_BYTES = 1 << 20


def size(value: object) -> object:
    """The bytes of a setting whose name says the unit, so that a plain number counts.

    Raises ValueError.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 4e9 in TOML
    if isinstance(value, int) and value is not True and value >= 0:
        value = str(value)
    if isinstance(value, str):
        plain = re.fullmatch(r"([0-9]+(?:_[0-9]+)*)(?:\.0+)?", value.strip())
        return bytes_of(f"{plain[1].replace('_', '')}B" if plain else value)
    if value is None:
        return None
    raise ValueError("must be a size, such as 512MiB or 4GiB")


def pool_size(value: object) -> object:
    """The bytes of the host pool, or its share of the directory. Raises ValueError."""
    if isinstance(value, str) and (value := value.strip()).endswith("%"):
        if not re.fullmatch("[1-9][0-9]?%", value):
            raise ValueError("must be a share from 1% to 99%")
        return value
    nbytes = size(value)
    if isinstance(nbytes, int) and nbytes < MIN_POOL_BYTES:
        raise ValueError("must be at least 1MiB")
    return nbytes


def duration(value: object) -> object:
    """The seconds of a setting whose name says the unit, so that a plain number counts.

    Raises ValueError.
    """
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return seconds_of(value)


def check_address(name: str, address: str) -> None:
    """Raise ValueError unless the setting may have this host:port."""
    host, _, port = address.rpartition(":")
    if int(port) > 65535:  # a bind would take it modulo 65536
        raise ValueError("must have a port of at most 65535")
    if name == "events_address" and int(port) == 65535:
        raise ValueError("must have a port of at most 65534, as the next one replays the events")
    if int(port) == 0 and name not in ("metrics_address", "events_address"):
        raise ValueError("must have a port of 1 or more, which others can know")
    if name in ("peer_address", "peers"):
        _check_host(host, "this one" if name == "peer_address" else "each of them")


def _check_host(host: str, node: str) -> None:
    """Raise ValueError for a host that is no address of one node, such as 0.0.0.0 or 0."""
    last = host.rstrip(".").rpartition(".")[2]
    if not re.fullmatch("[0-9]+|0[xX][0-9a-fA-F]*", last):  # what inet_aton(3) takes for numbers
        return
    try:
        ip = IPv4Address(host)
    except ValueError:
        raise ValueError("must have a host name, or an IPv4 address of four numbers") from None
    if ip.is_unspecified or ip.is_multicast or ip == IPv4Address("255.255.255.255"):
        raise ValueError(f"needs the address by which other nodes reach {node}")


def quotas(value: object) -> object:
    """Bytes, or percent of the host pool, by pattern. Raises ValueError."""
    return _by_pattern(value, _quota, "PATTERN=SIZE")


def ttls(value: object) -> object:
    """Seconds by pattern. Raises ValueError."""
    return _by_pattern(value, _seconds, "PATTERN=TIME")


def rules(quotas: Mapping[str, int | str], ttls: Mapping[str, float], pool_bytes: int) -> Rules:
    """The core's rules for a host pool of `pool_bytes`."""
    nbytes = {
        pattern: quota
        if isinstance(quota, int)
        else max(1, int(float(quota[:-1]) / 100 * pool_bytes))
        for pattern, quota in quotas.items()
    }
    return Rules(nbytes, ttls)


def _by_pattern(value: object, parse: Callable[[str, str], T], form: str) -> object:
    if isinstance(value, str):
        parts = [part.rpartition("=") for part in value.split(",") if part.strip()]
        if not all(pattern.strip() for pattern, _, _ in parts):
            raise ValueError(f"must be {form}, with commas between several")
        value = {pattern.strip(): rule.strip() for pattern, _, rule in parts}
    if not isinstance(value, dict):
        raise ValueError(f"must be {form}, or a TOML table")
    return {str(pattern): parse(str(pattern), str(rule).strip()) for pattern, rule in value.items()}


def _quota(pattern: str, text: str) -> int | str:
    if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,20})?%", text) and 0 < float(text[:-1]) <= 100:
        return text
    return _positive(bytes_of, pattern, text, " (10% is a share of the pool)")


def _seconds(pattern: str, text: str) -> float:
    return _positive(seconds_of, pattern, text)


def _positive(parse: Callable[[str], N], pattern: str, text: str, advice: str = "") -> N:
    try:
        value = parse(text)
    except ValueError as error:
        raise ValueError(f"{pattern}={text} {error}{advice}") from None
    if not value:
        raise ValueError(f"{pattern}={text} must be more than 0")
    return value
