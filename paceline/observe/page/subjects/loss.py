"""The section on logged values: the loss, and smaller plots of all others below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.formatting import counted
from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.html_tables import folded, table
from paceline.observe.page.drawing.plots import Curve, Plot, draw, finite, smoothed
from paceline.observe.page.markup import Markup, element, join
from paceline.observe.page.subjects import axes

SMOOTHED = "Smoothed, on a logarithmic axis"
ROWS = 20  # of the table, at most


def section(data: Mapping[str, Any]) -> Markup | None:
    """Draw the logged values of one run over its steps; None if there are none."""
    values = data["values"]
    if not values:
        return None
    first, *other_names = values
    small_plots = (
        element("div", None, element("h3", None, name), draw(_plot(data, name, high=130)))
        for name in other_names
    )
    more = element("div", {"class": "columns"}, small_plots) if other_names else None
    main_plot = _plot(data, first)
    return join(
        draw(main_plot),
        folded(SMOOTHED, draw(smoothed(main_plot))),
        *_bad(values),
        more,
        folded("As a table", _table(data)),
    )


def _plot(data: Mapping[str, Any], name: str, high: int = 220) -> Plot:
    """Return the plot of a logged value, with a band if values vary within a point."""
    values = data["values"][name]
    all_values = finite([values["low"], values["high"]])
    y = scales.scale(
        min(all_values, default=0.0),
        max(all_values, default=1.0),
        scales.plain,
        5 if high > 150 else 4,
    )
    has_band = values["low"] != values["high"]
    curve = Curve(
        name,
        values["step"],
        values["mean"],
        values["low"] if has_band else (),
        values["high"] if has_band else (),
    )
    x = axes.of_steps(values["step"], many=high > 150)
    return Plot(
        f"{name} over steps", [curve], x, y, "step", axes.marks(data), axes.clock(data), high
    )


def _bad(values: Mapping[str, Any]) -> Iterator[Markup]:
    """Yield a warning for each name with values that are not finite."""
    for name, columns in values.items():
        count = sum(columns["bad"])
        if count:
            since = next(
                step for step, bad in zip(columns["step"], columns["bad"], strict=True) if bad
            )
            words = (
                f"{name} was no finite number {counted(count, 'time')}, for the first time by step "
                f"{since:,.0f}."
            )
            yield element("p", {"class": "warning"}, words)


def _table(data: Mapping[str, Any]) -> Markup:
    """Draw a table of at most six names at some steps."""
    values = data["values"]
    names = list(values)[:6]
    steps = values[names[0]]["step"]
    rows_shown = (
        sorted({round(index * (len(steps) - 1) / (ROWS - 1)) for index in range(ROWS)})
        if steps
        else []
    )
    columns = {
        name: dict(zip(values[name]["step"], values[name]["mean"], strict=True)) for name in names
    }
    time_of_step = axes.clock(data)
    rows = (
        (
            f"{steps[index]:,.0f}",
            "" if time_of_step is None else time_of_step(steps[index]),
            *(
                "–"
                if columns[name].get(steps[index]) is None
                else scales.plain(columns[name][steps[index]])
                for name in names
            ),
        )
        for index in rows_shown
    )
    return table(("step", "time", *names), rows, "What was logged, means up to each step")
