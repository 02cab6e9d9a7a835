"""A split of layers into stages as a table, with times, memory and the predicted step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from paceline.formatting import format_bytes
from paceline.parallel.pipelining.split import LayerCost, SplitProblem, make_even_split

HEAD = ("stage", "worker", "layers", "time", "share", "parameters")


def describe_split(problem: SplitProblem, counts: Sequence[int]) -> str:
    """Write a split as a table of its stages, with each worker's memory and the time of a step.

    The time is compared with that of the even split.
    """
    times, placed, speeds = problem.stage_times(counts), problem.schedule.placed, problem.speeds
    busy = [
        (forward + back) / speeds[rank]
        for forward, back, rank in zip(times.forwards, times.backwards, placed, strict=True)
    ]
    rows = [HEAD]
    for stage, (start, stop) in enumerate(pairwise([0, *accumulate(counts)])):
        part = problem.costs[start:stop]
        cells = (
            _name_layers(part),
            _format_time(busy[stage]),
            f"{busy[stage] / (sum(busy) or 1):.0%}",
            format_bytes(sum(cost.parameters for cost in part)),
        )
        rows.append((str(stage), str(placed[stage]), *cells))
    return "\n".join(
        [*_align_rows(rows), *_describe_memory(problem, counts), *_describe_step(problem, counts)]
    )


def _name_layers(part: Sequence[LayerCost]) -> str:
    return part[0].name if len(part) == 1 else f"{part[0].name} to {part[-1].name} ({len(part)})"


def _align_rows(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if at < 3 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _describe_memory(problem: SplitProblem, counts: Sequence[int]) -> Iterator[str]:
    room = [
        "" if problem.memory is None else f" of {format_bytes(problem.memory[rank])}"
        for rank in range(problem.schedule.ranks)
    ]
    needs = enumerate(zip(problem.memory_bytes(counts), room, strict=True))
    yield "memory: " + ", ".join(
        f"worker {rank} {format_bytes(need)}{have}" for rank, (need, have) in needs
    )


def _describe_step(problem: SplitProblem, counts: Sequence[int]) -> Iterator[str]:
    """Write the predicted time of a step, and how much longer the even split would take."""
    timeline, schedule = problem.simulate_split(counts), problem.schedule
    text = (
        f"predicted: {_format_time(timeline.makespan)} for a step of {schedule.micro_batches} "
        f"micro-batches, {timeline.bubble:.0%} of it idle"
    )
    even = make_even_split(len(problem.costs), schedule.stages)
    other = problem.simulate_split(even).makespan
    if list(counts) != even and timeline.makespan:
        text += (
            f"; with as many layers each, {even}, {_format_time(other)}, "
            f"{other / timeline.makespan:.2f} times as long"
        )
    yield text


def _format_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
