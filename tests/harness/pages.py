"""Pages as a browser reads them: their elements and attributes, by Python's parser."""

from __future__ import annotations

from html.parser import HTMLParser


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
