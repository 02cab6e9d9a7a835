"""The section on what was logged: the loss, and below it, smaller, all else."""

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
    """Draw what one run has logged over its steps; None where nothing was."""
    values = data["values"]
    if not values:
        return None
    first, *others = values
    small = (
        element("div", None, element("h3", None, name), draw(_plot(data, name, high=130)))
        for name in others
    )
    more = element("div", {"class": "columns"}, small) if others else None
    main = _plot(data, first)
    return join(
        draw(main),
        folded(SMOOTHED, draw(smoothed(main))),
        *_bad(values),
        more,
        folded("As a table", _table(data)),
    )


def _plot(data: Mapping[str, Any], name: str, high: int = 220) -> Plot:
    found = data["values"][name]
    every = finite([found["low"], found["high"]])
    y = scales.scale(
        min(every, default=0.0), max(every, default=1.0), scales.plain, 5 if high > 150 else 4
    )
    varies = found["low"] != found["high"]
    curve = Curve(
        name,
        found["step"],
        found["mean"],
        found["low"] if varies else (),
        found["high"] if varies else (),
    )
    x = axes.of_steps(found["step"], many=high > 150)
    return Plot(
        f"{name} over steps", [curve], x, y, "step", axes.marks(data), axes.clock(data), high
    )


def _bad(values: Mapping[str, Any]) -> Iterator[Markup]:
    """Say which values were no numbers, and from which step on."""
    for name, found in values.items():
        count = sum(found["bad"])
        if count:
            since = next(step for step, bad in zip(found["step"], found["bad"], strict=True) if bad)
            words = (
                f"{name} was no finite number {counted(count, 'time')}, for the first time by step "
                f"{since:,.0f}."
            )
            yield element("p", {"class": "warning"}, words)


def _table(data: Mapping[str, Any]) -> Markup:
    values = data["values"]
    names = list(values)[:6]
    steps = values[names[0]]["step"]
    chosen = (
        sorted({round(at * (len(steps) - 1) / (ROWS - 1)) for at in range(ROWS)}) if steps else []
    )
    columns = {
        name: dict(zip(values[name]["step"], values[name]["mean"], strict=True)) for name in names
    }
    when = axes.clock(data)
    rows = (
        (
            f"{steps[at]:,.0f}",
            "" if when is None else when(steps[at]),
            *(
                "–"
                if columns[name].get(steps[at]) is None
                else scales.plain(columns[name][steps[at]])
                for name in names
            ),
        )
        for at in chosen
    )
    return table(("step", "time", *names), rows, "What was logged, means up to each step")
