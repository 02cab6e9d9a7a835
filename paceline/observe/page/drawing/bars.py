"""Bars in SVG, each of several parts, side by side with what they are of.

Parts differ in colour and in hatching.

rank 0   [ compute      ][exch][wait]           75.1 ms
rank 1   [ compute                ][exch]       75.1 ms
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.observe.page.markup import Child, Markup, element

THICK = 18  # pixels
PARTS_KINDS: Mapping[str, str] = {  # colour and hatching of each part that pages know
    "compute": "k0",
    "exchange": "k1",
    "wait": "k2",
    "data": "k3",
    "reading": "k3",
    "collection": "k4",
    "stolen": "k2",
    "paging": "k5",
    "parameters": "k0",
    "gradients": "k1",
    "optimizer": "k3",
    "within": "k3",
    "between": "k2",
}


@dataclass(frozen=True)
class Bar:
    """One bar: what it is of, the size of each part, and what stands at its end."""

    label: str
    sizes: Mapping[str, float]
    end: Child = None
    note: str = ""  # below the label


def bars(
    title: str, rows: Sequence[Bar], words: Mapping[str, str], *, least: float = 0.0
) -> Markup:
    """Draw bars on one scale, up to the longest of them or `least`, with a legend of the parts
    that there are; `words` name parts.
    """
    most = max([least, *(sum(row.sizes.values()) for row in rows)]) or 1.0
    shown = [part for part in words if any(row.sizes.get(part, 0.0) > 0 for row in rows)]
    legend = element(
        "figcaption",
        {"class": "legend"},
        (element("span", {"class": "key"}, swatch(part), words[part]) for part in shown),
    )
    body = (_row(title, row, words, most) for row in rows)
    return element(
        "figure", None, legend if len(shown) > 1 else None, element("div", {"class": "bars"}, body)
    )


def swatch(part: str) -> Markup:
    """Draw a piece of a part's colour, for a legend."""
    box = element(
        "rect", {"class": f"fill {PARTS_KINDS[part]}", "width": 14, "height": 12, "rx": 2}
    )
    return element(
        "svg",
        {"class": "swatch", "width": 14, "height": 12, "aria-hidden": "true"},
        box,
        _hatch(part, "0", "14", 12),
    )


def _row(title: str, row: Bar, words: Mapping[str, str], most: float) -> Markup:
    said = ", ".join(
        f"{words[part]} {size / most:.0%}" for part, size in row.sizes.items() if size > 0
    )
    drawn = element(
        "svg",
        {"class": "bar", "width": "100%", "height": THICK, "role": "img"},
        element("title", None, f"{title}, {row.label}: {said or 'nothing'} of the longest"),
        *_pieces(row, words, most),
    )
    note = element("small", None, row.note) if row.note else None
    label = element("span", {"class": "label"}, row.label, note)
    return element(
        "div",
        {"class": "row"},
        label,
        element("span", {"class": "track"}, drawn),
        element("span", {"class": "end"}, row.end),
    )


def _pieces(row: Bar, words: Mapping[str, str], most: float) -> Iterator[Markup]:
    at = 0.0
    for part in words:
        size = row.sizes.get(part, 0.0)
        if size > 0:
            x, width = f"{100 * at / most:.3f}%", f"{100 * size / most:.3f}%"
            yield element(
                "rect",
                {"class": f"fill {PARTS_KINDS[part]}", "x": x, "width": width, "height": THICK},
            )
            yield _hatch(part, x, width, THICK)
            at += size


def _hatch(part: str, x: str, width: str, height: int) -> Markup:
    """Draw the hatching over a part, which the page defines once."""
    kind = PARTS_KINDS[part]
    return element(
        "rect", {"fill": f"url(#hatch-{kind})", "x": x, "width": width, "height": height}
    )


def hatchings() -> Markup:
    """Define the hatching of each kind of part, once for a page."""
    paths = {
        "k1": "M-1 1l2-2M0 6l6-6M5 7l2-2",
        "k2": "M0 0l6 6M-1 5l2 2M5-1l2 2",
        "k3": "M3 0v6",
        "k4": "M0 3h6",
        "k5": "M0 3h6M3 0v6",
    }
    made = (
        element(
            "pattern",
            {"id": f"hatch-{kind}", "width": 6, "height": 6, "patternUnits": "userSpaceOnUse"},
            element("path", {"d": path}),
        )
        for kind, path in paths.items()
    )
    empty = element(
        "pattern", {"id": "hatch-k0", "width": 6, "height": 6, "patternUnits": "userSpaceOnUse"}
    )
    return element(
        "svg",
        {"class": "hatchings", "width": 0, "height": 0, "aria-hidden": "true"},
        element("defs", None, empty, made),
    )
