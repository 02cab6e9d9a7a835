"""Tables of a page: what is seen in drawings, in numbers, for who can't see them, or wants to
copy them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.observe.page.markup import Child, Markup, element


def table(head: Sequence[Child], rows: Iterable[Sequence[Child]], caption: str = "") -> Markup:
    """Write a table, which scrolls by itself where it is wider than the screen.

    The first cell of each row names it.
    """
    titles = element("tr", None, (element("th", {"scope": "col"}, cell) for cell in head))
    body = (
        element(
            "tr",
            None,
            element("th", {"scope": "row"}, row[0]),
            (element("td", None, cell) for cell in row[1:]),
        )
        for row in rows
    )
    named = element("caption", None, caption) if caption else None
    made = element(
        "table", None, named, element("thead", None, titles), element("tbody", None, body)
    )
    return element(
        "div",
        {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": caption or "table"},
        made,
    )


def folded(title: str, content: Child) -> Markup:
    """Put something away under a title that opens it."""
    return element("details", None, element("summary", None, title), content)
