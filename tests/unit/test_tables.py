"""Tables of the command lines: unframed, whole in a pipe, and readable on a terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ecd.commands import app
from ecd.settings.config import Config
from ecd_client.cli import render
from ecd_client.cli.bench import Measured
from ecd_proto.v1 import cache_pb2 as pb

ERROR = "10.0.0.2:9465 refuses this node: the clock differs by 600 s; at most 300 s is accepted"
PEER = pb.PeerStatus(node="10.0.0.2:9465", state="unreachable", incarnation="9" * 32)
FAILED = pb.PeerStatus(node="10.0.0.3:9465", state="unreachable", last_error=ERROR)
PEERS = pb.PeersReply(node="10.0.0.1:9465", peers=[PEER, FAILED])


def lines(columns: int, is_terminal: bool, show: object, *shown: object) -> list[str]:
    out = Console(file=StringIO(), width=columns, force_terminal=is_terminal, color_system=None)
    show(out, *shown)
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("show", "shown"),
    [
        (render.peers, PEERS),
        (render.measured, [Measured("64 KiB", 1 << 16, 1.0, 2.0, 3.0, 4.0, 5.0)]),
    ],
)
def test_tables_have_no_frames_and_no_blanks_at_their_ends(show: object, shown: object) -> None:
    for is_terminal in (False, True):
        found = lines(100, is_terminal, show, shown)
        assert all(line.isascii() for line in found), "no frames"
    assert [line.rstrip() for line in found] == lines(100, False, show, shown)


def test_an_error_of_a_peer_does_not_widen_the_table() -> None:
    found = lines(100, True, render.peers, PEERS)
    assert max(map(len, found[:-1])) <= 100
    [row] = [line for line in found if line.startswith("10.0.0.3:9465 ")]
    assert row.split() == ["10.0.0.3:9465", "unreachable", "0", "0", "bytes", "0"]
    assert found[-1] == f"10.0.0.3:9465: {ERROR}"


def test_ecd_config_has_a_line_for_each_setting() -> None:
    done = CliRunner().invoke(app, ["config"], env={"COLUMNS": "80"})
    head, *rows = done.output.splitlines()
    assert head.split() == ["setting", "value", "from"]
    assert [row.split()[0] for row in rows] == list(Config.model_fields)
    meaning = Config.model_fields["shm_dir"].description
    assert meaning not in done.output
    assert meaning in CliRunner().invoke(app, ["config", "--verbose"]).output
