"""The whole page: one file that holds its own style and script, and asks no network for anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from paceline.observe.page.markup import element
from paceline.observe.page.sections import sections


def page(datas: Sequence[Mapping[str, Any]], *, head: str = "", script: str = "") -> str:
    """Return the page of these runs as HTML. `head`: more of the head of the page, as HTML; `script`: more JavaScript, which runs last."""
    names = ", ".join(str(data["name"]) for data in datas)
    body = "\n".join(sections(datas).values())
    title = element("title", None, f"{names} - paceline")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            title,
            f"<style>{_static('page.css')}</style>",
            head,
            "</head>",
            "<body>",
            f"<main>\n{body}\n</main>",
            f"<script>{_static('page.js')}{script}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def _static(name: str) -> str:
    return files("paceline.observe.page").joinpath("static", name).read_text(encoding="utf-8")
