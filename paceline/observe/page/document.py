"""The whole page: one file that holds its own style and script, and asks no network for
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from paceline.observe.page.drawing.bars import hatchings
from paceline.observe.page.markup import Markup, element, join
from paceline.observe.page.sections import sections, titles

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'"
)


def page(datas: Sequence[Mapping[str, Any]], *, head: str = "", script: str = "") -> str:
    """Return the page of these runs as HTML.

    `head`: more of the head of the page, as HTML; `script`: more JavaScript, which runs last.
    """
    found = sections(datas)
    names = ", ".join(str(data["name"]) for data in datas)
    body = join(
        hatchings(),
        _links(datas, found),
        element("main", None, Markup("\n".join(found.values()))),
        element(
            "footer", None, "Made by paceline. Where the pointer is, curves tell their values."
        ),
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            element("title", None, f"{names} - paceline"),
            f"<style>\n{_static('page.css')}</style>",
            head,
            "</head>",
            f"<body>\n{body}",
            f"<script>\n{_static('page.js')}{script}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def _links(datas: Sequence[Mapping[str, Any]], found: Mapping[str, str]) -> Markup:
    """Write the links to the sections that there are."""
    links = (
        element("a", {"href": f"#{name}"}, title)
        for name, title in titles(datas).items()
        if title and name in found
    )
    return element("nav", {"aria-label": "sections"}, links)


def _static(name: str) -> str:
    return files("paceline.observe.page").joinpath("static", name).read_text(encoding="utf-8")
