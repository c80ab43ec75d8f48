"""A real browser without a screen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's chromium; an event loop runs in this thread meanwhile."""
    program = shutil.which("chromium")
    assert program, "chromium is missing: run make test-system"
    with sync_playwright() as playwright:
        # Its sandbox needs what neither root nor a container has.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
