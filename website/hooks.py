"""What mkdocs calls while it builds: for pages that nobody writes, links that lead out of docs/,
and pictures with a page's colours.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from website import examples, links
from website.sources import ROOT, homes, made, source

WHERE_EXAMPLES_GO = "EXAMPLES"  # in the navigation of mkdocs.yml
LOG = logging.getLogger("mkdocs.hooks.paceline")  # warnings below mkdocs stop a strict build


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put all examples into the navigation."""
    config.nav = [_filled(entry) for entry in config.nav or []]
    return config


def _filled(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {
            title: list(examples.pages(ROOT / "examples")) if below == WHERE_EXAMPLES_GO else below
            for title, below in entry.items()
        }
    return entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for name, text in made().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between files of the repository lead to their pages on the site."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # it is the only one of its section
    text, lost = links.moved(markdown, source=source(here), here=here, homes=homes())
    for link in lost:
        LOG.warning("%s leads to %s, which is no page of the site", here, link)
    return text


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawn pictures into the page itself, where they take its colours."""

    def inline(found: re.Match[str]) -> str:
        path = ROOT / "docs" / "pictures" / found["name"]
        return f'<figure role="img" aria-label="{found["alt"]}">{path.read_text()}</figure>'

    return re.sub(
        r'<img alt="(?P<alt>[^"]*)" src="[^"]*pictures/(?P<name>[\w-]+\.svg)" ?/?>', inline, html
    )


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of what pages load from elsewhere: the site has to work without a network."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        for what in links.foreign(path.read_text()) if path.suffix in (".html", ".css") else ():
            LOG.warning(
                "%s loads something from elsewhere: %s", path.relative_to(config.site_dir), what
            )
