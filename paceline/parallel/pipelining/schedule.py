"""The schedule of a pipeline as plain data: the actions of each rank, in order.

1f1b of 2 ranks and 3 micro-batches

        rank 0   F0 F1 .  .  B0 -- F2 B1 -- .  B2 --    F0   forward of micro-batch 0
        rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- .  .     B0   its backward, which needs the gradient
                                                             from the next stage
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "input", "weight"]
"""Halves of a `backward` are `input` (gradients of inputs) and `weight` (of parameters)."""

# The letter of each kind in drawings and traces.
LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}

COMPLETING_KINDS: tuple[Kind, ...] = ("backward", "weight")
"""After these, the activations of the forward are needed no more."""


@dataclass(frozen=True)
class Action:
    """One piece of work on one micro-batch in one stage.

    Stages are counted over the whole model, from 0 to ranks times chunks.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in stage {self.stage}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each rank along the axis `stage`, in order.

    `placed` has the rank that holds each stage. `rows` has the actions of each rank. Within a stage
    forwards are in ascending order of micro-batches, and so are backwards, inputs and weights. So
    messages from one stage to the next arrive in the order in which they are needed.
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
    def splits_backward(self) -> bool:
        """Whether backwards are done in two halves, `input` and `weight`."""
        return any(action.kind == "weight" for action in self.rows[0])

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in ascending order."""
        return tuple(stage for stage, place in enumerate(self.placed) if place == rank)

    def last_action(self, stage: int) -> Action:
        """The action after which the gradients of a stage's parameters are complete."""
        return Action(
            "weight" if self.splits_backward else "backward", stage, self.micro_batches - 1
        )

    def target_stage(self, action: Action) -> int | None:
        """The other stage that needs the result of an action; None if no other one does."""
        if action.kind == "weight":
            return None
        stage = action.stage + (1 if action.kind == "forward" else -1)
        return stage if 0 <= stage < self.stages else None

    def find_needed(self, action: Action) -> tuple[Action, ...]:
        """Find the actions that `action` needs, apart from the order of its own rank."""
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


def count_kept(schedule: PipelineSchedule, sizes: Sequence[float] | None = None) -> list[float]:
    """Count the activations that each rank keeps at once, at most.

    Activations are kept from a forward to the end of its backward, or of its `weight` half. The
    time that actions take doesn't matter.

    Args:
        schedule: Schedule to go through.
        sizes: What one micro-batch's activations count in each stage, such as bytes. Default: 1.
    """
    most = []
    # A row fixes the order of a rank's own actions, so its peak doesn't depend on other ranks.
    for row in schedule.rows:
        now = peak = 0.0
        for action in row:
            now += ((action.kind == "forward") - (action.kind in COMPLETING_KINDS)) * (
                1 if sizes is None else sizes[action.stage]
            )
            peak = max(peak, now)
        most.append(peak)
    return most


def order_actions(schedule: PipelineSchedule) -> Iterator[tuple[int, Action]]:
    """Yield all actions with their ranks, in an order in which each comes after all that it needs.

    Raises `AssertionError` if there is none, and names the waiting ranks: with such a schedule they
    would wait for each other for ever.
    """
    # Let each rank in turn go on as far as it can. If a whole turn moves none, there is a deadlock.
    done: set[Action] = set()
    at = [0] * schedule.ranks
    while any(at[rank] < len(row) for rank, row in enumerate(schedule.rows)):
        before = len(done)
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row) and all(
                need in done for need in schedule.find_needed(row[at[rank]])
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


def prove_schedule(schedule: PipelineSchedule) -> None:
    """Prove that every rank does all of its work once, in an order that can't deadlock.

    Raises `AssertionError` if that is not so. A rank sends its results at once, into buffers
    without bound, and waits only for what its next action needs. So it is enough that the actions
    can be done one after another in some order: then all of them get done, however fast or slow a
    rank is.
    """
    kinds: tuple[Kind, ...] = (
        ("forward", "input", "weight") if schedule.splits_backward else ("forward", "backward")
    )
    assert len(schedule.placed) == schedule.stages and set(schedule.placed) == set(
        range(schedule.ranks)
    ), f"placed: {schedule.placed}"
    for rank, row in enumerate(schedule.rows):
        work = [
            Action(kind, stage, micro_batch)
            for kind in kinds
            for stage in schedule.stages_of_rank(rank)
            for micro_batch in range(schedule.micro_batches)
        ]
        # Each action of the rank's stages comes exactly once.
        wrong = Counter(row)
        wrong.subtract(work)
        assert not any(wrong.values()), (
            f"rank {rank}: too often, or (below 0) too seldom: "
            f"{[(str(a), n) for a, n in wrong.items() if n]}"
        )
        # Messages of one kind between two stages share a lane, and so must keep their order.
        for kind in kinds:
            for stage in schedule.stages_of_rank(rank):
                numbers = [
                    action.micro_batch
                    for action in row
                    if (action.kind, action.stage) == (kind, stage)
                ]
                assert numbers == sorted(numbers), (
                    f"rank {rank}: {kind} of stage {stage} goes through micro-batches as {numbers}"
                )
    for _ in order_actions(schedule):
        pass
