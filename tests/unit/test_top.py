"""`ecd-cli top` and `status` for people: what fits a terminal, and words instead of identifiers."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from ecd_client.cli import render
from ecd_client.cli.top import FEW, Top
from ecd_proto.contract import duration_text
from ecd_proto.v1 import cache_pb2 as pb

QWEN = "Qwen/Qwen2.5-VL-7B-Instruct|revision 957d|bfloat16|weights 1a2b"
POOL = pb.PoolStatus(
    kind="host", pool_bytes=1 << 40, used_bytes=1 << 39, leased_bytes=1023 << 20, worth_s=3600.0
)
COUNTED = pb.Counters(refused={"entry_too_large": 1, "quota_full": 2, "leases": 0})
SERVING = pb.StatusReply.STATE_SERVING
STATUS = pb.StatusReply(
    name="default", state=SERVING, version="ecd 0.1.0", pools=[POOL], counters=COUNTED
)
REPLIES = {"Status": STATUS, "Peers": pb.PeersReply()}


class Clock:
    at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ecd_client.cli.top.clock", clock)
    return clock


def listed(count: int) -> Iterator[pb.EntryInfo]:
    for number in range(count):
        key = pb.Key(namespace=QWEN, mm_hash=f"{number:064}")
        content = pb.Content(nbytes=1023 << 20)
        yield pb.EntryInfo(key=key, content=content, hits=99_999, idle_s=1.5, age_s=2.5)


def top(count: int) -> Top:
    return Top(lambda method, _: REPLIES[method], lambda: listed(count), rows=3)


def lines(width: int, shown: object) -> list[str]:
    out = Console(file=StringIO(), width=width, highlight=False)
    out.print(shown)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


def test_top_fits_80_columns(clock: Clock) -> None:
    watched = top(3)
    watched.sample()
    clock.at_s += 1.0
    frame = watched.frame(80)
    narrow, wide = (lines(width, frame) for width in (80, 300))
    head = narrow.index("")
    assert narrow[:head] == wide[:head], "no line is wrapped"
    assert all("\u2026" not in line for line in narrow), "and none is cut"
    [row, *_] = [line for line in narrow if line.startswith("000000000..000000000")]
    assert "Qwen/Qwen2.5-VL-7B-Inst..1a2b" in row


def test_top_in_a_pipe_is_plain_and_shows_one_list_below_the_other(clock: Clock) -> None:
    watched = top(3)
    watched.sample()
    clock.at_s += 1.0
    shown = lines(400, watched.frame(None))
    assert "512 GiB of 1 TiB (50%)" in shown[1]
    assert all(text.isascii() for text in shown), "no bars"
    assert [text for text in shown if text in ("hottest", "biggest")] == ["hottest", "biggest"]
    assert max(map(len, shown)) <= 100, "no list beside another"
    assert shown[shown.index("biggest") - 1] == ""


def test_top_shows_times_of_now_from_a_list_of_before(clock: Clock) -> None:
    watched = top(FEW + 1)
    assert watched.as_json()["hottest"][0]["idle_s"] == 1.5
    clock.at_s += 3.0
    [found, *_] = watched.as_json()["hottest"]
    assert (found["idle_s"], found["age_s"]) == (4.5, 5.5)


def test_status_says_in_words_what_was_refused_and_that_nobody_has_looked() -> None:
    out = Console(file=StringIO(), width=300)
    render.status(out, STATUS, "unix:///s")
    said = out.file.getvalue()
    assert "1 put larger than the pool; 2 puts above its namespace's quota" in said
    assert "entry_too_large" not in said
    assert "no lookups yet" in said


def test_peers_says_in_words_how_fetches_ended() -> None:
    out = Console(file=StringIO(), width=300)
    render.peers(out, pb.PeersReply(node="a:1", fetches={"read_from_disk": 2, "fetched": 1}))
    assert "1 fetched, 2 read from disk; 0 under way" in out.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0 s"), (1.54, "1.5 s"), (59.94, "59.9 s"), (59.98, "1 min")),
        *((3599.9, "1 h"), (5400, "1.5 h"), (86399, "1 d")),
    ],
)
def test_a_time_never_rounds_to_60_of_its_unit(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
