"""Pages as a browser reads them: their elements and attributes, by Python's parsers."""

from __future__ import annotations

from html.parser import HTMLParser
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
