"""The section on time: samples a second, where steps' time went over the run, and for each
worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, bars, swatch
from paceline.observe.page.drawing.figures import figure, find, number, share, summed
from paceline.observe.page.drawing.html_tables import folded, table
from paceline.observe.page.drawing.plots import Curve, Plot, draw, finite
from paceline.observe.page.markup import Markup, element, join
from paceline.observe.page.subjects import axes
from paceline.trace import PARTS

WORDS: Mapping[str, str] = {part: part for part in PARTS}
KINDS = ("k0", "k1", "k2", "k3")
MEANING = {
    "compute": "forward, backward and the optimizer",
    "exchange": "what could not be hidden behind compute",
    "wait": "for slower workers",
    "data": "for the next batch",
}
MOST = 64  # workers that have a bar


def section(data: Mapping[str, Any]) -> Markup | None:
    """Draw where the time of one run's steps went; None where there was no step."""
    if not data["course"]["step"]:
        return None
    return join(
        _parts(data),
        element("h3", None, "Over the run: seconds of a step, mean over workers"),
        _stacked(data),
        *_workers(data),
    )


def throughput(data: Mapping[str, Any]) -> Markup | None:
    """Draw the samples a second over the steps of one run: inside of steps, and by the clock,
    with all that lies between them.
    """
    course = data["course"]
    steps = course["step"]
    if not steps:
        return None
    spent = [
        sum(column) for column in zip(*(course["seconds"][part] for part in PARTS), strict=True)
    ]
    inside = [
        _per(samples, seconds) for samples, seconds in zip(course["samples"], spent, strict=True)
    ]
    times = [0.0, *course["time"]]
    passed = [later - sooner for sooner, later in pairwise(times)]
    clock = [
        _per(samples, seconds) for samples, seconds in zip(course["samples"], passed, strict=True)
    ]
    curves = [
        Curve("inside steps", steps, inside, kind=0),
        Curve("by the clock", steps, clock, kind=1),
    ]
    most = sorted(finite([inside]))
    high = most[-1] if most else 1.0
    y = scales.scale(0.0, 1.05 * high, scales.short, zero=True)
    plot = Plot(
        "Samples a second over steps",
        curves,
        axes.of_steps(steps, many=True),
        y,
        "step",
        axes.marks(data),
        axes.clock(data),
        180,
    )
    words = (
        "Where the second line falls below the first, time went between steps: "
        "checkpoints, evaluation, recovery."
    )
    return join(draw(plot), element("p", {"class": "hint"}, words))


def _per(samples: float, seconds: float) -> float | None:
    return samples / seconds if seconds > 0 else None


def _parts(data: Mapping[str, Any]) -> Markup:
    """Write what each part of a step took."""
    rows = (
        (
            join(swatch(part), " ", part),
            share(data, ("step_seconds", part), ("step_seconds",)),
            figure(data, ("step_seconds", part), scales.seconds),
            MEANING[part],
        )
        for part in PARTS
    )
    return table(("part", "share", "of a step", ""), rows)


def _stacked(data: Mapping[str, Any]) -> Markup:
    course = data["course"]
    counts, steps = course["count"], course["step"]
    columns = [
        [seconds / count for seconds, count in zip(course["seconds"][part], counts, strict=True)]
        for part in PARTS
    ]
    floor = [0.0] * len(steps)
    curves, read = list[Curve](), list[Curve]()
    for part, kind, column in zip(PARTS, KINDS, columns, strict=True):
        top = [below + more for below, more in zip(floor, column, strict=True)]
        curves.append(Curve(part, steps, top, floor, top, area=kind))
        read.append(Curve(part, steps, column))
        floor = top
    # a single long step does not flatten all others
    usual = sorted(floor)[max(len(floor) * 98 // 100 - 1, 0)]
    y = scales.scale(0.0, min(max(floor), 2.5 * usual) * 1.02, scales.seconds, zero=True)
    x, marks, when = axes.of_steps(steps, many=True), axes.marks(data), axes.clock(data)
    plot = Plot(
        "Seconds of a step by part, over steps", curves, x, y, "step", marks, when, read=read
    )
    legend = element(
        "p",
        {"class": "legend"},
        (element("span", {"class": "key"}, swatch(part), part) for part in PARTS),
    )
    return join(legend, draw(plot))


def _workers(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the mean step of each worker."""
    members = named(data)
    if len(members) < 2:
        return
    rows = [
        Bar(
            label,
            {part: number(data, *path, part) for part in PARTS},
            summed(data, path, scales.seconds),
            note,
        )
        for label, note, path in members[:MOST]
    ]
    yield element("h3", None, "For each worker: a mean step")
    yield bars("A mean step", rows, WORDS)
    if len(members) > MOST:
        yield element(
            "p",
            {"class": "hint"},
            f"These are the first {MOST} of {len(members)} workers; the table has all.",
        )
    cells = (
        (label, *(figure(data, (*path, part), scales.seconds) for part in PARTS))
        for label, _, path in members
    )
    yield folded("As a table", table(("worker", *PARTS), cells, "Seconds of a mean step"))


def named(data: Mapping[str, Any]) -> list[tuple[str, str, tuple[str | int, ...]]]:
    """Return of each worker what it is called, what there is to say of it, and the field of its
    seconds; those who left come last.
    """
    members: Sequence[Mapping[str, Any]] = find(data, "members") or ()
    if not members:
        return [
            (f"rank {rank}", "", ("rank_seconds", rank))
            for rank in range(len(find(data, "rank_seconds") or ()))
        ]
    order = sorted(
        range(len(members)),
        key=lambda at: (members[at]["rank"] is None, members[at]["rank"], members[at]["worker"]),
    )
    return [
        (called(data, members[at]), _note(data, members[at]), ("members", at, "seconds"))
        for at in order
    ]


def called(data: Mapping[str, Any], member: Mapping[str, Any]) -> str:
    """Return the name of a worker: its rank with its place in the mesh and its host, or its
    number if it has left.
    """
    rank, host = member["rank"], member.get("host")
    where = f" on {host}" if host and (find(data, "hosts") or 1) > 1 else ""
    if rank is None:
        return f"worker {member['worker']}{where} (left)"
    ranks = data["ranks"]
    return f"{ranks[rank] if rank < len(ranks) else f'rank {rank}'}{where}"


def _note(data: Mapping[str, Any], member: Mapping[str, Any]) -> str:
    """Say in which steps a worker took part, where that isn't all of them."""
    whole = max((each["steps"] for each in find(data, "members")), default=0)
    return (
        ""
        if member["steps"] >= whole
        else f"steps {member['first_step']:,} to {member['last_step']:,}"
    )
