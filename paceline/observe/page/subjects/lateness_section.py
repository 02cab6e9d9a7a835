"""The section on lateness: how much and why each worker was late, in a step and over the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, draw_bars
from paceline.observe.page.drawing.figures import draw_figure, draw_sum, find_field, read_number
from paceline.observe.page.drawing.html_tables import fold_content, make_table
from paceline.observe.page.drawing.plots import draw_axis
from paceline.observe.page.markup import Attributes, Markup, element, join_markup
from paceline.observe.page.subjects import time_section
from paceline.trace import STEP_PARTS
from paceline.unequal.stragglers.causes import CAUSES, WORDS

# Height of such a row, and the gap between two, in pixels.
ROW_HEIGHT, ROW_GAP = 16, 3


def draw_lateness(data: Mapping[str, Any]) -> Markup | None:
    """Draw how late workers were; None for a single worker, or if it isn't known."""
    late_by_rank: Sequence[Mapping[str, float]] = find_field(data, "rank_late") or ()
    rows = _list_names(data)
    late = _draw_mean_lateness(data, rows) if len(late_by_rank) > 1 else None
    course = _draw_lateness_over_run(data)
    return join_markup(late, *course) if late or course else None


def _list_names(data: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the name of each worker, and its index in `rank_late`.

    Present workers come first, by rank.
    """
    members = find_field(data, "members") or ()
    late_count = len(find_field(data, "rank_late") or ())
    # Without members, nothing names the rows of `rank_late`.
    if len(members) != late_count:
        return [(f"worker {at}", at) for at in range(late_count)]
    return [
        (label, path[1])
        for label, _, path in time_section.list_workers(data)
        if isinstance(path[1], int)
    ]


def _draw_mean_lateness(data: Mapping[str, Any], rows: Sequence[tuple[str, int]]) -> Markup:
    """Draw the lateness of each worker in a mean step, by cause."""
    step = sum(read_number(data, "step_seconds", part) for part in STEP_PARTS)
    bar_rows = [
        Bar(
            label,
            {cause: read_number(data, "rank_late", at, cause) for cause in CAUSES},
            draw_sum(data, ("rank_late", at), scales.format_seconds),
        )
        for label, at in rows
    ]
    cells = (
        (
            label,
            *(
                draw_figure(data, ("rank_late", at, cause), scales.format_seconds)
                for cause in CAUSES
            ),
        )
        for label, at in rows
    )
    untold = data["untold"]
    untold_words = " and ".join(WORDS[cause] for cause in untold if cause in WORDS)
    return join_markup(
        element("h3", None, "How much later than usual in a mean step, and why"),
        draw_bars("Lateness", bar_rows[: time_section.MAX_BARS], WORDS, least=0.1 * step),
        element("p", {"class": "hint"}, f"Not told apart on this machine: {untold_words}.")
        if untold
        else None,
        fold_content(
            "As a table",
            make_table(
                ("worker", *(WORDS[cause] for cause in CAUSES)),
                cells,
                "Seconds by which each was late, by cause",
            ),
        ),
    )


def _draw_lateness_over_run(data: Mapping[str, Any]) -> list[Markup]:
    """Draw a row for each worker over the run: the darker, the later it was."""
    looks = data["looks"]
    if len(looks["time"]) < 2:
        return []
    members = {
        str(member["worker"]): time_section.name_worker(data, member)
        for member in find_field(data, "members") or ()
    }
    # Looks know workers by number; members give the names.
    names = list(looks["workers"])[: time_section.MAX_BARS]
    rows = [
        element("span", {"class": "label"}, members.get(name, f"worker {name}")) for name in names
    ]
    drawn_rows = [_draw_row(name, looks, members.get(name, f"worker {name}")) for name in names]
    # The grid has two columns: label and row.
    cells = [part for row in zip(rows, drawn_rows, strict=True) for part in row]
    axis = scales.make_scale(0.0, looks["time"][-1], scales.format_clock)
    below = element(
        "svg",
        {"class": "plane", "width": "100%", "height": 20, "aria-hidden": "true"},
        *draw_axis(axis, 14),
    )
    legend = (
        element("span", {"class": "key"}, _draw_shade(shade), words)
        for shade, words in enumerate(("on time", "5%", "15%", "30%", "50%"))
    )
    return [
        element("h3", None, "Over the run: which part of its time each was late"),
        element("p", {"class": "legend"}, *legend),
        element("div", {"class": "rows"}, *cells, element("span", {"class": "label"}), below),
    ]


def _draw_row(name: str, looks: Mapping[str, Any], called: str) -> Markup:
    """Draw the row of one worker."""
    end = looks["time"][-1]
    # A look covers the time since the look before it.
    begins = [0.0, *looks["time"][:-1]]
    pieces = list[Markup]()
    for begin, stop, shares in zip(begins, looks["time"], looks["workers"][name], strict=True):
        if shares is not None:
            description = (
                f"{called}, {scales.format_clock(begin)} to {scales.format_clock(stop)}: "
                f"late {shares[-1]:.0%}"
            )
            attributes: Attributes = {
                "class": f"shade s{shade_of_lateness(shares[-1])}",
                "x": f"{100 * begin / end:.2f}%",
                "width": f"{100 * (stop - begin) / end:.2f}%",
                "height": ROW_HEIGHT,
            }
            pieces.append(element("rect", attributes, element("title", None, description)))
    title = element("title", None, f"{called} over the run")
    return element(
        "svg",
        {"class": "plane", "width": "100%", "height": ROW_HEIGHT + ROW_GAP, "role": "img"},
        title,
        *pieces,
    )


def shade_of_lateness(late: float) -> int:
    """Return the shade for a share of the time: 0 for on time, up to 4."""
    return sum(late >= limit for limit in (0.05, 0.15, 0.3, 0.5))


def _draw_shade(index: int) -> Markup:
    """Draw a box of a shade for the legend."""
    box = element("rect", {"class": f"shade s{index}", "width": 14, "height": 12})
    return element(
        "svg", {"class": "swatch", "width": 14, "height": 12, "aria-hidden": "true"}, box
    )


def draw_shares(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the samples of a usual batch that each rank takes."""
    samples_by_rank = find_field(data, "loader", "shares") or ()
    if len(samples_by_rank) > 1:
        largest = max(samples_by_rank)
        names = (
            data["ranks"]
            if len(data["ranks"]) == len(samples_by_rank)
            else [f"share {at}" for at in range(len(samples_by_rank))]
        )
        rows = [
            Bar(
                names[at],
                {"compute": float(samples)},
                draw_figure(data, ("loader", "shares", at), scales.format_whole),
            )
            for at, samples in enumerate(samples_by_rank)
        ]
        yield element("h3", None, "Samples of a usual batch")
        yield draw_bars(
            "Samples of a batch",
            rows[: time_section.MAX_BARS],
            {"compute": "samples"},
            least=float(largest),
        )
