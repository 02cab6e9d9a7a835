"""The schedules of pipelines: gpipe, 1f1b, interleaved, zero-bubble and zbv, of any size.

A schedule is judged by the activations that it keeps and by its bubble, the part of the time in
which ranks have nothing to do. Here `p` ranks work on `m` micro-batches, p or more. A forward of
all that a rank holds takes one unit of time, and so does each half of its backward.

                 micro-batches kept at once, at most      time until all is done
    gpipe        m                                        3m + 3(p-1)
    1f1b         p                                        3m + 3(p-1)
    interleaved  p + (p-1)/chunks, if p divides m         3m + 3(p-1)/chunks
    zero-bubble  p                                        3m + (p-1)
    zbv          p                                        3m + (p-1)/2, from m = 2p-1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice
from paceline.parallel.pipelining.schedule import Action, PipelineSchedule

Work = Sequence[tuple[int, int]]  # stages, each with a micro-batch


def make_gpipe(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Do all forwards, then all backwards. Huang et al. 2019.

        rank 0   F0 F1 F2 .  .  .  B0 -- B1 -- B2 --    F0   forward of micro-batch 0
        rank 1   .  F0 F1 F2 B0 -- B1 -- B2 -- .  .     B0   its backward, which takes twice as long

    Every rank keeps the activations of all micro-batches. Backwards begin with the first
    micro-batch, as those of torch do.
    """
    return _make_linear(
        "gpipe",
        micro_batches,
        [
            _lay_out_row(*_list_work(rank, micro_batches), ahead=micro_batches)
            for rank in range(ranks)
        ],
    )


