"""The section on time: samples per second, and how steps spend their time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, draw_bars, draw_part_swatch
from paceline.observe.page.drawing.figures import (
    draw_figure,
    draw_share,
    draw_sum,
    find_field,
    read_number,
)
from paceline.observe.page.drawing.html_tables import fold_content, make_table
from paceline.observe.page.drawing.plots import Curve, Plot, draw_plot, finite_values
from paceline.observe.page.markup import Markup, element, join_markup
from paceline.observe.page.subjects import step_axis
from paceline.trace import STEP_PARTS

PART_WORDS: Mapping[str, str] = {part: part for part in STEP_PARTS}
# CSS classes of PARTS, in their order.
PART_KINDS = ("k0", "k1", "k2", "k3")
PART_MEANINGS = {
    "compute": "forward, backward and the optimizer",
    "exchange": "what could not be hidden behind compute",
    "wait": "for slower workers",
    "data": "for the next batch",
}
MAX_BARS = 64  # most workers that have a bar


def draw_step_time(data: Mapping[str, Any]) -> Markup | None:
    """Draw where the time of one run's steps went; None without a step."""
    if not data["course"]["step"]:
        return None
    return join_markup(
        _draw_parts(data),
        element("h3", None, "Over the run: seconds of a step, mean over workers"),
        _draw_stacked_parts(data),
        *_draw_workers(data),
    )


def draw_throughput(data: Mapping[str, Any]) -> Markup | None:
    """Draw the samples per second over the steps of one run.

    One curve counts only the time in steps, the other all time of the clock.
    """
    course = data["course"]
    steps = course["step"]
    if not steps:
        return None
    step_seconds = [
        sum(column)
        for column in zip(*(course["seconds"][part] for part in STEP_PARTS), strict=True)
    ]
    rates_in_steps = [
        _divide_by_seconds(samples, seconds)
        for samples, seconds in zip(course["samples"], step_seconds, strict=True)
    ]
    # The clock's time of a stretch goes from the end of the stretch before to its own end.
    times = [0.0, *course["time"]]
    clock_seconds = [later - sooner for sooner, later in pairwise(times)]
    rates_by_clock = [
        _divide_by_seconds(samples, seconds)
        for samples, seconds in zip(course["samples"], clock_seconds, strict=True)
    ]
    curves = [
        Curve("inside steps", steps, rates_in_steps, kind=0),
        Curve("by the clock", steps, rates_by_clock, kind=1),
    ]
    sorted_rates = sorted(finite_values([rates_in_steps]))
    high = sorted_rates[-1] if sorted_rates else 1.0
    y = scales.make_scale(0.0, 1.05 * high, scales.format_short, zero=True)
    plot = Plot(
        "Samples a second over steps",
        curves,
        step_axis.make_step_axis(steps, many=True),
        y,
        "step",
        step_axis.make_marks(data),
        step_axis.make_step_clock(data),
        180,
    )
    words = (
        "Where the second line falls below the first, time went between steps: "
        "checkpoints, evaluation, recovery."
    )
    return join_markup(draw_plot(plot), element("p", {"class": "hint"}, words))


def _divide_by_seconds(samples: float, seconds: float) -> float | None:
    """Return samples per second; None if no time has passed."""
    return samples / seconds if seconds > 0 else None


def _draw_parts(data: Mapping[str, Any]) -> Markup:
    """Draw a table of the parts of a step."""
    rows = (
        (
            join_markup(draw_part_swatch(part), " ", part),
            draw_share(data, ("step_seconds", part), ("step_seconds",)),
            draw_figure(data, ("step_seconds", part), scales.format_seconds),
            PART_MEANINGS[part],
        )
        for part in STEP_PARTS
    )
    return make_table(("part", "share", "of a step", ""), rows)


