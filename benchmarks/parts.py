"""Generated parts of docs/results.md: a benchmark replaces its own part, between two marks."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = "results.md"


def write_part(docs: Path, name: str, command: str, text: str) -> Path:
    """Replace a part of the page of results; a page or a part that isn't there yet is made.

    Args:
        docs: the folder of the page.
        name: of the part, as its marks have it.
        command: what makes the part, as the page tells it.
        text: the part, in Markdown.

    Returns:
        The path of the page.
    """
    begin = f"<!-- begin {name}: made by `{command}`; changes by hand are lost -->"
    part = f"{begin}\n\n{text.strip()}\n\n<!-- end {name} -->"
    page = docs / PAGE
    old = page.read_text() if page.exists() else "# Results\n"
    marked = re.compile(rf"^<!-- begin {name}:.*?^<!-- end {name} -->$", re.MULTILINE | re.DOTALL)
    new = marked.sub(lambda _: part, old) if marked.search(old) else f"{old.rstrip()}\n\n{part}\n"
    page.write_text(new)
    return page
