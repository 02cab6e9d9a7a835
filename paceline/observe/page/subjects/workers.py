"""The section on who was late: by how much and for what each worker in a mean step, and over the
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, bars
from paceline.observe.page.drawing.figures import figure, find, number, summed
from paceline.observe.page.drawing.html_tables import folded, table
from paceline.observe.page.drawing.plots import across
from paceline.observe.page.markup import Markup, element, join
from paceline.observe.page.subjects import time
from paceline.trace import PARTS
from paceline.unequal.stragglers.causes import CAUSES, WORDS

SHADES = 5  # of a worker's row: how late it was
THICK, GAP = 16, 3  # pixels of such a row, and between two


def section(data: Mapping[str, Any]) -> Markup | None:
    """Draw how late workers were; None where there is one only, or it isn't known."""
    causes: Sequence[Mapping[str, float]] = find(data, "rank_late") or ()
    rows = _names(data)
    late = _late(data, rows) if len(causes) > 1 else None
    course = _course(data)
    return join(late, *course) if late or course else None


def _names(data: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the name of each worker, and where it stands in `rank_late`: those that take part
    first, by their ranks.
    """
    members = find(data, "members") or ()
    late = len(find(data, "rank_late") or ())
    if len(members) != late:
        return [(f"worker {at}", at) for at in range(late)]
    return [(label, path[1]) for label, _, path in time.named(data) if isinstance(path[1], int)]


def _late(data: Mapping[str, Any], rows: Sequence[tuple[str, int]]) -> Markup:
    step = sum(number(data, "step_seconds", part) for part in PARTS)
    drawn = [
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
    words = " and ".join(WORDS[cause] for cause in untold if cause in WORDS)
    return join(
        element("h3", None, "How much later than usual in a mean step, and why"),
        bars("Lateness", drawn[: time.MOST], WORDS, least=0.1 * step),
        element("p", {"class": "hint"}, f"Not told apart on this machine: {words}.")
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
    names = list(looks["workers"])[: time.MOST]
    rows = [
        element("span", {"class": "label"}, members.get(name, f"worker {name}")) for name in names
    ]
    drawn = [_row(name, looks, members.get(name, f"worker {name}")) for name in names]
    cells = [part for row in zip(rows, drawn, strict=True) for part in row]
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
    end = looks["time"][-1]
    begins = [0.0, *looks["time"][:-1]]
    pieces = list[Markup]()
    for begin, stop, found in zip(begins, looks["time"], looks["workers"][name], strict=True):
        if found is not None:
            said = f"{called}, {scales.clock(begin)} to {scales.clock(stop)}: late {found[-1]:.0%}"
            given = {
                "class": f"shade s{shade(found[-1])}",
                "x": f"{100 * begin / end:.2f}%",
                "width": f"{100 * (stop - begin) / end:.2f}%",
            }
            pieces.append(element("rect", {**given, "height": THICK}, element("title", None, said)))
    title = element("title", None, f"{called} over the run")
    return element(
        "svg",
        {"class": "plane", "width": "100%", "height": THICK + GAP, "role": "img"},
        title,
        *pieces,
    )


def shade(late: float) -> int:
    """Return how dark a part of the time is: 0 for on time."""
    return sum(late >= limit for limit in (0.05, 0.15, 0.3, 0.5))


def _shade(number: int) -> Markup:
    box = element("rect", {"class": f"shade s{number}", "width": 14, "height": 12})
    return element(
        "svg", {"class": "swatch", "width": 14, "height": 12, "aria-hidden": "true"}, box
    )


def shares(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Write the samples of a usual batch that each rank takes."""
    dealt = find(data, "loader", "shares") or ()
    if len(dealt) > 1:
        most = max(dealt)
        label = (
            data["ranks"]
            if len(data["ranks"]) == len(dealt)
            else [f"share {at}" for at in range(len(dealt))]
        )
        rows = [
            Bar(
                label[at],
                {"compute": float(each)},
                figure(data, ("loader", "shares", at), scales.whole),
            )
            for at, each in enumerate(dealt)
        ]
        yield element("h3", None, "Samples of a usual batch")
        yield bars(
            "Samples of a batch", rows[: time.MOST], {"compute": "samples"}, least=float(most)
        )
