"""Pages as a browser reads them: their elements and attributes, by Python's parsers."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element


class Tags(HTMLParser):
    """The elements of a page: the name of each, and its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an element."""
        self.found.append((tag, dict(attrs)))

    @property
    def names(self) -> list[str]:
        """Names of all elements, in order."""
        return [name for name, _ in self.found]


def tree(markup: str | None) -> Element:
    """Read one element with all that is in it; what isn't well-formed fails."""
    assert markup is not None
    return ElementTree.fromstring(markup)


def compare_figures(text: str, summaries: list[dict[str, Any]]) -> int:
    """Assert that every figure in a page of these runs is what their summaries have; return how
    many there are.
    """
    run, count = 0, 0
    for tag, given in Tags(text).found:
        run = int(given.get("data-run") or run)
        if tag != "data":
            continue
        count += 1
        field, shown = given["data-field"], given["value"]
        assert field is not None and shown is not None
        value = _field(summaries[run], field)
        if "data-per" in given:
            expected: Any = _total(value) / _total(_field(summaries[run], given["data-per"] or ""))
        else:
            expected = _total(value) if "data-sum" in given else value
        assert shown == repr(expected) or math.isclose(
            float(shown), float(expected), rel_tol=1e-12
        ), (field, shown, expected)
    return count


def _field(found: Any, field: str) -> Any:
    for key in field.split("."):
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def _total(value: Any) -> float:
    if isinstance(value, dict):
        return sum(map(_total, value.values()))
    return sum(map(_total, value)) if isinstance(value, list) else float(value)
