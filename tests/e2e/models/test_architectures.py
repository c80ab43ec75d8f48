"""Every architecture that vLLM builds on a CPU: consumers answer as an engine without ecd does.

Each test is one architecture of the table. An engine without a connector, a producer, a consumer
and one that is both answer the same rows. Right are the plain engine's tokens and log-probabilities
without a forward of the encoder, by the media and, where the producer's answer has it, by metadata.
Rows with videos or sounds are also asked in chats, at vLLM's server with ecd's middleware.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import NEXT, VERSIONS, require, result_of
from e2e.models import families  # noqa: F401, as it fills the table
from e2e.models.table import ARCHITECTURES, CHAT, CHAT_AGAIN, MEDIA, QUICK, ROWS, Architecture
from support.daemon import Daemon

pytestmark = pytest.mark.timeout(600)

DEPENDS = 0.01
"""By how much they differ at least where media do."""
OF_NEXT = "qwen2_5_vl", "qwen3_vl", "gemma3", "qwen2_audio", "voxtral", "colqwen3"
"""Those that the vLLM without a build for CPUs is asked, too."""
IN_CHATS = "qwen3_vl"
"""The one that `make test` asks in chats, too: videos by outlines, pictures by metadata."""
TRIED = [
    *(
        pytest.param(VERSIONS[0], each, QUICK, each.name == IN_CHATS, id=each.name)
        for each in ARCHITECTURES.values()
        if each.quick
    ),
    *(
        pytest.param(
            version, each, tuple(ROWS), True, id=f"{each.name}-{told}", marks=pytest.mark.night
        )
        for version, told, names in ((VERSIONS[0], "all", ARCHITECTURES), (NEXT, NEXT, OF_NEXT))
        for each in map(ARCHITECTURES.__getitem__, names)
    ),
]


@pytest.mark.parametrize(
    ("version", "tried", "rows", "in_chats"), TRIED, indirect=["version"], scope="session"
)
def test_an_architecture(
    version: str,
    unused_daemon: Daemon,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    tried: Architecture,
    rows: tuple[str, ...],
    in_chats: bool,
) -> None:
    if tried.needs_more:
        require("models")
    where = str(tmp_path / tried.name), unused_daemon.address
    how = "chats" if in_chats else "none"
    found = result_of(version, "models/matrix.py", tried.name, *where, how, *rows)
    plain = found.pop("plain")
    if tried.fails:
        assert tried.fails[0] in plain.get("ended", ""), f"vLLM can build it now: {plain}"
        return
    assert "ended" not in plain, plain["ended"]
    failed = {row: answer["error"] for row, answer in plain.items() if "error" in answer}
    assert failed.keys() == tried.without.keys() & plain.keys(), failed
    assert all(tried.without[row] in error for row, error in failed.items()), failed
    for way in ("", f", {CHAT}"):
        assert_media_matter({row: plain[row + way] for row in rows if row + way in plain})

    ended = {role: answers.pop("ended") for role, answers in found.items() if "ended" in answers}
    wrong = {
        f"{role}, {row}": how
        for role, answers in found.items()
        for row, answer in answers.items()
        if (how := fault(role, row, answer, plain, tried))
    }
    consumed = found["ec_consumer"]
    record_property("architectures", 1)
    record_property("rows", sum(map(len, found.values())))
    record_property("forwards at consumers", sum(a["forwards"] for a in consumed.values()))
    record_property("wrong answers", len(wrong))
    record_property("engines ended", len(ended))
    assert not ended, "\n".join(f"{role}: {how}" for role, how in ended.items())
    assert not wrong, wrong
    assert any(answer["forwards"] for answer in found["encoder"].values())
    first = [answer for row, answer in found["ec_both"].items() if row.endswith(f", {CHAT}")]
    assert any(answer["forwards"] for answer in first) or not first
    for way, answers in ("metadata", consumed), ("outline", found["ec_both"]):
        told = {row.partition(f", by {way}")[0] for row in answers if row.endswith(f", by {way}")}
        kinds = {MEDIA[item][0] for row in told for item in ROWS[row].split()}
        declared = set(getattr(tried, f"by_{way}").split())
        assert kinds == declared or (rows == QUICK and kinds < declared), f"by {way}: {kinds}"


def fault(
    role: str, row: str, answer: dict[str, Any], plain: dict[str, Any], tried: Architecture
) -> str:
    """What is wrong with an answer, or nothing."""
    if row.startswith("unknown: "):
        failed = answer.get("reason") == "error" or "error" in answer
        return "" if failed and not answer["forwards"] else f"an unknown name: {answer}"
    name, _, way = row.partition(", ")
    in_chat = way in (CHAT, CHAT_AGAIN)
    right = plain[f"{name}, {CHAT}" if in_chat else name]
    if "error" in right:
        return ""
    if "error" in answer or answer.get("reason") == "error":
        return answer.get("error", "the request failed")
    if role == "encoder":
        return ""
    if not far(answer, right) <= tried.tolerance:
        return f"{answer['tokens']} for {right['tokens']}, {far(answer, right):.4f} off"
    must_load = role == "ec_consumer" or way in ("repeated", "by outline", CHAT_AGAIN)
    if must_load and answer["forwards"]:
        return f"{answer['forwards']} forwards"
    if way == CHAT_AGAIN:
        items = ROWS[name].split()
        brings = [0 if tried.leaves_out(items) else len(items)]
        if answer["brought"] != brings:
            return f"vLLM got {answer['brought']} media, not {brings}"
    may_process = in_chat and any(answer["brought"])
    if answer.get("processed") and not may_process:
        return f"{answer['processed']} calls of the processor"
    return ""


def far(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far the log-probabilities of two answers are from each other."""
    ours, theirs = one["values"], other["values"]
    if one["tokens"] != other["tokens"] or len(ours) != len(theirs):
        return float("inf")
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def assert_media_matter(plain: dict[str, Any]) -> None:
    """Other media, or another order, give another answer; else equal ones would prove nothing."""

    def content(items: list[str]) -> list[str]:
        return ["2" if item in "18" else item for item in items]

    def kinds(items: list[str]) -> list[str]:
        return [MEDIA[item][0] for item in items]

    rows = {row: ROWS[row].split() for row, answer in plain.items() if "values" in answer}
    alike = [
        f"{one}, {other}"
        for one, items in rows.items()
        for other, others in rows.items()
        if kinds(items) == kinds(others) and content(items) < content(others)
        if not far(plain[one], plain[other]) >= DEPENDS
    ]
    assert not alike, alike
