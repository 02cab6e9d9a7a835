"""The sections of a page that compares runs: figures, losses, times, traffic and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, draw_bars
from paceline.observe.page.drawing.figures import (
    draw_figure,
    draw_share,
    draw_sum,
    find_field,
    read_number,
)
from paceline.observe.page.drawing.html_tables import fold_content, make_table
from paceline.observe.page.drawing.plots import (
    Curve,
    Numbers,
    Plot,
    draw_line_swatch,
    draw_plot,
    finite_values,
    smooth_plot,
)
from paceline.observe.page.drawing.scales import NumberFormat, Scale
from paceline.observe.page.markup import Markup, element, join_markup
from paceline.observe.page.subjects import setup_section
from paceline.observe.page.subjects.loss_section import SMOOTHED_TITLE
from paceline.observe.page.subjects.overview_section import draw_badge
from paceline.observe.page.subjects.time_section import PART_WORDS
from paceline.observe.page.subjects.traffic_section import SENT_WORDS
from paceline.trace import DESTINATIONS, STEP_PARTS

Datas = Sequence[Mapping[str, Any]]


def draw_runs(datas: Datas) -> Markup:
    """Draw the figures of the runs side by side, with the verdict on each."""
    head = ("run", "loss", "steps", "a step", "samples/s", "time", "compute", "sent in a step")
    rows = (
        (
            join_markup(
                draw_line_swatch(at),
                " ",
                label,
                *([] if data["ended"] else [" ", draw_badge(data)]),
            ),
            draw_figure(data, ("final_loss",), scales.format_number),
            draw_figure(data, ("steps",), scales.format_whole),
            draw_sum(data, ("step_seconds",), scales.format_seconds),
            draw_figure(data, ("samples_per_second",), scales.format_whole),
            draw_figure(data, ("seconds",), scales.format_clock),
            draw_share(data, ("step_seconds", "compute"), ("step_seconds",)),
            draw_sum(data, ("bytes_sent",), scales.format_nbytes),
        )
        for at, (label, data) in enumerate(zip(label_runs(datas), datas, strict=True))
    )
    verdicts = (
        element("li", None, element("b", None, label), *_verdict_parts(data))
        for label, data in zip(label_runs(datas), datas, strict=True)
    )
    title = element("h1", None, f"{len(datas)} runs compared")
    return join_markup(
        title,
        make_table(head, _mark_cells(rows), "The runs"),
        element("ul", {"class": "verdicts"}, verdicts),
    )


def _verdict_parts(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of the verdict on a run."""
    yield ": " if data["ended"] else f" {data['standing']['words']}. "
    yield " ".join(data["verdict"])


def label_runs(datas: Datas) -> list[str]:
    """Return the names of the runs, with a number if two have the same name."""
    names = [str(data["name"]) for data in datas]
    return [
        name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names, 1)
    ]


def _mark_cells(rows: Iterator[tuple[Markup, ...]]) -> list[Sequence[Markup]]:
    """Add to each cell the index of its run, for readers who compare figures with summaries."""
    return [
        [element("span", {"data-run": at}, cell) for cell in row] for at, row in enumerate(rows)
    ]


def draw_losses(datas: Datas) -> Markup | None:
    """Draw the loss of each run against steps, seconds and bytes.

    Other values that all runs have logged are drawn against steps. None if there is no such value.
    """
    if not (common := _common_names(datas)):
        return None
    name, *other_names = common
    # Bytes between hosts are the scarce ones, so they are the axis if any run has sent some.
    between = any(read_number(data, "bytes_sent", "between") for data in datas)
    sent = "between" if between else "within"
    ways: Sequence[tuple[str, str, NumberFormat]] = (
        ("step", "steps", scales.format_short),
        ("time", "seconds", scales.format_clock),
        (sent, f"bytes that all workers have sent {SENT_WORDS[sent]}", scales.format_nbytes),
    )
    drawings = (_draw_against(datas, name, field, title, words) for field, title, words in ways)
    more = (
        _draw_against(
            datas, other, "step", "steps", scales.format_short, head=f"{other} against steps"
        )
        for other in other_names
    )
    return join_markup(
        element("p", None, f"{name}, the mean of each stretch of steps")
        if name != "loss"
        else None,
        *drawings,
        *more,
    )


