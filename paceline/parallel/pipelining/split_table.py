"""A split as a table for people: what each stage has, how long it takes and what it needs, and
what a step would take in another split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from paceline.formatting import sized
from paceline.parallel.pipelining.split import LayerCost, SplitProblem, even_split

HEAD = ("stage", "worker", "layers", "time", "share", "parameters")


def describe_split(problem: SplitProblem, counts: Sequence[int]) -> str:
    """Return a table of the stages of a split, what each worker needs in memory, and the time of
    a step beside that of the even split.
    """
    times, placed, speeds = problem.times(counts), problem.schedule.placed, problem.speeds
    busy = [
        (forward + back) / speeds[rank]
        for forward, back, rank in zip(times.forwards, times.backwards, placed, strict=True)
    ]
    rows = [HEAD]
    for stage, (start, stop) in enumerate(pairwise([0, *accumulate(counts)])):
        part = problem.costs[start:stop]
        cells = (
            _name(part),
            _time(busy[stage]),
            f"{busy[stage] / (sum(busy) or 1):.0%}",
            sized(sum(cost.parameters for cost in part)),
        )
        rows.append((str(stage), str(placed[stage]), *cells))
    return "\n".join([*_aligned(rows), *_memory(problem, counts), *_steps(problem, counts)])


def _name(part: Sequence[LayerCost]) -> str:
    return part[0].name if len(part) == 1 else f"{part[0].name} to {part[-1].name} ({len(part)})"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if at < 3 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _memory(problem: SplitProblem, counts: Sequence[int]) -> Iterator[str]:
    room = [
        "" if problem.memory is None else f" of {sized(problem.memory[rank])}"
        for rank in range(problem.schedule.ranks)
    ]
    needs = enumerate(zip(problem.memory_bytes(counts), room, strict=True))
    yield "memory: " + ", ".join(
        f"worker {rank} {sized(need)}{have}" for rank, (need, have) in needs
    )


def _steps(problem: SplitProblem, counts: Sequence[int]) -> Iterator[str]:
    timeline, schedule = problem.timeline(counts), problem.schedule
    text = (
        f"predicted: {_time(timeline.makespan)} for a step of {schedule.micro_batches} "
        f"micro-batches, {timeline.bubble:.0%} of it idle"
    )
    even = even_split(len(problem.costs), schedule.stages)
    other = problem.timeline(even).makespan
    if list(counts) != even and timeline.makespan:
        text += (
            f"; with as many layers each, {even}, {_time(other)}, {other / timeline.makespan:.2f} "
            "times as long"
        )
    yield text


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
