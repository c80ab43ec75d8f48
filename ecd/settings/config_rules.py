"""Rules for namespaces, as operators write them: quotas and greatest ages, by pattern."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from math import inf
from typing import TypeVar

from pydantic import ByteSize, TypeAdapter, ValidationError

from ecd.core.model.rules import Rules
from ecd_proto.contract import seconds_of

T = TypeVar("T", int, float, "int | str")

MAX_QUOTA_BYTES = 1 << 62
"""More does not fit in a message."""
_size = TypeAdapter(ByteSize)


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
    return {str(pattern): parse(str(pattern), str(rule)) for pattern, rule in value.items()}


def _quota(pattern: str, text: str) -> int | str:
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?%", text) and 0 < float(text[:-1]) <= 100:
        return text
    nbytes = 0
    if re.fullmatch(r"[0-9]+(\.[0-9]+)? ?[A-Za-z]*", text):  # or what follows would be passed over
        with contextlib.suppress(ValidationError):
            nbytes = int(_size.validate_python(f"{text}B" if text.endswith("i") else text))
    if not 0 < nbytes <= MAX_QUOTA_BYTES:
        raise ValueError(f"{pattern} needs a size, such as 2GiB, or a share of the pool: 10%")
    return nbytes


def _seconds(pattern: str, text: str) -> float:
    seconds = seconds_of(f"{text}s" if text[-1:].isdigit() else text)
    if seconds is None or not 0.0 < seconds < inf:
        raise ValueError(f"{pattern} needs a time, such as 90s, 30m, 12h or 7d")
    return seconds