def _common_names(datas: Datas) -> list[str]:
    """Return the names that all runs have logged; loss first, if it is one of them."""
    first, *other_runs = (list(data["values"]) for data in datas)
    return [name for name in first if all(name in names for names in other_runs)]


def _draw_against(
    datas: Datas, name: str, field: str, title: str, words: NumberFormat, *, head: str = ""
) -> Markup | None:
    """Draw a logged value of all runs against a quantity.

    Args:
        datas: Data of each run.
        name: Name of the value.
        field: Quantity of the horizontal axis: "step", "time", "within" or "between".
        title: Name of the quantity.
        words: Format of the quantity.
        head: Title of the drawing. Default: made of `title`.
    """
    # The index of a run is the kind of its line, the same in all drawings and in the table.
    curves = [
        Curve(label, data["values"][name][field], data["values"][name]["mean"], kind=at)
        for at, (label, data) in enumerate(zip(label_runs(datas), datas, strict=True))
        if data["values"][name][field]
    ]
    largest = max(finite_values([curve.x for curve in curves]), default=0.0)
    if not largest:
        return None
    x = scales.make_scale(0.0, largest, words, 6, zero=True)
    y = _make_value_axis([curve.y for curve in curves])
    plot = Plot(f"{name} against {title}", curves, x, y, title if field == "step" else "")
    more = fold_content(SMOOTHED_TITLE, draw_plot(smooth_plot(plot))) if field == "step" else None
    return join_markup(element("h3", None, head or f"against {title}"), draw_plot(plot), more)


def _make_value_axis(columns: Sequence[Numbers]) -> Scale:
    """Return the vertical axis for these columns."""
    all_values = finite_values(columns)
    return scales.make_scale(
        min(all_values, default=0.0), max(all_values, default=1.0), scales.format_number
    )


def draw_times(datas: Datas) -> Markup:
    """Draw the mean step of each run by parts."""
    return draw_bars(
        "A mean step",
        _make_bars(datas, "step_seconds", STEP_PARTS, scales.format_seconds),
        PART_WORDS,
    )


def draw_traffics(datas: Datas) -> Markup | None:
    """Draw the bytes of a step of each run; None if nothing was sent."""
    rows = _make_bars(datas, "bytes_sent", DESTINATIONS, scales.format_nbytes)
    return (
        draw_bars("Bytes of a step", rows, SENT_WORDS)
        if any(sum(row.sizes.values()) for row in rows)
        else None
    )


def _make_bars(
    datas: Datas, field: str, parts: Sequence[str], words: Callable[[float], str]
) -> list[Bar]:
    """Return a bar for each run, with the parts of a field."""
    return [
        Bar(
            label,
            {part: read_number(data, field, part) for part in parts},
            element("span", {"data-run": at}, draw_sum(data, (field,), words)),
        )
        for at, (label, data) in enumerate(zip(label_runs(datas), datas, strict=True))
    ]


def draw_differences(datas: Datas) -> Markup:
    """Draw a table of the settings that differ between the runs."""
    all_settings = [setup_section.describe_settings(data) for data in datas]
    names = dict.fromkeys(name for run_settings in all_settings for name in run_settings)
    # A setting that a run doesn't have counts as different.
    differ = [
        name for name in names if len({run_settings.get(name) for run_settings in all_settings}) > 1
    ]
    # A run without a live file tells its settings only in the summary.
    unknown = [
        label
        for label, data in zip(label_runs(datas), datas, strict=True)
        if find_field(data, "sync") is None
    ]
    hint = f"Settings of {', '.join(unknown)} are known once the run has ended." if unknown else ""
    note = element("p", {"class": "hint"}, hint) if hint else None
    if not differ:
        return join_markup(element("p", None, "Their settings are the same."), note)
    rows = (
        (name, *(run_settings.get(name, "–") for run_settings in all_settings)) for name in differ
    )
    return join_markup(
        make_table(("setting", *label_runs(datas)), rows, "Settings that differ"), note
    )
