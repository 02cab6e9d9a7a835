"""The section on lateness: how much and why each worker was late, in a step and over the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, bars
from paceline.observe.page.drawing.figures import figure, find, number, summed
from paceline.observe.page.drawing.html_tables import folded, table
from paceline.observe.page.drawing.plots import across
from paceline.observe.page.markup import Attributes, Markup, element, join
from paceline.observe.page.subjects import time
from paceline.trace import PARTS
from paceline.unequal.stragglers.causes import CAUSES, WORDS

# Height of such a row, and the gap between two, in pixels.
THICK, GAP = 16, 3


def section(data: Mapping[str, Any]) -> Markup | None:
    """Draw how late workers were; None for a single worker, or if it isn't known."""
    late_by_rank: Sequence[Mapping[str, float]] = find(data, "rank_late") or ()
    rows = _names(data)
    late = _late(data, rows) if len(late_by_rank) > 1 else None
    course = _course(data)
    return join(late, *course) if late or course else None


def _names(data: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the name of each worker, and its index in `rank_late`.

    Present workers come first, by rank.
    """
    members = find(data, "members") or ()
    late_count = len(find(data, "rank_late") or ())
    # Without members, nothing names the rows of `rank_late`.
    if len(members) != late_count:
        return [(f"worker {at}", at) for at in range(late_count)]
    return [(label, path[1]) for label, _, path in time.named(data) if isinstance(path[1], int)]


def _late(data: Mapping[str, Any], rows: Sequence[tuple[str, int]]) -> Markup:
    """Draw the lateness of each worker in a mean step, by cause."""
    step = sum(number(data, "step_seconds", part) for part in PARTS)
    bar_rows = [
        Bar(
            label,
            {cause: number(data, "rank_late", at, cause) for cause in CAUSES},
            summed(data, ("rank_late", at), scales.seconds),
        )
        for label, at in rows
    ]
    cells = (
        (label, *(figure(data, ("rank_late", at, cause), scales.seconds) for cause in CAUSES))
        for label, at in rows
    )
    untold = data["untold"]
    untold_words = " and ".join(WORDS[cause] for cause in untold if cause in WORDS)
    return join(
        element("h3", None, "How much later than usual in a mean step, and why"),
        bars("Lateness", bar_rows[: time.MOST], WORDS, least=0.1 * step),
        element("p", {"class": "hint"}, f"Not told apart on this machine: {untold_words}.")
        if untold
        else None,
        folded(
            "As a table",
            table(
                ("worker", *(WORDS[cause] for cause in CAUSES)),
                cells,
                "Seconds by which each was late, by cause",
            ),
        ),
    )


def _course(data: Mapping[str, Any]) -> list[Markup]:
    """Draw a row for each worker over the run: the darker, the later it was."""
    looks = data["looks"]
    if len(looks["time"]) < 2:
        return []
    members = {
        str(member["worker"]): time.called(data, member) for member in find(data, "members") or ()
    }
    # Looks know workers by number; members give the names.
    names = list(looks["workers"])[: time.MOST]
    rows = [
        element("span", {"class": "label"}, members.get(name, f"worker {name}")) for name in names
    ]
    drawn_rows = [_row(name, looks, members.get(name, f"worker {name}")) for name in names]
    # The grid has two columns: label and row.
    cells = [part for row in zip(rows, drawn_rows, strict=True) for part in row]
    axis = scales.scale(0.0, looks["time"][-1], scales.clock)
    below = element(
        "svg",
        {"class": "plane", "width": "100%", "height": 20, "aria-hidden": "true"},
        *across(axis, 14),
    )
    legend = (
        element("span", {"class": "key"}, _shade(shade), words)
        for shade, words in enumerate(("on time", "5%", "15%", "30%", "50%"))
    )
    return [
        element("h3", None, "Over the run: which part of its time each was late"),
        element("p", {"class": "legend"}, *legend),
        element("div", {"class": "rows"}, *cells, element("span", {"class": "label"}), below),
    ]


def _row(name: str, looks: Mapping[str, Any], called: str) -> Markup:
    """Draw the row of one worker."""
    end = looks["time"][-1]
    # A look covers the time since the look before it.
    begins = [0.0, *looks["time"][:-1]]
    pieces = list[Markup]()
    for begin, stop, shares in zip(begins, looks["time"], looks["workers"][name], strict=True):
        if shares is not None:
            description = (
                f"{called}, {scales.clock(begin)} to {scales.clock(stop)}: late {shares[-1]:.0%}"
            )
            attributes: Attributes = {
                "class": f"shade s{shade(shares[-1])}",
                "x": f"{100 * begin / end:.2f}%",
                "width": f"{100 * (stop - begin) / end:.2f}%",
                "height": THICK,
            }
            pieces.append(element("rect", attributes, element("title", None, description)))
    title = element("title", None, f"{called} over the run")
    return element(
        "svg",
        {"class": "plane", "width": "100%", "height": THICK + GAP, "role": "img"},
        title,
        *pieces,
    )


def shade(late: float) -> int:
    """Return the shade for a share of the time: 0 for on time, up to 4."""
    return sum(late >= limit for limit in (0.05, 0.15, 0.3, 0.5))


def _shade(index: int) -> Markup:
    """Draw a box of a shade for the legend."""
    box = element("rect", {"class": f"shade s{index}", "width": 14, "height": 12})
    return element(
        "svg", {"class": "swatch", "width": 14, "height": 12, "aria-hidden": "true"}, box
    )


def shares(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the samples of a usual batch that each rank takes."""
    samples_by_rank = find(data, "loader", "shares") or ()
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
                figure(data, ("loader", "shares", at), scales.whole),
            )
            for at, samples in enumerate(samples_by_rank)
        ]
        yield element("h3", None, "Samples of a usual batch")
        yield bars(
            "Samples of a batch", rows[: time.MOST], {"compute": "samples"}, least=float(largest)
        )
