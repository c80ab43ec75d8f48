"""The list of bugs put in by hand is true to the code: `make bugs` runs them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bugs.table import BUGS, Bug, Edit

ROOT = Path(__file__).parents[2]
PAGES = "reading-without-a-call", "gpu", "nodes", "eviction"
EDITED = {name: bug.edit for name, bug in BUGS.items() if bug.edit is not None}


@pytest.mark.parametrize("edit", EDITED.values(), ids=EDITED)
def test_an_edit_changes_one_place_and_leaves_python(edit: Edit) -> None:
    text = (ROOT / edit.file).read_text()
    assert text.count(edit.right) == 1
    changed = text.replace(edit.right, edit.wrong)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_test_that_finds_it_is_there(bug: Bug) -> None:
    file, _, function = bug.found_by.partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert f"def {function.partition('[')[0]}(" in text or not function


def test_every_page_of_rules_has_bugs() -> None:
    rules = [bug.rule for bug in BUGS.values()]
    assert all(rules.count(page) >= 3 for page in PAGES)
    assert len(BUGS) >= 60
