"""The schedule of a pipeline as plain data: which rank works on which micro-batch of which stage,
in order. Proved without a process.

1f1b of 2 ranks and 3 micro-batches

        rank 0   F0 F1 .  .  B0 -- F2 B1 -- .  B2 --       F0   forward of micro-batch 0
        rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- .  .        B0   its backward, once the next stage
                                                                has sent the gradient of its input
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "input", "weight"]
"""What is done: `backward` is all of it, `input` and `weight` its two halves: gradients of what
came in, and of parameters.
"""

COMPLETES: tuple[Kind, ...] = ("backward", "weight")
"""After these nothing needs the activations of their forward any more."""


@dataclass(frozen=True)
class Action:
    """One piece of work: `kind` of it, on one micro-batch, in one of all stages of the model
    (ranks times chunks), 0 the first.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in stage {self.stage}"


@dataclass(frozen=True)
class PipelineSchedule:
    """What each rank along the axis `stage` does, in order.

    `placed` has the rank that holds each stage. Within a stage forwards come in ascending order of
    micro-batches, and so do backwards, inputs and weights: what travels from one stage to the next
    arrives in the order in which it is needed.
    """

    name: str
    stages: int
    micro_batches: int
    placed: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def split(self) -> bool:
        """Whether backward is done in two halves, `input` and `weight`."""
        return any(action.kind == "weight" for action in self.rows[0])

    def held(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in ascending order."""
        return tuple(stage for stage, place in enumerate(self.placed) if place == rank)

    def last(self, stage: int) -> Action:
        """Return the action after which the gradients of a stage's parameters are complete."""
        return Action("weight" if self.split else "backward", stage, self.micro_batches - 1)

    def target(self, action: Action) -> int | None:
        """Return the stage that needs what `action` makes, other than its own; None where no
        other does.
        """
        if action.kind == "weight":
            return None
        stage = action.stage + (1 if action.kind == "forward" else -1)
        return stage if 0 <= stage < self.stages else None

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that have to be over before `action` can begin, but for its rank's
        own order; their ranks may differ.
        """
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "forward":
            return (Action("forward", stage - 1, micro_batch),) if stage else ()
        if action.kind == "weight":
            return (Action("input", stage, micro_batch),)
        forward = Action("forward", stage, micro_batch)
        return (
            (forward,)
            if stage == self.stages - 1
            else (forward, Action(action.kind, stage + 1, micro_batch))
        )


def most_kept(schedule: PipelineSchedule, sizes: Sequence[float] | None = None) -> list[float]:
    """Return what each rank keeps at once at most: activations are counted, or `sizes` has what
    those of a micro-batch take in each stage.

    Activations are kept from the forward to the end of the backward, or of its `weight` half. How
    long anything takes doesn't matter.
    """
    most = []
    for row in schedule.rows:
        kept = peak = 0.0
        for action in row:
            kept += ((action.kind == "forward") - (action.kind in COMPLETES)) * (
                1 if sizes is None else sizes[action.stage]
            )
            peak = max(peak, kept)
        most.append(peak)
    return most


def in_order(schedule: PipelineSchedule) -> Iterator[tuple[int, Action]]:
    """Yield all actions, each with its rank, in an order in which everything is made before it is
    needed.

    `AssertionError` says who waits for what where there is none: on such a schedule the ranks would
    wait for each other for ever.
    """
    done: set[Action] = set()
    at = [0] * schedule.ranks
    while any(at[rank] < len(row) for rank, row in enumerate(schedule.rows)):
        before = len(done)
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row) and all(
                need in done for need in schedule.needs(row[at[rank]])
            ):
                yield rank, row[at[rank]]
                done.add(row[at[rank]])
                at[rank] += 1
        stuck = [
            f"rank {rank} at {row[at[rank]]}"
            for rank, row in enumerate(schedule.rows)
            if at[rank] < len(row)
        ]
        assert len(done) > before, f"{schedule.name}: nobody can go on: {', '.join(stuck)}"


def prove(schedule: PipelineSchedule) -> None:
    """Prove that every rank does all of its work once, in an order that can't deadlock;
    `AssertionError` says where it fails.

    A rank sends what it has made at once, into buffers without bound, and waits only for what its
    next action needs. Then an order in which all actions can be done one after another is all that
    it takes: whichever rank is fast or slow, it will be gone through.
    """
    kinds: tuple[Kind, ...] = (
        ("forward", "input", "weight") if schedule.split else ("forward", "backward")
    )
    assert len(schedule.placed) == schedule.stages and set(schedule.placed) == set(
        range(schedule.ranks)
    ), f"placed: {schedule.placed}"
    for rank, row in enumerate(schedule.rows):
        wanted = [
            Action(kind, stage, number)
            for kind in kinds
            for stage in schedule.held(rank)
            for number in range(schedule.micro_batches)
        ]
        wrong = Counter(row)
        wrong.subtract(wanted)
        assert not any(wrong.values()), (
            f"rank {rank}: too often, or (below 0) too seldom: "
            f"{[(str(a), n) for a, n in wrong.items() if n]}"
        )
        for kind in kinds:
            for stage in schedule.held(rank):
                numbers = [
                    action.micro_batch
                    for action in row
                    if (action.kind, action.stage) == (kind, stage)
                ]
                assert numbers == sorted(numbers), (
                    f"rank {rank}: {kind} of stage {stage} goes through micro-batches as {numbers}"
                )
    for _ in in_order(schedule):
        pass
