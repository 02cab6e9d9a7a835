"""Draws the schedules of pipelines that are named on the command line, such as 1f1b:4x8, and
compares them.
"""

from __future__ import annotations

import re

from rich.console import Console

from paceline.errors import UsageError
from paceline.formatting import format_choices
from paceline.parallel.pipelining.drawing import draw_timeline, tabulate_timelines
from paceline.parallel.pipelining.schedules import SCHEDULES, check_schedule, make_schedule
from paceline.parallel.pipelining.simulate import (
    PipelineTimeline,
    make_even_times,
    simulate_schedule,
)

MAX_RANKS, MAX_MICRO_BATCHES, MAX_CHUNKS = 64, 256, 8  # larger pictures are no help
MAX_LINE_WIDTH = 140  # characters of a line of a picture
ALL_SCHEDULES = "all"


def show_schedules(asked: str | None, times: tuple[float, float, float], console: Console) -> None:
    """Print the picture of a schedule, or with `all` a table of all of them.

    `times` are of a forward, a backward and a transfer.
    """
    if asked is None:
        raise UsageError(
            "bench pipeline draws schedules so far: say which one, as in --draw 1f1b:4x8, or "
            "--draw all to compare them"
        )
    name, colon, sizes = asked.partition(":")
    if name not in (*SCHEDULES, ALL_SCHEDULES):
        raise UsageError(
            f"{name} is not a schedule of pipelines; "
            f"{format_choices(name, (*SCHEDULES, ALL_SCHEDULES))}"
        )
    if not all(0 < number < float("inf") for number in times[:2]) or not 0 <= times[2] < float(
        "inf"
    ):
        raise UsageError(
            f"--forward {times[0]:g} --backward {times[1]:g} --transfer {times[2]:g}: "
            "give the first two more than 0, none less"
        )
    ranks, micro_batches, chunks = _parse_sizes(
        sizes if colon or name != ALL_SCHEDULES else "4x8", asked
    )
    if name != ALL_SCHEDULES:
        console.print(
            draw_timeline(
                _make_timeline(name, (ranks, micro_batches, chunks), times),
                min(console.width, MAX_LINE_WIDTH),
            ),
            soft_wrap=True,
        )
        return
    console.print(
        f"{ranks} ranks, {micro_batches} micro-batches; forward {times[0]:g}, backward "
        f"{times[1]:g}, transfer {times[2]:g}"
    )
    timelines, refused = [], []
    for each in SCHEDULES:
        try:
            timelines.append(
                _make_timeline(
                    each, (ranks, micro_batches, chunks if each == "interleaved" else None), times
                )
            )
        except UsageError as error:
            refused.append(str(error))
    console.print(tabulate_timelines(timelines))
    for line in refused:
        console.print(line, soft_wrap=True)


def _make_timeline(
    name: str, sizes: tuple[int, int, int | None], times: tuple[float, float, float]
) -> PipelineTimeline:
    check_schedule(name, *sizes)
    schedule = make_schedule(name, *sizes)
    return simulate_schedule(schedule, make_even_times(schedule, *times))


def _parse_sizes(text: str, asked: str) -> tuple[int, int, int | None]:
    """Read ranks x micro-batches, or ranks x micro-batches x chunks; `asked` is what messages
    show.
    """
    found = re.fullmatch(r"(\d{1,3})x(\d{1,3})(?:x(\d{1,3}))?", text, re.ASCII)
    numbers = [int(number) for number in found.groups() if number] if found else []
    if not numbers or any(
        not 0 < number <= most
        for number, most in zip(numbers, (MAX_RANKS, MAX_MICRO_BATCHES, MAX_CHUNKS), strict=False)
    ):
        raise UsageError(
            f"{asked}: after the colon go ranks x micro-batches, as in 1f1b:4x8, and for "
            "interleaved the stages on each rank, as in "
            f"interleaved:4x8x2; at most {MAX_RANKS}, {MAX_MICRO_BATCHES} and {MAX_CHUNKS}"
        )
    ranks, micro_batches, *chunks = numbers
    return ranks, micro_batches, chunks[0] if chunks else None
