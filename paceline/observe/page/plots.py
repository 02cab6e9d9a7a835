"""Curves in SVG. Heights are pixels and widths are parts of what there is, so that text stays as large as it is on any screen."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.observe.page.markup import Markup, element
from paceline.observe.page.scales import Scale

WIDE, HIGH = 1000, 220  # of the plane of curves; it is as wide as the screen allows
COLOURS = 6  # kinds of lines that a page tells apart, by colour and by dashes

Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Curve:
    """A curve over `x`; where `y` is None it is interrupted. Between `low` and `high` is a band: what it varied in."""

    name: str
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()
    kind: int = 0  # of the line


@dataclass(frozen=True)
class Mark:
    """Something that happened at `x`."""

    x: float
    words: str
    kind: str = "other"


@dataclass(frozen=True)
class Plot:
    """A drawing of curves over one axis."""

    title: str  # what is seen, for who can't see it
    curves: Sequence[Curve]
    x: Scale
    y: Scale
    unit: str = ""  # of x, in read-outs
    marks: Sequence[Mark] = field(default_factory=list)


def draw(plot: Plot) -> Markup:
    """Draw a plot: numbers of the vertical axis at the left, the curves, and numbers of the horizontal axis below."""
    lines = [line for curve in plot.curves for line in _curve(curve, plot)]
    plane = element("svg", {"viewBox": f"0 0 {WIDE} {HIGH}", "preserveAspectRatio": "none", "width": "100%", "height": HIGH}, lines)
    inside = element(
        "svg",
        {"class": "plane", "width": "100%", "height": HIGH + 22, "role": "img"},
        element("title", None, plot.title),
        _grid(plot),
        plane,
        [_mark(mark, plot.x) for mark in plot.marks],
        element("line", {"class": "cursor", "y1": 0, "y2": HIGH, "x1": 0, "x2": 0}),
    )
    rows = {"x": [*plot.curves[0].x] if plot.curves else [], "unit": plot.unit, "curves": {c.name: [*c.y] for c in plot.curves}}
    drawn = element("div", {"class": "plot", "data-points": json.dumps(rows)}, _heights(plot.y), element("div", {"class": "sheet"}, inside))
    return element("figure", None, _legend(plot.curves), drawn)


def _curve(curve: Curve, plot: Plot) -> Iterator[Markup]:
    kind = curve.kind % COLOURS
    if curve.low:
        for part in _pieces(curve.x, curve.low, curve.high):
            there = [_point(x, low, plot) for x, low, _ in part]
            back = [_point(x, high, plot) for x, _, high in reversed(part)]
            yield element("path", {"class": f"band c{kind}", "d": f"M{' '.join([*there, *back])}Z"})
    for piece in _pieces(curve.x, curve.y, curve.y):
        points = [_point(x, y, plot) for x, y, _ in piece]
        if len(points) == 1:
            points *= 2  # a dot
        yield element("path", {"class": f"line c{kind}", "d": f"M{' '.join(points)}"})


def _pieces(x: Numbers, low: Numbers, high: Numbers) -> Iterator[list[tuple[float, float, float]]]:
    """Yield the stretches of a curve that are not interrupted."""
    piece: list[tuple[float, float, float]] = []
    for across, below, above in zip(x, low, high, strict=True):
        if across is None or below is None or above is None:
            if piece:
                yield piece
            piece = []
        else:
            piece.append((across, below, above))
    if piece:
        yield piece


def _point(x: float, y: float, plot: Plot) -> str:
    return f"{_across(x, plot.x) * WIDE:.1f},{_down(y, plot.y):.1f}"


def _across(x: float, axis: Scale) -> float:
    return min(max(axis.at(x), 0.0), 1.0)


def _down(y: float, axis: Scale) -> float:
    return (1 - min(max(axis.at(y), -0.05), 1.05)) * HIGH


def _grid(plot: Plot) -> Iterator[Markup]:
    for value, _ in plot.y.ticks:
        y = _down(value, plot.y)
        yield element("line", {"class": "grid", "x1": 0, "x2": "100%", "y1": y, "y2": y})
    for value, words in plot.x.ticks:
        at = plot.x.at(value)
        anchor = "start" if at < 0.04 else "end" if at > 0.96 else "middle"
        yield element("text", {"class": "tick", "x": f"{100 * at:.2f}%", "y": HIGH + 16, "text-anchor": anchor}, words)


def _heights(axis: Scale) -> Markup:
    ticks = (
        element("text", {"class": "tick", "x": "100%", "y": max(_down(value, axis) + 4, 9), "text-anchor": "end"}, words)
        for value, words in axis.ticks
    )
    longest = max((len(words) for _, words in axis.ticks), default=0)
    return element("svg", {"class": "heights", "height": HIGH + 22, "width": 8 + 7 * longest, "aria-hidden": "true"}, ticks)


def _mark(mark: Mark, axis: Scale) -> Markup:
    at = f"{100 * _across(mark.x, axis):.2f}%"
    return element("line", {"class": f"mark {mark.kind}", "x1": at, "x2": at, "y1": 0, "y2": HIGH}, element("title", None, mark.words))


def _legend(curves: Sequence[Curve]) -> Markup | None:
    if len(curves) < 2:
        return None
    items = (element("span", {"class": "key"}, swatch(curve.kind), curve.name) for curve in curves)
    return element("figcaption", {"class": "legend"}, items)


def swatch(kind: int) -> Markup:
    """Draw the line of a curve, for a legend."""
    line = element("line", {"class": f"line c{kind % COLOURS}", "x1": 1, "x2": 25, "y1": 6, "y2": 6})
    return element("svg", {"class": "swatch", "width": 26, "height": 12, "aria-hidden": "true"}, line)


def finite(columns: Sequence[Numbers]) -> list[float]:
    """Return all numbers of these columns that can be drawn."""
    return [value for column in columns for value in column if value is not None and math.isfinite(value)]
