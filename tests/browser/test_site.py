"""Every page of the documentation in a real browser, wide and narrow."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from support.browser import serving
from support.processes import run

ROOT = Path(__file__).parents[2]
LITERAL = re.compile(r"\*\*|`|\]\(|\| ?--- ?\||^#+ |<!--", re.M)
INCLUDE = re.compile("--8 ?<")
"""Markup that the reader should not see in prose, and nowhere."""

LOOK = """() => {
  const main = document.querySelector('main article');
  const prose = main.cloneNode(true);
  prose.querySelectorAll('code, pre').forEach(e => e.remove());
  const hidden = e => ['hidden', 'clip'].includes(getComputedStyle(e).overflowX);
  const right = main.parentElement.getBoundingClientRect().right + 1;
  const scrolls = e => {
    for (; e !== main; e = e.parentElement)
      if (['auto', 'scroll'].includes(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  const all = [...main.querySelectorAll('*')];
  const narrow = e => {
    const text = document.createRange();
    text.selectNodeContents(e);
    return text.getBoundingClientRect().height > 2.5 * e.clientWidth;
  };
  return {
    title: document.title,
    page: document.scrollingElement.scrollWidth,
    cut: all.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth && hidden(e))
      .map(e => e.outerHTML.slice(0, 99)),
    outside: all.filter(e => e.getBoundingClientRect().right > right && !scrolls(e))
      .map(e => e.outerHTML.slice(0, 99)),
    cells: [...main.querySelectorAll('td')].filter(narrow).map(e => e.outerHTML.slice(0, 99)),
    prose: prose.innerText,
    text: main.innerText,
    tables: [...main.querySelectorAll('table')].filter(e => e.scrollWidth > e.clientWidth + 1)
      .map(e => e.innerText.slice(0, 99)),
    headings: main.querySelectorAll('h1').length,
    ids: [...document.querySelectorAll('[id]')].map(e => e.id),
    links: [...document.querySelectorAll('a[href]')].map(e => e.href),
    pictures: [...document.images].map(e => [e.src, e.naturalWidth, e.width, e.alt]),
  };
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(built)]
    done = run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with serving(site) as served:
        yield served


@pytest.fixture(scope="module")
def seen(site: Path, address: str, browser: Browser) -> dict[int, dict[Path, dict]]:
    """What every page looks like by the window's width. `requests` left the site or failed."""
    found: dict[int, dict[Path, dict]] = {1280: {}, 400: {}}
    strangers: list[str] = []
    page = browser.new_page()
    # Each page would index all of them for its search, which is a fourth of its load.
    empty = {**json.loads((site / "search/search_index.json").read_text()), "docs": []}
    page.route("**/search_index.json", lambda route: route.fulfill(json=empty))
    page.on("request", lambda r: r.url.startswith(address) or strangers.append(r.url))
    page.on("response", lambda r: r.status < 400 or strangers.append(r.url))
    page.on("pageerror", lambda error: strangers.append(str(error)))
    for file in sorted(site.rglob("index.html")):
        strangers.clear()
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(f"{address}/{file.parent.relative_to(site)}/")
        for width, pages in found.items():
            page.set_viewport_size({"width": width, "height": 900})
            pages[file] = {**page.evaluate(LOOK), "requests": list(strangers)}
    page.close()
    return found


def faults(seen: dict[int, dict[Path, dict]], key: str) -> dict[str, object]:
    """Where something of this kind was found."""
    return {
        f"{file.parent.name} at {width}": look[key]
        for width, pages in seen.items()
        for file, look in pages.items()
        if look[key]
    }


def test_every_page_of_the_navigation_is_looked_at(seen: dict[int, dict[Path, dict]]) -> None:
    pages = {p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")}
    assert len(seen[400]) == len(seen[1280]) == len(pages)


@pytest.mark.parametrize("kind", ["cut", "outside", "cells", "requests"])
def test_nothing_is_cut_off_and_nothing_comes_from_elsewhere(
    seen: dict[int, dict[Path, dict]], kind: str
) -> None:
    assert not faults(seen, kind)


def test_every_table_fits_a_wide_window(seen: dict[int, dict[Path, dict]]) -> None:
    assert not faults({1280: seen[1280]}, "tables")


def test_no_page_scrolls_sideways(seen: dict[int, dict[Path, dict]]) -> None:
    wide = {(w, f): look["page"] for w, pages in seen.items() for f, look in pages.items()}
    assert not {at: page for at, page in wide.items() if page > at[0]}


def test_no_markup_is_left_for_the_reader(seen: dict[int, dict[Path, dict]]) -> None:
    left = {
        file.parent.name: LITERAL.findall(look["prose"]) + INCLUDE.findall(look["text"])
        for file, look in seen[1280].items()
    }
    assert not {name: found for name, found in left.items() if found}


def test_each_page_has_one_heading_and_a_title_of_its_own(
    seen: dict[int, dict[Path, dict]],
) -> None:
    assert {look["headings"] for look in seen[1280].values()} == {1}
    titles = [look["title"] for look in seen[1280].values()]
    assert len(set(titles)) == len(titles)


def test_every_link_leads_somewhere(
    site: Path, address: str, seen: dict[int, dict[Path, dict]]
) -> None:
    ids = {file: set(look["ids"]) for file, look in seen[1280].items()}
    dead = []
    for file, look in seen[1280].items():
        for link in look["links"]:
            if not link.startswith(address):
                continue
            target = site / unquote(urlsplit(link).path).lstrip("/")
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(urlsplit(link).fragment)
            if not target.is_file() or (anchor and anchor not in ids.get(target, {anchor})):
                dead.append((str(file.relative_to(site)), link))
    assert not dead


def test_every_picture_is_there_and_large_enough_to_read(seen: dict[int, dict[Path, dict]]) -> None:
    found = [p for pages in seen.values() for look in pages.values() for p in look["pictures"]]
    assert len(found) > 20
    assert not [src for src, loaded, width, alt in found if not loaded or width < 600 or not alt]


@pytest.mark.parametrize("width", [1280, 400])
def test_search_is_in_view_and_finds_a_page(
    address: str, open_page: Callable[..., Page], width: int
) -> None:
    page = open_page(f"{address}/operations/#restart-and-upgrade", width)
    field = page.locator("input.md-search__input")
    button = field if width > 1000 else page.locator("header label.md-header__button[for=__search]")
    expect(button).to_be_in_viewport(ratio=1)
    button.click()
    field.press_sequentially("glossary")  # the site looks at it with each key that is let go
    expect(page.locator(".md-search-result__item").first).to_contain_text("Glossary")


def test_search_finds_pages_for_developers_last(site: Path) -> None:
    boosts: dict[str, set[float]] = {}
    for each in json.loads((site / "search/search_index.json").read_text())["docs"]:
        boosts.setdefault(each["location"].partition("/")[0], set()).add(each.get("boost", 1))
    last = {name for name, found in boosts.items() if max(found) < 1}
    _, _, developers = (ROOT / "mkdocs.yml").read_text().partition("  - Design:\n")
    assert last == set(re.findall(r": ([a-z-]+)\.md\n", developers))
    assert all(len(found) == 1 for found in boosts.values())


def test_code_can_be_copied(address: str, open_page: Callable[..., Page]) -> None:
    page = open_page(address)
    code = page.locator("main pre").first
    code.hover()
    expect(code.locator("button")).to_be_visible()
    assert code.locator("span[class]").count(), "it is not coloured"


def test_the_footer_shows_the_version(address: str, open_page: Callable[..., Page]) -> None:
    expect(open_page(address).locator("footer")).to_contain_text(version("encoder-cache-daemon"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_are_the_systems_until_chosen(
    address: str, open_page: Callable[..., Page], scheme: str
) -> None:
    page = open_page(address, color_scheme=scheme)
    colours = {"light": "default", "dark": "slate"}
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", colours[scheme])
    for chosen in ("light", "dark"):
        page.locator("header form label:visible").first.click()
        expect(page.locator("body")).to_have_attribute("data-md-color-scheme", colours[chosen])
