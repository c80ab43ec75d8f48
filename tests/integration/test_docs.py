"""The site builds, and the commands it shows do what it says."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from ecd_client import Client
from support.daemon import Daemon
from support.pages import DOCS, PAGES, ROOT, blocks
from support.processes import run

BIN = Path(sys.executable).parent


def commands(program: str) -> list[str]:
    shown = {
        line.partition("#")[0].strip()
        for page in PAGES
        for block in blocks(page)
        for line in block.splitlines()
        if line.startswith(f"{program} ")
    }
    return sorted(shown)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = run(
        [BIN / "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # the theme's notice of its successor
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    for page in ("index", "configuration/index", "metrics/index", "operations/index"):
        built_page = (tmp_path / f"{page}.html").read_text()
        assert re.search(r'href="[./]*site.css"', built_page), "tables wider than the page are cut"
        assert "--8<" not in built_page, "an example is not included"


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


@pytest.mark.parametrize("command", commands("ecd-cli"))
def test_what_the_pages_ask_of_the_cli_works(daemon: Daemon, command: str) -> None:
    with Client(daemon.address) as client:
        client.put("k", torch.ones(3))
        _, *arguments = shlex.split(command)
        done = run(
            [BIN / "ecd-cli", *arguments],
            env={**os.environ, "ECD_ADDRESS": daemon.address},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_make_target_that_is_shown_is_one() -> None:
    for command in commands("make"):
        asked = run(["make", "-n", command.split()[1]], cwd=ROOT, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr


INSTALL = """
set -e
mount --make-rprivate /
mkdir -p "$PLACE/layers"
mount -t tmpfs none "$PLACE/layers"
for directory in /etc /usr/lib; do
  layer="$PLACE/layers$directory"
  mkdir -p "$layer/upper" "$layer/work"
  options="lowerdir=$directory,upperdir=$layer/upper,workdir=$layer/work"
  mount -t overlay -o "$options" none "$directory"
done
mount -t tmpfs -o mode=1777 none /dev/shm
systemctl() { echo "systemctl $*"; }
%s
id ecd
cd /etc
stat -c '%%n %%U %%G %%a' ecd ecd/ecd.env ecd/ecd.toml systemd/system/ecd.service
"""


def test_the_unit_is_installed_as_the_page_says(tmp_path: Path) -> None:
    [block] = [b for b in blocks(DOCS / "systemd.md") if "systemd-sysusers" in b]
    done = run(
        ["unshare", "--mount", "sh", "-c", INSTALL % block],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PLACE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "systemctl enable --now ecd" in lines
    assert "ecd root ecd 750" in lines
    assert "ecd/ecd.env root root 600" in lines
    assert "ecd/ecd.toml root ecd 640" in lines
    assert "systemd/system/ecd.service root root 644" in lines
