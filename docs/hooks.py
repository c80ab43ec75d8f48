"""Hooks of MkDocs: the version in every page's footer, and the order of what a search finds."""

from importlib.metadata import version

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

FOR_DEVELOPERS = {"Design", "Develop"}
"""Sections of the navigation that a search finds last."""
BOOST = 1e-3
"""What a page of theirs weighs: a word in its title as much as one in the text of another page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.copyright = f"ecd {version('encoder-cache-daemon')}"
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if FOR_DEVELOPERS.intersection(section.title for section in page.ancestors):
        page.meta["search"] = {"boost": BOOST}
    return markdown
