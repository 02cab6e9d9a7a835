"""Writes generated parts of docs/results.md. Each benchmark replaces its own part."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = "results.md"


def write_part(docs: Path, name: str, command: str, text: str) -> Path:
    """Replace a part of the page of results. A missing page or part is made.

    Args:
        docs: Folder of the page.
        name: Name of the part in its marks.
        command: Command that makes the part, which the page shows.
        text: The part, in Markdown.

    Returns:
        The path of the page.
    """
    begin = f"<!-- begin {name}: made by `{command}`; changes by hand are lost -->"
    part = f"{begin}\n\n{text.strip()}\n\n<!-- end {name} -->"
    page = docs / PAGE
    old_text = page.read_text() if page.exists() else "# Results\n"
    marked_part = re.compile(
        rf"^<!-- begin {name}:.*?^<!-- end {name} -->$", re.MULTILINE | re.DOTALL
    )
    # A function as replacement, because backslashes in `part` would be read as escapes.
    new_text = (
        marked_part.sub(lambda _: part, old_text)
        if marked_part.search(old_text)
        else f"{old_text.rstrip()}\n\n{part}\n"
    )
    page.write_text(new_text)
    return page
