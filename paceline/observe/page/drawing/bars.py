"""Horizontal bars of several parts in SVG. Parts differ in colour and in hatching.

rank 0   [ compute      ][exch][wait]           75.1 ms
rank 1   [ compute                ][exch]       75.1 ms
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.observe.page.markup import Child, Markup, element

BAR_HEIGHT = 18  # pixels
# CSS class of each part, which gives its colour and its hatching.
PART_CLASSES: Mapping[str, str] = {
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
    """One bar: a label, the size of each part, and a text at its end."""

    label: str
    sizes: Mapping[str, float]
    end: Child = None
    note: str = ""  # below the label


def draw_bars(
    title: str, rows: Sequence[Bar], words: Mapping[str, str], *, least: float = 0.0
) -> Markup:
    """Draw bars on one scale, with a legend of their parts.

    Args:
        title: Title for screen readers.
        rows: Bars.
        words: Names of the parts, in their order.
        least: The scale ends at the longest bar, or here if that is further.
    """
    # `or 1.0`: if all sizes are 0, the bars are empty.
    longest = max([least, *(sum(row.sizes.values()) for row in rows)]) or 1.0
    shown_parts = [part for part in words if any(row.sizes.get(part, 0.0) > 0 for row in rows)]
    keys = (
        element("span", {"class": "key"}, draw_part_swatch(part), words[part])
        for part in shown_parts
    )
    legend = element("figcaption", {"class": "legend"}, keys)
    body = (_draw_row(title, row, words, longest) for row in rows)
    return element(
        "figure",
        None,
        legend if len(shown_parts) > 1 else None,
        element("div", {"class": "bars"}, body),
    )


def draw_part_swatch(part: str) -> Markup:
    """Draw a piece of a part's colour for a legend."""
    box = element(
        "rect", {"class": f"fill {PART_CLASSES[part]}", "width": 14, "height": 12, "rx": 2}
    )
    return element(
        "svg",
        {"class": "swatch", "width": 14, "height": 12, "aria-hidden": "true"},
        box,
        _draw_hatching(part, "0", "14", 12),
    )


def _draw_row(title: str, row: Bar, words: Mapping[str, str], longest: float) -> Markup:
    """Draw one bar with its label."""
    description = ", ".join(
        f"{words[part]} {size / longest:.0%}" for part, size in row.sizes.items() if size > 0
    )
    bar = element(
        "svg",
        {"class": "bar", "width": "100%", "height": BAR_HEIGHT, "role": "img"},
        element("title", None, f"{title}, {row.label}: {description or 'nothing'} of the longest"),
        *_draw_pieces(row, words, longest),
    )
    note = element("small", None, row.note) if row.note else None
    label = element("span", {"class": "label"}, row.label, note)
    return element(
        "div",
        {"class": "row"},
        label,
        element("span", {"class": "track"}, bar),
        element("span", {"class": "end"}, row.end),
    )


def _draw_pieces(row: Bar, words: Mapping[str, str], longest: float) -> Iterator[Markup]:
    """Draw the parts of a bar side by side."""
    position = 0.0
    for part in words:
        size = row.sizes.get(part, 0.0)
        # Positions are percentages, so bars stretch with the page and text does not.
        if size > 0:
            x, width = f"{100 * position / longest:.3f}%", f"{100 * size / longest:.3f}%"
            yield element(
                "rect",
                {
                    "class": f"fill {PART_CLASSES[part]}",
                    "x": x,
                    "width": width,
                    "height": BAR_HEIGHT,
                },
            )
            yield _draw_hatching(part, x, width, BAR_HEIGHT)
            position += size


def _draw_hatching(part: str, x: str, width: str, height: int) -> Markup:
    """Draw the hatching over a part. The page defines its pattern once."""
    kind = PART_CLASSES[part]
    return element(
        "rect", {"fill": f"url(#hatch-{kind})", "x": x, "width": width, "height": height}
    )


def define_hatchings() -> Markup:
    """Define the pattern of each hatching, once for a page."""
    paths = {
        "k1": "M-1 1l2-2M0 6l6-6M5 7l2-2",
        "k2": "M0 0l6 6M-1 5l2 2M5-1l2 2",
        "k3": "M3 0v6",
        "k4": "M0 3h6",
        "k5": "M0 3h6M3 0v6",
    }
    patterns = (
        element(
            "pattern",
            {"id": f"hatch-{kind}", "width": 6, "height": 6, "patternUnits": "userSpaceOnUse"},
            element("path", {"d": path}),
        )
        for kind, path in paths.items()
    )
    plain = element(
        "pattern", {"id": "hatch-k0", "width": 6, "height": 6, "patternUnits": "userSpaceOnUse"}
    )
    return element(
        "svg",
        {"class": "hatchings", "width": 0, "height": 0, "aria-hidden": "true"},
        element("defs", None, plain, patterns),
    )
