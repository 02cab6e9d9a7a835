"""Curves in SVG.

Heights are pixels and widths are parts of what there is, so that text stays as large as it is on
any screen.

    | \\            the plane of curves, 1000 units wide, stretches; its lines keep their width
2.0 -   \\___
    |       \\__    marks of events go from top to bottom
    +----+----+
        100  200    numbers of the axis, and below them those of `under`: the time of each step
       0:10  0:20
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.observe.page.drawing.scales import Scale, plain, scale
from paceline.observe.page.markup import Markup, element

WIDE = 1000  # units of the plane of curves
KEPT = 0.9  # of a moving average, at each point
COLOURS, DASHES = 6, 6  # that pages tell lines apart by

Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Curve:
    """A curve over `x`; where `y` is None it is interrupted.

    Between `low` and `high` is a band: what it varied in.

    `kind`: which colour and dashes the line has. `area`: the band is a part of a whole, of this
    kind of `bars`.
    """

    name: str
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()
    kind: int = 0
    area: str = ""
    faint: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at `x`."""

    x: float
    words: str
    kind: str = "other"


@dataclass(frozen=True)
class Plot:
    """A drawing of curves over one axis. `title` says what is seen, for who can't see it."""

    title: str
    curves: Sequence[Curve]
    x: Scale
    y: Scale
    unit: str = ""  # of x, in read-outs
    marks: Sequence[Mark] = field(default_factory=list)
    under: Callable[[float], str] | None = None  # what stands below a number of the axis
    high: int = 220  # pixels
    read: Sequence[Curve] | None = None  # what read-outs tell, where that isn't the curves


def smoothed(plot: Plot) -> Plot:
    """Return a plot of moving averages over its faint curves, on a logarithmic axis if all
    values are above 0.
    """
    every = finite([curve.y for curve in plot.curves])
    log = min(every, default=0.0) > 0

    def column(values: Iterable[float | None]) -> Numbers:
        return [value if value is None or not log else math.log10(value) for value in values]

    faint = [
        replace(curve, name="", y=column(curve.y), low=(), high=(), faint=True)
        for curve in plot.curves
    ]
    firm = [replace(curve, y=column(_averages(curve.y)), low=(), high=()) for curve in plot.curves]
    low, high = finite([column([min(every, default=0.0), max(every, default=1.0)])])
    words = (lambda value: plain(10**value)) if log else plain
    return replace(plot, curves=[*faint, *firm], y=scale(low, high, words), read=plot.curves)


def _averages(values: Numbers) -> Iterator[float | None]:
    """Yield the exponential moving average of a column, which begins with its first value."""
    average: float | None = None
    for value in values:
        if value is not None:
            average = value if average is None else KEPT * average + (1 - KEPT) * value
        yield None if value is None else average


def draw(plot: Plot) -> Markup:
    """Draw a plot: numbers of the vertical axis at the left, the curves, and numbers of the
    horizontal axis below.
    """
    lines = [line for curve in plot.curves for line in _curve(curve, plot)]
    plane = element(
        "svg",
        {
            "viewBox": f"0 0 {WIDE} {plot.high}",
            "preserveAspectRatio": "none",
            "width": "100%",
            "height": plot.high,
        },
        lines,
    )
    inside = element(
        "svg",
        {"class": "plane", "width": "100%", "height": _height(plot), "role": "img"},
        element("title", None, plot.title),
        _grid(plot),
        plane,
        (_mark(mark, plot) for mark in plot.marks),
        element("line", {"class": "cursor", "y1": 0, "y2": plot.high, "x1": 0, "x2": 0}),
    )
    sheet = element(
        "div", {"class": "sheet"}, inside, element("output", {"class": "read-out", "hidden": ""})
    )
    drawn = element(
        "div",
        {"class": "plot", "data-points": json.dumps(_read_outs(plot), separators=(",", ":"))},
        _heights(plot),
        sheet,
    )
    return element("figure", None, _legend(plot.curves), drawn)


def _height(plot: Plot) -> int:
    return plot.high + (38 if plot.under else 22)


def _read_outs(plot: Plot) -> dict[str, object]:
    """Return what the script of the page reads out where the pointer is: names and values over
    the places on the axis.
    """
    told = plot.curves if plot.read is None else plot.read
    every = dict.fromkeys(x for curve in told for x in curve.x if x is not None)
    places = {x: at for at, x in enumerate(sorted(every))}
    columns = {curve.name: _placed(curve, places) for curve in told}
    found: dict[str, object] = {
        "x": list(places),
        "at": [round(_across(x, plot.x), 4) for x in places],
        "unit": plot.unit,
        "curves": columns,
    }
    return found if plot.under is None else {**found, "under": [plot.under(x) for x in places]}


