"""Put the bugs in, one by one, each in a copy of the tree (`make bugs`)."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from bugs.table import BUGS, Bug
from support import processes

ROOT = Path(__file__).parents[2]
BUILT = ".venv", ".venvs", "build"
PACKAGES = ".", "client", "proto"
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "-")
"""In a network of its own: clusters of tests have fixed addresses, and two bugs run at a time."""
LIMIT_S = 900.0
"""For one bug; one that makes its test hang is found by the test's own limit."""


class Verdict(NamedTuple):
    found_by: list[str]
    """The tests that failed, or the one that put the bug in and found it."""
    said: str
    """What pytest printed."""


def copy_tree(to: Path) -> None:
    """Copy what git knows or would know, and link what is built."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = processes.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    for name in BUILT:
        (to / name).symlink_to(ROOT / name)


def put_in(bug: Bug, tree: Path) -> None:
    if bug.edit is not None:
        path = tree / bug.edit.file
        text = path.read_text()
        assert text.count(bug.edit.right) == 1, f"stale: {bug.edit}"
        path.write_text(text.replace(bug.edit.right, bug.edit.wrong))


def run(bug: Bug) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="ecd-bug-") as directory:
        tree, report = Path(directory, "tree"), Path(directory, "report.xml")
        tree.mkdir()
        copy_tree(tree)
        put_in(bug, tree)
        test = f"tests/{bug.found_by}"
        # What `make test` runs has to find an edit.
        how = ["-m", "night or not night"] if bug.edit is None else ["--exitfirst"]
        how.append("--hypothesis-profile=bugs")  # that a test fails says enough: it shrinks nothing
        with processes.child(
            [*ALONE, sys.executable, "-m", "pytest", "-q", test, *how, f"--junitxml={report}"],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / each) for each in PACKAGES)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as pytest:
            said, _ = pytest.communicate(timeout=LIMIT_S)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        wanted = {"failure"} if bug.edit is not None else set()
        found = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in cases
            if {each.tag for each in case} & {"failure", "error", "skipped"} == wanted
        ]
        return Verdict(found, said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose name or rule has this text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print what pytest printed, too")
    options = parser.parse_args()
    chosen = {
        name: bug
        for name, bug in BUGS.items()
        if options.only in f"{name} {bug.rule} {bug.found_by}"
    }
    missed = []
    with ThreadPoolExecutor(options.jobs) as side:
        for name, verdict in zip(chosen, side.map(run, chosen.values()), strict=True):
            told = ", ".join(verdict.found_by) or "NOT FOUND"
            print(f"{chosen[name].rule}: {name}: {told}", flush=True)
            if options.verbose or not verdict.found_by:
                print(verdict.said, flush=True)
            if not verdict.found_by:
                missed.append(name)
    print(f"{len(chosen)} bugs, {len(missed)} not found: {', '.join(missed) or '-'}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
