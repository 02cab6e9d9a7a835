"""Tables of a page: the numbers of its drawings, to read aloud or to copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.observe.page.markup import Child, Markup, element


def make_table(head: Sequence[Child], rows: Iterable[Sequence[Child]], caption: str = "") -> Markup:
    """Return a table, which scrolls if it is wider than the screen.

    Args:
        head: Titles of the columns.
        rows: Cells of each row. The first cell names the row.
        caption: Title of the table.
    """
    head_row = element("tr", None, (element("th", {"scope": "col"}, cell) for cell in head))
    body = (
        element(
            "tr",
            None,
            element("th", {"scope": "row"}, row[0]),
            (element("td", None, cell) for cell in row[1:]),
        )
        for row in rows
    )
    title = element("caption", None, caption) if caption else None
    whole_table = element(
        "table", None, title, element("thead", None, head_row), element("tbody", None, body)
    )
    return element(
        "div",
        {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": caption or "table"},
        whole_table,
    )


def fold_content(title: str, content: Child) -> Markup:
    """Put content under a title that opens and closes it."""
    return element("details", None, element("summary", None, title), content)
