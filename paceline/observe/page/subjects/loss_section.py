"""The section on logged values: the loss, and smaller plots of all others below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.formatting import format_count
from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.html_tables import fold_content, make_table
from paceline.observe.page.drawing.plots import Curve, Plot, draw_plot, finite_values, smooth_plot
from paceline.observe.page.markup import Markup, element, join_markup
from paceline.observe.page.subjects import step_axis

SMOOTHED_TITLE = "Smoothed, on a logarithmic axis"
MAX_ROWS = 20  # of the table, at most


def draw_loss(data: Mapping[str, Any]) -> Markup | None:
    """Draw the logged values of one run over its steps; None if there are none."""
    values = data["values"]
    if not values:
        return None
    first, *other_names = values
    small_plots = (
        element("div", None, element("h3", None, name), draw_plot(_make_plot(data, name, high=130)))
        for name in other_names
    )
    more = element("div", {"class": "columns"}, small_plots) if other_names else None
    main_plot = _make_plot(data, first)
    return join_markup(
        draw_plot(main_plot),
        fold_content(SMOOTHED_TITLE, draw_plot(smooth_plot(main_plot))),
        *_warn_of_bad_values(values),
        more,
        fold_content("As a table", _draw_table(data)),
    )


def _make_plot(data: Mapping[str, Any], name: str, high: int = 220) -> Plot:
    """Return the plot of a logged value, with a band if values vary within a point."""
    values = data["values"][name]
    all_values = finite_values([values["low"], values["high"]])
    y = scales.make_scale(
        min(all_values, default=0.0),
        max(all_values, default=1.0),
        scales.format_number,
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
    x = step_axis.make_step_axis(values["step"], many=high > 150)
    return Plot(
        f"{name} over steps",
        [curve],
        x,
        y,
        "step",
        step_axis.make_marks(data),
        step_axis.make_step_clock(data),
        high,
    )


def _warn_of_bad_values(values: Mapping[str, Any]) -> Iterator[Markup]:
    """Yield a warning for each name with values that are not finite."""
    for name, columns in values.items():
        count = sum(columns["bad"])
        if count:
            since = next(
                step for step, bad in zip(columns["step"], columns["bad"], strict=True) if bad
            )
            words = (
                f"{name} was no finite number {format_count(count, 'time')}, for the first time by "
                "step "
                f"{since:,.0f}."
            )
            yield element("p", {"class": "warning"}, words)


def _draw_table(data: Mapping[str, Any]) -> Markup:
    """Draw a table of at most six names at some steps."""
    values = data["values"]
    names = list(values)[:6]
    steps = values[names[0]]["step"]
    rows_shown = (
        sorted({round(index * (len(steps) - 1) / (MAX_ROWS - 1)) for index in range(MAX_ROWS)})
        if steps
        else []
    )
    columns = {
        name: dict(zip(values[name]["step"], values[name]["mean"], strict=True)) for name in names
    }
    time_of_step = step_axis.make_step_clock(data)
    rows = (
        (
            f"{steps[index]:,.0f}",
            "" if time_of_step is None else time_of_step(steps[index]),
            *(
                "–"
                if columns[name].get(steps[index]) is None
                else scales.format_number(columns[name][steps[index]])
                for name in names
            ),
        )
        for index in rows_shown
    )
    return make_table(("step", "time", *names), rows, "What was logged, means up to each step")
