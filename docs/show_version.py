"""A hook of MkDocs: every page's footer shows the version of ecd that it describes."""

from importlib.metadata import version

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.copyright = f"ecd {version('encoder-cache-daemon')}"
    return config