def _placed(curve: Curve, places: dict[float, int]) -> list[float | None]:
    column: list[float | None] = [None] * len(places)
    for x, y in zip(curve.x, curve.y, strict=True):
        if x is not None and y is not None:
            column[places[x]] = float(f"{y:.5g}")
    return column


def _curve(curve: Curve, plot: Plot) -> Iterator[Markup]:
    for part in _pieces(curve.x, curve.low, curve.high) if curve.low else ():
        there = [_point(x, low, plot) for x, low, _ in part]
        back = [_point(x, high, plot) for x, _, high in reversed(part)]
        kind = f"fill {curve.area}" if curve.area else f"band c{curve.kind % COLOURS}"
        yield element("path", {"class": kind, "d": f"M{' '.join([*there, *back])}Z"})
    for piece in _pieces(curve.x, curve.y, curve.y):
        points = [_point(x, y, plot) for x, y, _ in piece]
        if len(points) == 1:
            points *= 2  # a dot
        kind = "edge" if curve.area else f"line {line(curve.kind)}{' faint' * curve.faint}"
        yield element("path", {"class": kind, "d": f"M{' '.join(points)}"})


def line(kind: int) -> str:
    """Return the classes of a line of this kind: a colour, and dashes, so that neither is needed
    alone.
    """
    return f"c{kind % COLOURS} d{(kind + kind // COLOURS) % DASHES}"


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
    return f"{_across(x, plot.x) * WIDE:.1f},{_down(y, plot):.1f}"


def _across(x: float, axis: Scale) -> float:
    return min(max(axis.at(x), 0.0), 1.0)


def _down(y: float, plot: Plot) -> float:
    return (1 - min(max(plot.y.at(y), -0.02), 1.02)) * plot.high


def _grid(plot: Plot) -> Iterator[Markup]:
    for value, _ in plot.y.ticks:
        y = _down(value, plot)
        yield element("line", {"class": "grid", "x1": 0, "x2": "100%", "y1": y, "y2": y})
    yield from across(plot.x, plot.high + 16, plot.under)


def across(axis: Scale, y: float, under: Callable[[float], str] | None = None) -> Iterator[Markup]:
    """Write the numbers of a horizontal axis, and below each what is `under` it."""
    for number, (value, words) in enumerate(axis.ticks):
        at = axis.at(value)
        anchor = "start" if at < 0.06 else "end" if at > 0.94 else "middle"
        given = {"class": "tick", "x": f"{100 * at:.2f}%", "text-anchor": anchor}
        yield element("text", {**given, "y": y}, words)
        if under is not None:
            yield element(
                "text",
                {**given, "y": y + 16, "class": f"tick under{' odd' * (number % 2)}"},
                under(value),
            )


def _heights(plot: Plot) -> Markup:
    ticks = (
        element(
            "text",
            {
                "class": "tick",
                "x": "100%",
                "y": max(_down(value, plot) + 4, 9),
                "text-anchor": "end",
            },
            words,
        )
        for value, words in plot.y.ticks
    )
    longest = max((len(words) for _, words in plot.y.ticks), default=0)
    return element(
        "svg",
        {
            "class": "heights",
            "height": _height(plot),
            "width": 8 + 7 * longest,
            "aria-hidden": "true",
        },
        ticks,
    )


def _mark(mark: Mark, plot: Plot) -> Markup:
    at = f"{100 * _across(mark.x, plot.x):.2f}%"
    return element(
        "line",
        {"class": f"mark {mark.kind}", "x1": at, "x2": at, "y1": 0, "y2": plot.high},
        element("title", None, mark.words),
    )


def _legend(curves: Sequence[Curve]) -> Markup | None:
    named = [curve for curve in curves if curve.name and not curve.area]
    if len(named) < 2:
        return None
    return element(
        "figcaption",
        {"class": "legend"},
        (element("span", {"class": "key"}, swatch(curve.kind), curve.name) for curve in named),
    )


def swatch(kind: int) -> Markup:
    """Draw the line of a curve, for a legend."""
    drawn = element("line", {"class": f"line {line(kind)}", "x1": 1, "x2": 29, "y1": 6, "y2": 6})
    return element(
        "svg", {"class": "swatch", "width": 30, "height": 12, "aria-hidden": "true"}, drawn
    )


def finite(columns: Sequence[Numbers]) -> list[float]:
    """Return all numbers of these columns that can be drawn."""
    return [
        value
        for column in columns
        for value in column
        if value is not None and math.isfinite(value)
    ]
