"""Elements of HTML and SVG as text.

Text that isn't `Markup` is escaped, so no name in a run can become markup.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import Final

# Elements without a closing tag.
EMPTY_ELEMENTS: Final = frozenset(
    ("br", "col", "hr", "meta", "circle", "line", "path", "polygon", "rect")
)

# Characters that may not be in a page: control characters and lone surrogates.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class Markup(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


Child = Markup | str | float | None
Attributes = Mapping[str, str | float | None]


def element(
    tag: str, attributes: Attributes | None = None, *children: Child | Iterable[Child]
) -> Markup:
    """Return an element of HTML or SVG.

    Args:
        tag: Name of the element.
        attributes: Attributes by name. Those that are None are left out.
        children: Markup, text or numbers, or several of them; None is left out.
    """
    attribute_text = "".join(
        f' {name}="{_escape_value(value)}"'
        for name, value in (attributes or {}).items()
        if value is not None
    )
    content = join_markup(*children)
    return Markup(
        f"<{tag}{attribute_text}/>"
        if tag in EMPTY_ELEMENTS and not content
        else f"<{tag}{attribute_text}>{content}</{tag}>"
    )


def join_markup(*children: Child | Iterable[Child]) -> Markup:
    """Concatenate children to markup."""
    return Markup("".join(map(_render_child, children)))


def _render_child(child: Child | Iterable[Child]) -> str:
    """Convert a child to HTML."""
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str | int | float):
        return _escape_value(child)
    return join_markup(*child)


def _escape_value(value: str | float) -> str:
    """Escape a value. Floats are written with six digits."""
    return html.escape(
        _FORBIDDEN.sub("�", f"{value:.6g}" if isinstance(value, float) else str(value))
    )
