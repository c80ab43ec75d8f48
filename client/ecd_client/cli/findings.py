"""The result of a check of `ecd-cli doctor`, and the states that it can have."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, DOUBTFUL, BAD = "ok", "look", "fix"


@dataclass(frozen=True)
class Finding:
    """The result of one check, and advice about it unless it is GOOD."""

    check: str
    state: str
    found: str
    advice: str = ""