def _draw_stacked_parts(data: Mapping[str, Any]) -> Markup:
    """Draw the parts of a step over the run as stacked areas."""
    course = data["course"]
    counts, steps = course["count"], course["step"]
    columns = [
        [seconds / count for seconds, count in zip(course["seconds"][part], counts, strict=True)]
        for part in STEP_PARTS
    ]
    floor = [0.0] * len(steps)
    curves, read_outs = list[Curve](), list[Curve]()
    # Each area lies on the one before: between `floor` and `top`.
    for part, kind, column in zip(STEP_PARTS, PART_KINDS, columns, strict=True):
        top = [below + more for below, more in zip(floor, column, strict=True)]
        curves.append(Curve(part, steps, top, floor, top, area=kind))
        read_outs.append(Curve(part, steps, column))
        floor = top
    # The axis follows the 98th percentile, so that a single long step does not flatten all others.
    usual = sorted(floor)[max(len(floor) * 98 // 100 - 1, 0)]
    y = scales.make_scale(
        0.0, min(max(floor), 2.5 * usual) * 1.02, scales.format_seconds, zero=True
    )
    x, marks, time_of_step = (
        step_axis.make_step_axis(steps, many=True),
        step_axis.make_marks(data),
        step_axis.make_step_clock(data),
    )
    plot = Plot(
        "Seconds of a step by part, over steps",
        curves,
        x,
        y,
        "step",
        marks,
        time_of_step,
        read=read_outs,
    )
    legend = element(
        "p",
        {"class": "legend"},
        (element("span", {"class": "key"}, draw_part_swatch(part), part) for part in STEP_PARTS),
    )
    return join_markup(legend, draw_plot(plot))


def _draw_workers(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the mean step of each worker."""
    members = list_workers(data)
    if len(members) < 2:
        return
    rows = [
        Bar(
            label,
            {part: read_number(data, *path, part) for part in STEP_PARTS},
            draw_sum(data, path, scales.format_seconds),
            note,
        )
        for label, note, path in members[:MAX_BARS]
    ]
    yield element("h3", None, "For each worker: a mean step")
    yield draw_bars("A mean step", rows, PART_WORDS)
    if len(members) > MAX_BARS:
        yield element(
            "p",
            {"class": "hint"},
            f"These are the first {MAX_BARS} of {len(members)} workers; the table has all.",
        )
    cells = (
        (label, *(draw_figure(data, (*path, part), scales.format_seconds) for part in STEP_PARTS))
        for label, _, path in members
    )
    yield fold_content(
        "As a table", make_table(("worker", *STEP_PARTS), cells, "Seconds of a mean step")
    )


def list_workers(data: Mapping[str, Any]) -> list[tuple[str, str, tuple[str | int, ...]]]:
    """Return for each worker its name, a note, and the field of its seconds.

    Workers that have left come last.
    """
    members: Sequence[Mapping[str, Any]] = find_field(data, "members") or ()
    if not members:
        return [
            (f"rank {rank}", "", ("rank_seconds", rank))
            for rank in range(len(find_field(data, "rank_seconds") or ()))
        ]
    # Present workers by rank, then the others by number. `False` sorts before `True`.
    order = sorted(
        range(len(members)),
        key=lambda at: (members[at]["rank"] is None, members[at]["rank"], members[at]["worker"]),
    )
    return [
        (
            name_worker(data, members[at]),
            _describe_steps(data, members[at]),
            ("members", at, "seconds"),
        )
        for at in order
    ]


def name_worker(data: Mapping[str, Any], member: Mapping[str, Any]) -> str:
    """Return the name of a worker: its rank with its place in the mesh, and its host.

    A worker that has left has its number instead of a rank.
    """
    rank, host = member["rank"], member.get("host")
    where = f" on {host}" if host and (find_field(data, "hosts") or 1) > 1 else ""
    if rank is None:
        return f"worker {member['worker']}{where} (left)"
    ranks = data["ranks"]
    return f"{ranks[rank] if rank < len(ranks) else f'rank {rank}'}{where}"


def _describe_steps(data: Mapping[str, Any], member: Mapping[str, Any]) -> str:
    """Describe the steps in which a worker took part, unless it was all of them."""
    most_steps = max((each["steps"] for each in find_field(data, "members")), default=0)
    return (
        ""
        if member["steps"] >= most_steps
        else f"steps {member['first_step']:,} to {member['last_step']:,}"
    )
