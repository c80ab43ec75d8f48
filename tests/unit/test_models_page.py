"""docs/models.md is what the table of the matrix says."""

from __future__ import annotations

from e2e.models.page import PAGE, page


def test_the_page_of_models_is_up_to_date() -> None:
    written = PAGE.read_text()
    assert written == page(), "write it anew: cd tests; ../.venv/bin/python -m e2e.models.page"
