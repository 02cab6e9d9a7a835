"""Elements of HTML and SVG. Whatever text they are given is escaped when they are written, so nothing in a run can become markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Child = Element | str | float | None
Attributes = Mapping[str, "str | float | None"]

_BARE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")  # what no page may contain


def element(tag: str, attributes: Attributes | None = None, *children: Child | Iterable[Child]) -> Element:
    """Return an element with these children, in order: elements, and text or numbers; None is left out, as are attributes of None."""
    made = Element(tag, {name: _text(value) for name, value in (attributes or {}).items() if value is not None})
    last: Element | None = None
    for child in _flat(children):
        if isinstance(child, Element):
            made.append(child)
            last = child
        elif last is None:
            made.text = (made.text or "") + _text(child)
        else:
            last.tail = (last.tail or "") + _text(child)
    return made


def render(made: Element) -> str:
    """Write an element as HTML."""
    return ElementTree.tostring(made, encoding="unicode", method="html")


def _flat(children: Iterable[Child | Iterable[Child]]) -> Iterable[Element | str | float]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Element | str | int | float):
            yield child
        else:
            yield from _flat(child)


def _text(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return _BARE.sub("�", str(value))
