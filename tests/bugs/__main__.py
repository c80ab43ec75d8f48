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

from bugs.table import BUGS, Bug, Edit
from support import processes

ROOT = Path(__file__).parents[2]
BUILT = ".venv", ".venvs", "build"
PACKAGES = ".", "client", "proto"
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "-")
"""In a network of its own: clusters of tests have fixed addresses, and two bugs run at a time."""
LIMIT_S = 900.0
"""For one bug; one that makes its test hang is found by the test's own limit."""


class Verdict(NamedTuple):
    passed: list[str]
    failed: list[str]
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


def put_in(edit: Edit, tree: Path) -> None:
    path = tree / edit.file
    text = path.read_text()
    assert text.count(edit.right) == 1, f"stale: {edit}"
    path.write_text(text.replace(edit.right, edit.wrong))


def run(test: str, edit: Edit | None, *how: str) -> Verdict:
    """Run a test of a copy of the tree, in which the edit is made."""
    with tempfile.TemporaryDirectory(prefix="ecd-bug-") as directory:
        tree, report = Path(directory, "tree"), Path(directory, "report.xml")
        tree.mkdir()
        copy_tree(tree)
        if edit is not None:
            put_in(edit, tree)
        how += ("--hypothesis-profile=bugs",)  # that a test fails says enough: it shrinks nothing
        with processes.child(
            [
                *ALONE,
                sys.executable,
                "-m",
                "pytest",
                "-q",
                f"tests/{test}",
                *how,
                f"--junitxml={report}",
            ],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / each) for each in PACKAGES)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as pytest:
            said, _ = pytest.communicate(timeout=LIMIT_S)
        passed, failed = [], []
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            ended = {each.tag for each in case} & {"failure", "error", "skipped"}
            name = f"{case.get('classname')}::{case.get('name')}"
            if not ended:
                passed.append(name)
            elif ended == {"failure"}:
                failed.append(name)
        return Verdict(passed, failed, said)


def find(bug: Bug) -> tuple[list[str], str]:
    """The tests that fail by the bug, or the one that has put it in, and what they said."""
    if bug.edit is None:
        found = run(bug.found_by, None, "-m", "night or not night")
        return found.passed, found.said
    found = run(bug.found_by, bug.edit, "--exitfirst")  # by what `make test` runs
    return found.failed, found.said


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
        for name, (found_by, said) in zip(chosen, side.map(find, chosen.values()), strict=True):
            print(f"{chosen[name].rule}: {name}: {', '.join(found_by) or 'NOT FOUND'}", flush=True)
            if options.verbose or not found_by:
                print(said, flush=True)
            if not found_by:
                missed.append(name)
        tests = sorted({bug.found_by for bug in chosen.values() if bug.edit is not None})
        for test, control in zip(tests, side.map(lambda test: run(test, None), tests), strict=True):
            if control.failed or not control.passed:
                print(f"{test} FAILS WITHOUT A BUG\n{control.said}", flush=True)
                missed.append(test)
    print(f"{len(chosen)} bugs, {len(missed)} not found: {', '.join(missed) or '-'}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
