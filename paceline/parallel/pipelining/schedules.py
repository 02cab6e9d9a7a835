"""The schedules of pipelines: gpipe, 1f1b, interleaved, zero-bubble and zbv, for any number of
ranks and micro-batches.

A schedule is known by what it keeps and by its bubble, the part of the time in which ranks have
nothing to do. Here `p` ranks work on `m` micro-batches, p or more. A forward of all that a rank
holds takes one unit of time, and so does each half of its backward.

                 micro-batches kept at once, at most      time until all is done
    gpipe        m                                        3m + 3(p-1)
    1f1b         p                                        3m + 3(p-1)
    interleaved  p + (p-1)/chunks, where p divides m      3m + 3(p-1)/chunks
    zero-bubble  p                                        3m + (p-1)
    zbv          p                                        3m + (p-1)/2, from m = 2p-1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

from paceline.errors import UsageError
from paceline.formatting import unknown
from paceline.parallel.pipelining.schedule import Action, PipelineSchedule

Work = Sequence[tuple[int, int]]  # stages, each with a micro-batch


def gpipe(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Do all forwards, then all backwards. Huang et al. 2019.

        rank 0   F0 F1 F2 .  .  .  B0 -- B1 -- B2 --       F0   forward of micro-batch 0
        rank 1   .  F0 F1 F2 B0 -- B1 -- B2 -- .  .        B0   its backward, which takes twice as
                                                                long

    Every rank keeps the activations of all micro-batches. Backwards begin with the first
    micro-batch, as those of torch do.
    """
    return _in_a_line(
        "gpipe",
        micro_batches,
        [_row(*_own(rank, micro_batches), ahead=micro_batches) for rank in range(ranks)],
    )


