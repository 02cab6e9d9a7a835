"""Curves in SVG.

Heights are in pixels, and widths are percentages, so that text has the same size on any screen.

    | \\            the plane of curves is 1000 units wide and stretches; its lines keep their width
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

from paceline.observe.page.drawing.scales import Scale, format_number, make_scale
from paceline.observe.page.markup import Attributes, Markup, element

# Width of the plane of curves, in units of its own.
PLANE_WIDTH = 1000
# Weight of the earlier points in a moving average.
AVERAGE_WEIGHT = 0.9
COLOURS, DASHES = 6, 6  # kinds of colours and of dashes

Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Curve:
    """A curve over `x`, interrupted where `y` is None.

    Attributes:
        name: Name in the legend and in read-outs.
        x: Positions on the axis.
        y: Values.
        low: Lower edge of a band around the curve; empty for no band.
        high: Upper edge of the band.
        kind: Index of the colour and the dashes of the line.
        area: CSS class of the band, if it is a part of a stacked whole.
        faint: Whether the line is drawn faintly.
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
    """An event at the position `x`."""

    x: float
    words: str
    kind: str = "other"


@dataclass(frozen=True)
class Plot:
    """A drawing of curves over one axis."""

    title: str  # for screen readers
    curves: Sequence[Curve]
    x: Scale
    y: Scale
    unit: str = ""  # of x, in read-outs
    marks: Sequence[Mark] = field(default_factory=list)
    # Text below a number of the horizontal axis.
    under: Callable[[float], str] | None = None
    high: int = 220  # pixels
    # Curves of read-outs, if they are not those that are drawn.
    read: Sequence[Curve] | None = None


def smooth_plot(plot: Plot) -> Plot:
    """Return a plot of moving averages over its faint curves.

    The axis is logarithmic if all values are positive.
    """
    all_values = finite_values([curve.y for curve in plot.curves])
    is_log = min(all_values, default=0.0) > 0

    def column(values: Iterable[float | None]) -> Numbers:
        return [value if value is None or not is_log else math.log10(value) for value in values]

    faint = [
        replace(curve, name="", y=column(curve.y), low=(), high=(), faint=True)
        for curve in plot.curves
    ]
    firm = [
        replace(curve, y=column(_moving_averages(curve.y)), low=(), high=())
        for curve in plot.curves
    ]
    # The limits go through the same transformation as the curves.
    low, high = finite_values(
        [column([min(all_values, default=0.0), max(all_values, default=1.0)])]
    )
    words = (lambda value: format_number(10**value)) if is_log else format_number
    return replace(plot, curves=[*faint, *firm], y=make_scale(low, high, words), read=plot.curves)


def _moving_averages(values: Numbers) -> Iterator[float | None]:
    """Yield the exponential moving average of a column, starting from its first value."""
    average: float | None = None
    for value in values:
        if value is not None:
            average = (
                value
                if average is None
                else AVERAGE_WEIGHT * average + (1 - AVERAGE_WEIGHT) * value
            )
        yield None if value is None else average


def draw_plot(plot: Plot) -> Markup:
    """Draw a plot: numbers of both axes, curves and marks."""
    lines = [line for curve in plot.curves for line in _draw_curve(curve, plot)]
    # Only the curves stretch (`preserveAspectRatio="none"`). Text, marks and grid lie outside of
    # the plane, in pixels and percentages.
    plane = element(
        "svg",
        {
            "viewBox": f"0 0 {PLANE_WIDTH} {plot.high}",
            "preserveAspectRatio": "none",
            "width": "100%",
            "height": plot.high,
        },
        lines,
    )
    plane_with_marks = element(
        "svg",
        {"class": "plane", "width": "100%", "height": _full_height(plot), "role": "img"},
        element("title", None, plot.title),
        _draw_grid(plot),
        plane,
        (_draw_mark(mark, plot) for mark in plot.marks),
        element("line", {"class": "cursor", "y1": 0, "y2": plot.high, "x1": 0, "x2": 0}),
    )
    sheet = element(
        "div",
        {"class": "sheet"},
        plane_with_marks,
        element("output", {"class": "read-out", "hidden": ""}),
    )
    points = json.dumps(_collect_read_outs(plot), separators=(",", ":"))
    plot_with_axis = element(
        "div", {"class": "plot", "data-points": points}, _draw_heights(plot), sheet
    )
    return element("figure", None, _draw_legend(plot.curves), plot_with_axis)


def _full_height(plot: Plot) -> int:
    """Return the height of a plot with the numbers below it, in pixels."""
    return plot.high + (38 if plot.under else 22)


def _collect_read_outs(plot: Plot) -> dict[str, object]:
    """Return the names and values that the page's script shows at the pointer, by position."""
    curves = plot.curves if plot.read is None else plot.read
    positions = dict.fromkeys(x for curve in curves for x in curve.x if x is not None)
    # Curves may have different positions. Each gets a column over all of them, with gaps.
    index_by_position = {x: at for at, x in enumerate(sorted(positions))}
    columns = {curve.name: _arrange_values(curve, index_by_position) for curve in curves}
    read_outs: dict[str, object] = {
        "x": list(index_by_position),
        "at": [round(_horizontal_position(x, plot.x), 4) for x in index_by_position],
        "unit": plot.unit,
        "curves": columns,
    }
    return (
        read_outs
        if plot.under is None
        else {**read_outs, "under": [plot.under(x) for x in index_by_position]}
    )


def _arrange_values(curve: Curve, index_by_position: dict[float, int]) -> list[float | None]:
    """Arrange the values of a curve by position, rounded to five digits."""
    column: list[float | None] = [None] * len(index_by_position)
    for x, y in zip(curve.x, curve.y, strict=True):
        if x is not None and y is not None:
            column[index_by_position[x]] = float(f"{y:.5g}")
    return column


