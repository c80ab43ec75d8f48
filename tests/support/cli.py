"""`ecd-cli` without a process of its own, which would take most of a test's time to import it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import patch

from ecd_client.cli.context import out
from ecd_client.cli.main import main
from support.daemon import Daemon

PROGRAM = sys.executable, "-m", "ecd_client.cli.main"
"""The command of a process."""


def cli(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command prints into pipes, and the code with which it exits."""
    command = ["ecd-cli", "--address", daemon.address, *arguments]
    out.width = 400  # as for a pipe, wherever pytest prints
    with (
        patch.object(sys, "argv", command),
        redirect_stdout(StringIO()) as printed,
        redirect_stderr(StringIO()) as complained,
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(
        command, code or 0, printed.getvalue(), complained.getvalue()
    )


def as_json(daemon: Daemon, *arguments: str) -> Any:
    """The document that the command prints."""
    done = cli(daemon, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
