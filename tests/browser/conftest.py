"""A real browser without a screen, for the site and for the daemon's status page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from support.browser import chromium
from support.waiting import HANG_S

expect.set_options(timeout=HANG_S * 1e3)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for one file, as its event loop would be in the way of others."""
    with chromium() as browser:
        yield browser


def is_fault(said: ConsoleMessage) -> bool:
    """Whether it is an error, and not that the daemon's loop took over a second to answer."""
    return said.type == "error" and "status of 503" not in said.text


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page of this width; what it says on its console as errors fails the test."""
    errors: list[str] = []
    pages: list[Page] = []

    def open(url: str, width: int = 1280, **options: object) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        pages.append(page)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: is_fault(said) and errors.append(said.text))
        page.goto(url)
        return page

    yield open
    for page in pages:
        page.close()
    assert not errors, errors