def _draw_curve(curve: Curve, plot: Plot) -> Iterator[Markup]:
    """Draw the band and the line of a curve, interrupted where values are missing."""
    for part in _split_at_gaps(curve.x, curve.low, curve.high) if curve.low else ():
        lower_edge = [_format_point(x, low, plot) for x, low, _ in part]
        upper_edge = [_format_point(x, high, plot) for x, _, high in reversed(part)]
        classes = f"fill {curve.area}" if curve.area else f"band c{curve.kind % COLOURS}"
        yield element("path", {"class": classes, "d": f"M{' '.join([*lower_edge, *upper_edge])}Z"})
    for piece in _split_at_gaps(curve.x, curve.y, curve.y):
        points = [_format_point(x, y, plot) for x, y, _ in piece]
        # A path of one point is invisible, so it becomes a line to itself: a dot.
        if len(points) == 1:
            points *= 2
        classes = (
            "edge" if curve.area else f"line {line_classes(curve.kind)}{' faint' * curve.faint}"
        )
        yield element("path", {"class": classes, "d": f"M{' '.join(points)}"})


def line_classes(kind: int) -> str:
    """Return the CSS classes of a line of this kind.

    Colour and dashes both differ, so that neither is needed alone.
    """
    return f"c{kind % COLOURS} d{(kind + kind // COLOURS) % DASHES}"


def _split_at_gaps(
    x: Numbers, low: Numbers, high: Numbers
) -> Iterator[list[tuple[float, float, float]]]:
    """Yield the stretches of a curve that are not interrupted."""
    piece: list[tuple[float, float, float]] = []
    for position, lower, upper in zip(x, low, high, strict=True):
        if position is None or lower is None or upper is None:
            if piece:
                yield piece
            piece = []
        else:
            piece.append((position, lower, upper))
    if piece:
        yield piece


def _format_point(x: float, y: float, plot: Plot) -> str:
    """Format a point of the plane."""
    return f"{_horizontal_position(x, plot.x) * PLANE_WIDTH:.1f},{_vertical_position(y, plot):.1f}"


def _horizontal_position(x: float, axis: Scale) -> float:
    """Return the position of a value on the horizontal axis, from 0 to 1."""
    return min(max(axis.position_of(x), 0.0), 1.0)


def _vertical_position(y: float, plot: Plot) -> float:
    """Return the height of a value below the top, in pixels."""
    # Values outside of the axis are drawn just beyond it.
    return (1 - min(max(plot.y.position_of(y), -0.02), 1.02)) * plot.high


def _draw_grid(plot: Plot) -> Iterator[Markup]:
    """Draw horizontal lines at the numbers of the vertical axis, and the horizontal axis."""
    for value, _ in plot.y.ticks:
        y = _vertical_position(value, plot)
        yield element("line", {"class": "grid", "x1": 0, "x2": "100%", "y1": y, "y2": y})
    yield from draw_axis(plot.x, plot.high + 16, plot.under)


def draw_axis(
    axis: Scale, y: float, under: Callable[[float], str] | None = None
) -> Iterator[Markup]:
    """Draw the numbers of a horizontal axis.

    Args:
        axis: The axis.
        y: Height of the numbers, in pixels.
        under: Text below a number, such as the time of a step.
    """
    for index, (value, words) in enumerate(axis.ticks):
        position = axis.position_of(value)
        # Numbers near the ends would stick out, so they are aligned to the inside.
        anchor = "start" if position < 0.06 else "end" if position > 0.94 else "middle"
        attributes = {"class": "tick", "x": f"{100 * position:.2f}%", "text-anchor": anchor}
        yield element("text", {**attributes, "y": y}, words)
        if under is not None:
            yield element(
                "text",
                {**attributes, "y": y + 16, "class": f"tick under{' odd' * (index % 2)}"},
                under(value),
            )


def _draw_heights(plot: Plot) -> Markup:
    """Draw the numbers of the vertical axis."""
    ticks = (
        element(
            "text",
            {
                "class": "tick",
                "x": "100%",
                "y": max(_vertical_position(value, plot) + 4, 9),
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
            "height": _full_height(plot),
            "width": 8 + 7 * longest,
            "aria-hidden": "true",
        },
        ticks,
    )


def _draw_mark(mark: Mark, plot: Plot) -> Markup:
    """Draw an event as a vertical line."""
    position = f"{100 * _horizontal_position(mark.x, plot.x):.2f}%"
    geometry: Attributes = {"x1": position, "x2": position, "y1": 0, "y2": plot.high}
    title = element("title", None, mark.words)
    return element("line", {"class": f"mark {mark.kind}", **geometry}, title)


def _draw_legend(curves: Sequence[Curve]) -> Markup | None:
    """Draw a legend, if there are several named curves."""
    named = [curve for curve in curves if curve.name and not curve.area]
    if len(named) < 2:
        return None
    return element(
        "figcaption",
        {"class": "legend"},
        (
            element("span", {"class": "key"}, draw_line_swatch(curve.kind), curve.name)
            for curve in named
        ),
    )


def draw_line_swatch(kind: int) -> Markup:
    """Draw a piece of a curve's line for a legend."""
    sample = element(
        "line", {"class": f"line {line_classes(kind)}", "x1": 1, "x2": 29, "y1": 6, "y2": 6}
    )
    return element(
        "svg", {"class": "swatch", "width": 30, "height": 12, "aria-hidden": "true"}, sample
    )


def finite_values(columns: Sequence[Numbers]) -> list[float]:
    """Return all finite numbers of these columns."""
    return [
        value
        for column in columns
        for value in column
        if value is not None and math.isfinite(value)
    ]
