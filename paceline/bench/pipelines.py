"""Draws and compares pipeline schedules by name, such as 1f1b:4x8."""

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

MAX_RANKS, MAX_MICRO_BATCHES, MAX_CHUNKS = 64, 256, 8  # larger pictures are hard to read
MAX_LINE_WIDTH = 140  # characters in a line of a picture
ALL_SCHEDULES = "all"


def show_schedules(asked: str | None, times: tuple[float, float, float], console: Console) -> None:
    """Print the picture of a schedule, or a table of all schedules.

    Args:
        asked: Schedule and sizes, such as 1f1b:4x8, or `all`. None raises an error with advice.
        times: Times of a forward pass, a backward pass and a transfer, in any unit.
        console: Console to print on.

    Raises:
        UsageError: A name, a size or a time is wrong.
    """
    if asked is None:
        raise UsageError(
            "bench pipeline draws schedules: give one, as in --draw 1f1b:4x8, or give --draw all "
            "to compare them"
        )
    name, colon, sizes = asked.partition(":")
    if name not in (*SCHEDULES, ALL_SCHEDULES):
        raise UsageError(
            f"{name} is not a schedule of pipelines; "
            f"{format_choices(name, (*SCHEDULES, ALL_SCHEDULES))}"
        )
    if not all(0 < time < float("inf") for time in times[:2]) or not 0 <= times[2] < float("inf"):
        raise UsageError(
            f"--forward {times[0]:g} --backward {times[1]:g} --transfer {times[2]:g}: "
            "give the first two more than 0, and the transfer 0 or more"
        )
    # `all` has default sizes, a schedule has none.
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
    # Not every schedule can have every size. The reasons are printed below the table.
    timelines, refusals = [], []
    for name in SCHEDULES:
        try:
            timelines.append(
                _make_timeline(
                    name, (ranks, micro_batches, chunks if name == "interleaved" else None), times
                )
            )
        except UsageError as error:
            refusals.append(str(error))
    console.print(tabulate_timelines(timelines))
    for line in refusals:
        console.print(line, soft_wrap=True)


def _make_timeline(
    name: str, sizes: tuple[int, int, int | None], times: tuple[float, float, float]
) -> PipelineTimeline:
    check_schedule(name, *sizes)
    schedule = make_schedule(name, *sizes)
    return simulate_schedule(schedule, make_even_times(schedule, *times))


def _parse_sizes(text: str, asked: str) -> tuple[int, int, int | None]:
    """Parse ranks x micro-batches, or ranks x micro-batches x chunks.

    `asked` is the text that errors show.
    """
    match = re.fullmatch(r"(\d{1,3})x(\d{1,3})(?:x(\d{1,3}))?", text, re.ASCII)
    sizes = [int(size) for size in match.groups() if size] if match else []
    if not sizes or any(
        not 0 < size <= limit
        for size, limit in zip(sizes, (MAX_RANKS, MAX_MICRO_BATCHES, MAX_CHUNKS), strict=False)
    ):
        raise UsageError(
            f"{asked}: after the colon go ranks x micro-batches, as in 1f1b:4x8; interleaved may "
            "have a third number, the stages on each rank, as in "
            f"interleaved:4x8x2; the limits are {MAX_RANKS}, {MAX_MICRO_BATCHES} and {MAX_CHUNKS}"
        )
    ranks, micro_batches, *chunks = sizes
    return ranks, micro_batches, chunks[0] if chunks else None
