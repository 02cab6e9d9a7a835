"""The plan after a loss: a function of the progress that all remaining workers report.

So all workers get the same plan. They make the same calls (exchanges, means, meetings) in the same
order, and no call ends on any worker before all have begun it:

    call           ... k-2    k-1      k
    a, b           ...  ok    ok       lost         have completed k-1, and were cut off in k
    c              ...  ok    lost                  was cut off in k-1, and gets its result from a
    d              ...  ok    ok       dead

Then all workers are at call k. If this call is in a turn of training whose gradients are not
complete, the turn can't be completed: a share of its batch was lost with the dead worker. So all
workers discard these gradients, no optimizer steps, and the same batch is dealt again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from paceline.errors import Mismatch, WorkerLost


@dataclass(frozen=True)
class WorkerProgress:
    """The progress of one worker: its completed calls, and the turn under way.

    Attributes:
        origin: Rank at the start of the job, or number of a worker that joined later. -1: a new
            worker, which has no state.
        calls: Number of completed calls.
        turn: The turn of training that is under way, counted from 1. 0: none.
        asked: Number of answers that its loaders got since the last completed call, about who takes
            part.
        admits: Whether it is letting new workers in, or about to.
    """

    origin: int
    calls: int = 0
    turn: int = 0
    answers_since_call: int = 0
    is_admitting: bool = False

    def to_list(self) -> list[int]:
        """List of the fields, for `WorkerProgress(*fields)`."""
        return list(astuple(self))


@dataclass(frozen=True)
class RecoveryPlan:
    """The plan that all workers follow after a loss.

    Attributes:
        members: Workers that go on, by their new ranks (sorted by origin).
        origins: Origins of these workers.
        fresh: New workers, which are let in later.
        calls: Number of calls that all have completed then.
        behind: Workers that get the result of the last call from another one.
        teller: Worker that sends this result.
        turn: The turn in which no exchange of gradients can be completed. 0: none.
        asked: Number of times that loaders of workers `behind` get the answer from before the loss,
            as those of the other workers did.
        admits: Whether all let new workers in at their next turn, or find that there are none.
    """

    members: tuple[int, ...]
    origins: tuple[int, ...]
    new_workers: tuple[int, ...]
    calls: int
    behind: frozenset[int]
    result_sender: int
    failed_turn: int
    repeated_answers: int = 0
    is_admitting: bool = False


def make_recovery_plan(reaches: Mapping[int, WorkerProgress]) -> RecoveryPlan:
    """Make the plan of the remaining workers from their progress.

    Raises `WorkerLost` if none of them has the state. Raises `Mismatch` if their calls differ by
    more than one, so they were not in lockstep before the loss.
    """
    with_state = {worker: reach for worker, reach in reaches.items() if reach.origin >= 0}
    if not with_state:
        raise WorkerLost(
            "no worker with the state of this run is left: resume it from a checkpoint"
        )
    members = tuple(sorted(with_state, key=lambda worker: with_state[worker].origin))
    calls = max(reach.calls for reach in with_state.values())
    if any(reach.calls < calls - 1 for reach in with_state.values()):
        counts = ", ".join(f"{reach.calls} by rank {reach.origin}" for reach in with_state.values())
        raise Mismatch(
            f"workers have come apart: they have completed different numbers of calls ({counts})"
        )
    # Workers that have completed the last call know the turn. The others catch up with them.
    ahead = [worker for worker in members if with_state[worker].calls == calls]
    new_workers = tuple(sorted(worker for worker in reaches if worker not in with_state))
    origins = tuple(with_state[worker].origin for worker in members)
    turn, asked = (
        max(with_state[worker].turn for worker in ahead),
        max(with_state[worker].answers_since_call for worker in ahead),
    )
    admits = bool(new_workers) or any(with_state[worker].is_admitting for worker in ahead)
    return RecoveryPlan(
        members,
        origins,
        new_workers,
        calls,
        frozenset(members) - {*ahead},
        ahead[0],
        turn,
        asked,
        admits,
    )