def make_1f1b(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Do each backward as soon as possible. Narayanan et al. 2019 (PipeDream-Flush).

        rank 0   F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
        rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- .  .

    Rank r keeps the activations of at most ranks - r micro-batches.
    """
    rows = [
        _lay_out_row(*_list_work(rank, micro_batches), ahead=ranks - 1 - rank)
        for rank in range(ranks)
    ]
    return _make_linear("1f1b", micro_batches, rows)


def make_interleaved(ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    """Put `chunks` stages on each rank, stage s on rank s % ranks. Narayanan et al. 2021.

        rank 0   F0 F1 f0 f1 F2 .  b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .  b2 -- .  b3 -- B2 -- B3 --
        rank 1   .  F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .  .

        rank 0 has stages 0 (F, B) and 2 (f, b), rank 1 has stages 1 (F, B) and 3 (f, b)

    The bubble is smaller, and there are more messages. Micro-batches go through all stages of a
    rank in rounds. A round has as many of them as there are ranks, or more if some would be left
    over. Rank r keeps at most (chunks - 1) * round + 2 * (ranks - 1 - r) + 1 activations, each of
    one stage, which is a part of `chunks` of what the rank holds.
    """
    count = max(1, micro_batches // ranks)
    small, larger = divmod(micro_batches, count)
    # The micro-batches of each round: equal numbers if that is possible.
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
            _lay_out_row(
                forwards, backwards, ahead=(chunks - 1) * sizes[0] + 2 * (ranks - 1 - rank)
            )
        )
    placed = tuple(stage % ranks for stage in range(ranks * chunks))
    return PipelineSchedule("interleaved", ranks * chunks, micro_batches, placed, tuple(rows))


def make_zero_bubble(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Split backward in halves: gradients of parameters fill the bubble. ZB-H1 of Qi et al. 2023.

        rank 0   F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 I3 W3    I0   gradients of inputs
        rank 1   .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3    W0   gradients of parameters

    Other ranks wait for gradients of inputs only. Rank r does the `weight` half of a backward r
    micro-batches after the `input` half. So every rank keeps the activations of as many
    micro-batches as there are ranks, which is what the first rank keeps under 1f1b.
    """
    rows = [
        _lay_out_row(*_list_work(rank, micro_batches), ahead=ranks - 1 - rank, behind=rank)
        for rank in range(ranks)
    ]
    return _make_linear("zero-bubble", micro_batches, rows)


def make_zbv(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Split backward in halves, with two stages on each rank in a V. ZB-V of Qi et al. 2023.

        stage    0 -> 1 -> 2 -> 3
        rank     0    1    2    3        rank r has stages r and 2 * ranks - 1 - r
                 0 <- 1 <- 2 <- 3
        stage    7 <- 6 <- 5 <- 4

    The first rank begins, and computes the loss, so its backwards begin early. Every rank keeps at
    most 2 * ranks activations, each of one stage, which is half of what the rank holds: as much as
    the first rank keeps under 1f1b.
    """
    # Fewer micro-batches don't fill the pipeline: build rows for more, and leave out the actions of
    # those.
    whole = max(2 * ranks - 1, micro_batches)
    rows = [
        tuple(
            action
            for action in _lay_out_v(ranks, whole, rank)
            if action.micro_batch < micro_batches
        )
        for rank in range(ranks)
    ]
    placed = (*range(ranks), *reversed(range(ranks)))
    return PipelineSchedule("zbv", 2 * ranks, micro_batches, placed, tuple(rows))


CHUNKED_SCHEDULES: dict[str, Callable[[int, int, int], PipelineSchedule]] = {
    "interleaved": make_interleaved
}
"""Schedules for which the user chooses the number of stages on a rank."""

FIXED_SCHEDULES: dict[str, tuple[int, Callable[[int, int], PipelineSchedule]]] = {
    "gpipe": (1, make_gpipe),
    "1f1b": (1, make_1f1b),
    "zero-bubble": (1, make_zero_bubble),
    "zbv": (2, make_zbv),
}
"""Schedules that have a fixed number of stages on a rank."""

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
SCHEDULES: Final = get_args(ScheduleName)


def check_schedule(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> int:
    """Check a schedule that a user has chosen; return the number of stages on each rank.

    Raises `UsageError` for an impossible schedule, and for one that is of no use.
    """
    stages_per_rank = _find_chunks(name, ranks, micro_batches, chunks)
    if name in CHUNKED_SCHEDULES and micro_batches < ranks:
        raise UsageError(
            f"{name} with micro_batches={micro_batches} on {ranks} ranks: "
            "ranks would wait for each other in every round; "
            f"give it micro_batches={ranks} or more, or take 1f1b"
        )
    return stages_per_rank


def make_schedule(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None
) -> PipelineSchedule:
    """Build a schedule by name.

    There may be fewer micro-batches than ranks, as the last batch of an epoch may have few rows.

    Args:
        name: "gpipe", "1f1b", "interleaved", "zero-bubble" or "zbv".
        ranks: Number of workers along `stage`.
        micro_batches: Number of micro-batches.
        chunks: Number of stages on each rank. Default: 2 for "interleaved"; other schedules have a
            fixed number.

    Raises:
        UsageError: There is no such schedule.
    """
    chunks = _find_chunks(name, ranks, micro_batches, chunks)
    return (
        CHUNKED_SCHEDULES[name](ranks, micro_batches, chunks)
        if name in CHUNKED_SCHEDULES
        else FIXED_SCHEDULES[name][1](ranks, micro_batches)
    )


def _find_chunks(name: str, ranks: int, micro_batches: int, chunks: int | None) -> int:
    """Find the number of stages on each rank. Raises `UsageError` for an impossible schedule."""
    if wrong := describe_unknown_choice("schedule", name, ScheduleName):
        raise UsageError(wrong)
    for what, value in (("ranks", ranks), ("micro_batches", micro_batches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} with {what}={value!r}: it has to be at least 1")
    if name in CHUNKED_SCHEDULES:
        chunks = 2 if chunks is None else chunks
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 2:
            raise UsageError(
                f"{name} with chunks={chunks!r}: each rank has 2 stages or more; take 1f1b for one"
            )
        return chunks
    fixed = FIXED_SCHEDULES[name][0]
    if chunks not in (None, fixed):
        stages = "one stage" if fixed == 1 else f"{fixed} stages"
        raise UsageError(
            f"{name} with chunks={chunks!r}: each rank has {stages}; "
            "leave chunks out, or take interleaved"
        )
    return fixed


def _make_linear(
    name: str, micro_batches: int, rows: Sequence[tuple[Action, ...]]
) -> PipelineSchedule:
    """Make a schedule of rows whose only stage has the number of the rank."""
    return PipelineSchedule(name, len(rows), micro_batches, tuple(range(len(rows))), tuple(rows))


def _list_work(rank: int, micro_batches: int) -> tuple[Work, Work]:
    """List the forwards and the backwards of a rank whose only stage has its number."""
    work = [(rank, micro_batch) for micro_batch in range(micro_batches)]
    return work, work


def _lay_out_row(
    forwards: Work, backwards: Work, *, ahead: int, behind: int | None = None
) -> tuple[Action, ...]:
    """Lay out the work of a rank: `ahead` forwards, forwards and backwards in turn, more backwards.

    With `behind`, backwards are split, and each `weight` comes `behind` inputs after its own
    `input`.
    """
    row = [Action("forward", *work) for work in forwards[:ahead]]
    for index, work in enumerate(backwards):
        row += [
            Action("forward", *next_one) for next_one in forwards[ahead + index : ahead + index + 1]
        ]
        if behind is None:
            row.append(Action("backward", *work))
            continue
        row.append(Action("input", *work))
        if index >= behind:
            row.append(Action("weight", *backwards[index - behind]))
    if behind:
        row += [Action("weight", *work) for work in backwards[-behind:]]
    return tuple(row)


def _lay_out_v(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """Lay out the work of a rank with two stages in a V; micro_batches >= 2 * ranks - 1."""
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

    # Until the first micro-batch is back from the tip of the V.
    do(down, "F" * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        do(up, "F")
        do(down, "F")
    for _ in range(ranks - rank):
        do(up, "FIW")
    # The steady state: three units for each of the two stages, in turn.
    while done["forward", up] < micro_batches:
        do(down, "FIW" if done["forward", down] < micro_batches else "IW")
        do(up, "FIW")
    # No forwards are left. Inputs come first, as other ranks wait for them.
    for _ in range(rank):
        do(down, "I")
        do(up, "I")
    for _ in range(ranks - rank):
        do(down, "IW")
    do(up, "W" * (micro_batches - done["weight", up]))
    do(down, "W" * (micro_batches - done["weight", down]))
    return row
