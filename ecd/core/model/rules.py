"""Rules: the settings of operators for namespaces, by name or by pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import translate
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T", int, float)

KNOWN = 4096
"""Namespaces whose rules are remembered; for others the rules are looked up again."""
_NONE: Mapping[str, int] = MappingProxyType({})


class Rules:
    """Quotas in bytes, and greatest ages in seconds, for each namespace that a pattern matches.

    Patterns are those of `fnmatch`. The rule of the exact name counts, else that of the longest
    pattern that matches.
    """

    def __init__(
        self, quotas: Mapping[str, int] = _NONE, ttls: Mapping[str, float] = _NONE
    ) -> None:
        self.has_quotas, self.has_ttls = bool(quotas), bool(ttls)
        self.least_quota_bytes = min(quotas.values(), default=None)
        self.quota_bytes: Callable[[str], int | None] = _finder(quotas)
        """Finds the quota of a namespace in bytes; None: it has none."""
        self.ttl_s: Callable[[str], float | None] = _finder(ttls)
        """Finds the age at which a namespace's entries are evicted; None: they never expire."""


def _finder(rules: Mapping[str, T]) -> Callable[[str], T | None]:
    ordered = sorted(rules, key=lambda pattern: (-len(pattern), pattern))
    patterns = [(re.compile(translate(pattern)).match, rules[pattern]) for pattern in ordered]

    @lru_cache(KNOWN)
    def find(namespace: str) -> T | None:
        if namespace in rules:
            return rules[namespace]
        return next((rule for matches, rule in patterns if matches(namespace)), None)

    return find
