"""The whole page: one file with its own style and script, which loads nothing from the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from paceline.observe.page.drawing.bars import define_hatchings
from paceline.observe.page.markup import Markup, element, join_markup
from paceline.observe.page.sections import section_titles, sections

# Content-Security-Policy of the page: nothing may be loaded, not even by text that a run has named.
_CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'"
)


def render_page(datas: Sequence[Mapping[str, Any]], *, head: str = "", script: str = "") -> str:
    """Return the page of these runs as HTML.

    Args:
        datas: Data of each run, from `make_page_data`.
        head: Further HTML for the head of the page.
        script: Further JavaScript, which runs last.
    """
    drawn_sections = sections(datas)
    names = ", ".join(str(data["name"]) for data in datas)
    body = join_markup(
        define_hatchings(),
        _draw_links(datas, drawn_sections),
        element("main", None, Markup("\n".join(drawn_sections.values()))),
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
            f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">',
            element("title", None, f"{names} - paceline"),
            f"<style>\n{_read_static_file('page.css')}</style>",
            head,
            "</head>",
            f"<body>\n{body}",
            f"<script>\n{_read_static_file('page.js')}{script}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def _draw_links(datas: Sequence[Mapping[str, Any]], drawn_sections: Mapping[str, str]) -> Markup:
    """Return links to the sections of the page."""
    links = (
        element("a", {"href": f"#{name}"}, title)
        for name, title in section_titles(datas).items()
        if title and name in drawn_sections
    )
    return element("nav", {"aria-label": "sections"}, links)


def _read_static_file(name: str) -> str:
    """Read a file of the folder `static`."""
    return files("paceline.observe.page").joinpath("static", name).read_text(encoding="utf-8")