def one_forward_one_backward(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Do a backward as soon as there is one to do. Narayanan et al. 2019 (PipeDream-Flush).

        rank 0   F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
        rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- .  .

    Rank r keeps the activations of ranks - r micro-batches at most.
    """
    rows = [_row(*_own(rank, micro_batches), ahead=ranks - 1 - rank) for rank in range(ranks)]
    return _in_a_line("1f1b", micro_batches, rows)


def interleaved(ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    """Have `chunks` stages on each rank, stage s on rank s % ranks: a smaller bubble for more
    messages. Narayanan et al. 2021.

        rank 0   F0 F1 f0 f1 F2 .  b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .  b2 -- .  b3 -- B2 -- B3 --
                                   stages 0 (F, B) and 2 (f, b)
        rank 1   .  F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .  .
                    stages 1 (F, B) and 3 (f, b)

    Micro-batches go through all stages of a rank in rounds of as many as there are ranks, or more
    where that leaves some over. Rank r keeps (chunks - 1) * round + 2 * (ranks - 1 - r) + 1
    activations at most, each of a stage: one of `chunks` parts of what it holds.
    """
    count = max(1, micro_batches // ranks)
    small, larger = divmod(micro_batches, count)
    # of the rounds; equal ones where that is possible
    sizes = [small + (number < larger) for number in range(count)]
    starts = [sum(sizes[:number]) for number in range(count)]
    rounds = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    rows = []
    for rank in range(ranks):
        held = [chunk * ranks + rank for chunk in range(chunks)]
        forwards = [(stage, number) for numbers in rounds for stage in held for number in numbers]
        backwards = [
            (stage, number) for numbers in rounds for stage in reversed(held) for number in numbers
        ]
        rows.append(
            _row(forwards, backwards, ahead=(chunks - 1) * sizes[0] + 2 * (ranks - 1 - rank))
        )
    placed = tuple(stage % ranks for stage in range(ranks * chunks))
    return PipelineSchedule("interleaved", ranks * chunks, micro_batches, placed, tuple(rows))


def zero_bubble(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Split backward: only gradients of inputs hold others up, and those of parameters fill the
    bubble. ZB-H1 of Qi et al. 2023.

        rank 0   F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 I3 W3       I0   gradients of what came in
        rank 1   .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3       W0   gradients of parameters

    Rank r does the `weight` half of a backward r micro-batches after the `input` half. So every
    rank keeps the activations of as many micro-batches as there are ranks, which is what the first
    rank keeps under 1f1b.
    """
    rows = [
        _row(*_own(rank, micro_batches), ahead=ranks - 1 - rank, behind=rank)
        for rank in range(ranks)
    ]
    return _in_a_line("zero-bubble", micro_batches, rows)


def zbv(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Split backward, and have two stages on each rank, in a V: rank r has stages r and 2 * ranks -
    1 - r. ZB-V of Qi et al. 2023.

        stage    0 -> 1 -> 2 -> 3
        rank     0    1    2    3        the first rank begins, and has the loss: its backwards
                                         begin soon after
                 0 <- 1 <- 2 <- 3
        stage    7 <- 6 <- 5 <- 4

    Every rank keeps 2 * ranks activations at most, each of a stage, which is half of what the rank
    holds: as much as the first rank keeps under 1f1b.
    """
    # fewer don't fill the pipeline: what would be done for more is left out
    whole = max(2 * ranks - 1, micro_batches)
    rows = [
        tuple(
            action for action in _row_of_v(ranks, whole, rank) if action.micro_batch < micro_batches
        )
        for rank in range(ranks)
    ]
    placed = (*range(ranks), *reversed(range(ranks)))
    return PipelineSchedule("zbv", 2 * ranks, micro_batches, placed, tuple(rows))


CHUNKED: dict[str, Callable[[int, int, int], PipelineSchedule]] = {"interleaved": interleaved}
"""Schedules for which the user says how many stages a rank has."""

FIXED: dict[str, tuple[int, Callable[[int, int], PipelineSchedule]]] = {
    "gpipe": (1, gpipe),
    "1f1b": (1, one_forward_one_backward),
    "zero-bubble": (1, zero_bubble),
    "zbv": (2, zbv),
}
"""Schedules that say themselves how many stages a rank has."""

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
SCHEDULES: Final = get_args(ScheduleName)


def check(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> int:
    """Return how many stages each rank has under a schedule as a user asks for it; UsageError
    for what can't be, or is of no use.
    """
    found = _chunks(name, ranks, micro_batches, chunks)
    if name in CHUNKED and micro_batches < ranks:
        raise UsageError(
            f"{name} with micro_batches={micro_batches} on {ranks} ranks: "
            "ranks would wait for each other in every round; "
            f"give it micro_batches={ranks} or more, or take 1f1b"
        )
    return found


def make_schedule(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None
) -> PipelineSchedule:
    """Build a schedule by name, for any number of ranks and micro-batches: a last batch may have
    fewer rows than there are ranks.

    `chunks` is the number of stages on each rank: 2 where `interleaved` isn't told, and given by
    the schedule for the others. UsageError for what can't be.
    """
    chunks = _chunks(name, ranks, micro_batches, chunks)
    return (
        CHUNKED[name](ranks, micro_batches, chunks)
        if name in CHUNKED
        else FIXED[name][1](ranks, micro_batches)
    )


def _chunks(name: str, ranks: int, micro_batches: int, chunks: int | None) -> int:
    """Return how many stages each rank has; UsageError for what can't be."""
    if wrong := unknown("schedule", name, ScheduleName):
        raise UsageError(wrong)
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f"{name} with {what}={number!r}: there has to be 1 at least")
    if name in CHUNKED:
        chunks = 2 if chunks is None else chunks
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 2:
            raise UsageError(
                f"{name} with chunks={chunks!r}: each rank has 2 stages or more; take 1f1b for one"
            )
        return chunks
    fixed = FIXED[name][0]
    if chunks not in (None, fixed):
        stages = "one stage" if fixed == 1 else f"{fixed} stages"
        raise UsageError(
            f"{name} with chunks={chunks!r}: each rank has {stages}; leave chunks out, or take "
            "interleaved"
        )
    return fixed


def _in_a_line(
    name: str, micro_batches: int, rows: Sequence[tuple[Action, ...]]
) -> PipelineSchedule:
    """Make a schedule of rows whose stages have the numbers of their ranks."""
    return PipelineSchedule(name, len(rows), micro_batches, tuple(range(len(rows))), tuple(rows))


def _own(rank: int, micro_batches: int) -> tuple[Work, Work]:
    """Return the forwards and the backwards of a rank whose only stage has its number."""
    work = [(rank, number) for number in range(micro_batches)]
    return work, work


def _row(
    forwards: Work, backwards: Work, *, ahead: int, behind: int | None = None
) -> tuple[Action, ...]:
    """Lay the work of a rank out: `ahead` forwards, then a forward and a backward in turn, then the
    backwards that are left.

    With `behind` backwards are split, and each `weight` comes that many `input`s after its own.
    """
    row = [Action("forward", *work) for work in forwards[:ahead]]
    for number, work in enumerate(backwards):
        row += [
            Action("forward", *next_one)
            for next_one in forwards[ahead + number : ahead + number + 1]
        ]
        if behind is None:
            row.append(Action("backward", *work))
            continue
        row.append(Action("input", *work))
        if number >= behind:
            row.append(Action("weight", *backwards[number - behind]))
    if behind:
        row += [Action("weight", *work) for work in backwards[-behind:]]
    return tuple(row)


def _row_of_v(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """Lay the work of a rank with two stages in a V out, for 2 * ranks - 1 micro-batches or
    more.
    """
    down, up = rank, 2 * ranks - 1 - rank
    row: list[Action] = []
    done = dict.fromkeys(
        [(kind, stage) for kind in ("forward", "input", "weight") for stage in (down, up)], 0
    )

    def do(stage: int, letters: str) -> None:
        """Append the next forward (F), input (I) or weight (W) of a stage, for each letter."""
        for letter in letters:
            kind = {"F": "forward", "I": "input", "W": "weight"}[letter]
            row.append(Action(kind, stage, done[kind, stage]))  # type: ignore[arg-type]
            done[kind, stage] += 1

    # until the first micro-batch is back from the tip of the V
    do(down, "F" * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        do(up, "F")
        do(down, "F")
    for _ in range(ranks - rank):
        do(up, "FIW")
    # the steady state: three units for each stage, in turn
    while done["forward", up] < micro_batches:
        do(down, "FIW" if done["forward", down] < micro_batches else "IW")
        do(up, "FIW")
    for _ in range(rank):  # no forwards are left: inputs first, as others wait for them
        do(down, "I")
        do(up, "I")
    for _ in range(ranks - rank):
        do(down, "IW")
    do(up, "W" * (micro_batches - done["weight", up]))
    do(down, "W" * (micro_batches - done["weight", down]))
    return row
