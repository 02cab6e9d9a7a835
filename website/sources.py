"""Which files of the repository become which pages of the site, besides docs/."""

from __future__ import annotations

from pathlib import Path

from website import commands, examples, names

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "running-benchmarks.md",
}
# what a page of the repository is on the site, where it isn't itself
HOMES = {"README.md": "index.md"}


def made() -> dict[str, str]:
    """Return the pages that nobody writes: their names on the site, and their text."""
    pages = {site: (ROOT / path).read_text() for path, site in OUTSIDE.items()}
    return {
        **pages,
        **names.pages(),
        commands.NAME: commands.page(),
        **examples.pages(ROOT / "examples"),
    }


def homes() -> dict[str, str]:
    """Return the name on the site of each file of the repository that pages outside of docs/ are
    made of.
    """
    return {**OUTSIDE, **HOMES, **examples.homes(ROOT / "examples")}


def source(site: str) -> str:
    """Return the file of the repository that a page of the site is made of."""
    return next(
        (path for path, page in homes().items() if page == site and path not in HOMES),
        f"docs/{site}",
    )
