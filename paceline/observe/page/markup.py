"""Elements of HTML and SVG, as text.

What isn't markup already is escaped, so nothing that a run has named can become markup.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import Final

# elements without an end
EMPTY: Final = frozenset(("br", "col", "hr", "meta", "circle", "line", "path", "polygon", "rect"))

_BARE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")  # what no page may contain


class Markup(str):
    """Text that is HTML, and isn't escaped again."""

    __slots__ = ()


Child = Markup | str | float | None
Attributes = Mapping[str, str | float | None]


def element(
    tag: str, attributes: Attributes | None = None, *children: Child | Iterable[Child]
) -> Markup:
    """Return an element with these children, in order: markup, and text or numbers; None is left
    out, as are attributes of None.
    """
    given = "".join(
        f' {name}="{_escaped(value)}"'
        for name, value in (attributes or {}).items()
        if value is not None
    )
    inside = join(*children)
    return Markup(
        f"<{tag}{given}/>" if tag in EMPTY and not inside else f"<{tag}{given}>{inside}</{tag}>"
    )


def join(*children: Child | Iterable[Child]) -> Markup:
    """Return children one after the other."""
    return Markup("".join(map(_written, children)))


def _written(child: Child | Iterable[Child]) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str | int | float):
        return _escaped(child)
    return join(*child)


def _escaped(value: str | float) -> str:
    return html.escape(_BARE.sub("�", f"{value:.6g}" if isinstance(value, float) else str(value)))
