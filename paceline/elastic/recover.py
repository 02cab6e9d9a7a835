"""The plan after a loss: a function of the progress that all remaining workers report.

So all come to the same plan. Workers make the same calls (exchanges, means, meetings) in the same
order, and a call ends nowhere before all have begun it:

    call           ... k-2    k-1      k
    a, b           ...  ok    ok       lost         have completed k-1, and were cut off in k
    c              ...  ok    lost                  was cut off in k-1, and gets its result from a
    d              ...  ok    ok       dead

Then all are at call k. If that lies in a turn of training whose gradients are not complete, the
turn can't be completed any more: a part of its batch died. So all workers discard these gradients,
no optimizer steps, and the same batch is dealt again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from paceline.errors import Mismatch, WorkerLost


@dataclass(frozen=True)
class WorkerProgress:
    """The progress of one worker: its completed calls, and the turn under way."""

    # its rank at the start, or its number when it was let in; -1: it has just come, and has no
    # state
    origin: int
    calls: int = 0  # that it has completed
    turn: int = 0  # the turn of training that is under way, from 1 on; 0: none
    asked: int = 0  # how often its loaders have asked who takes part, since its last completed call
    admits: bool = False  # it is letting others in, or about to

    def dump(self) -> list[int]:
        """Write as the arguments of `WorkerProgress(*...)`."""
        return list(astuple(self))


@dataclass(frozen=True)
class RecoveryPlan:
    """The plan that all workers follow after a loss."""

    members: tuple[int, ...]  # those that go on, in the order of new ranks: that of their origins
    origins: tuple[int, ...]
    fresh: tuple[int, ...]  # newcomers, which are let in later
    calls: int  # that all have completed then
    behind: frozenset[int]  # those that get the result of the last call
    teller: int  # the origin that hands that result over
    turn: int  # the turn in which no exchange of gradients can be completed any more; 0: none
    # how often loaders of those that are `behind` are still told what was before, as those of the
    # others were
    asked: int = 0
    admits: bool = False  # all let others in at their next turn, or find that nobody has come


def decide(reaches: Mapping[int, WorkerProgress]) -> RecoveryPlan:
    """Decide the plan of the remaining workers.

    Raises `WorkerLost` if none of them has the state, and `Mismatch` if workers had come apart
    before.
    """
    old = {worker: reach for worker, reach in reaches.items() if reach.origin >= 0}
    if not old:
        raise WorkerLost(
            "nobody who has the state of this run is left: resume it from a checkpoint"
        )
    members = tuple(sorted(old, key=lambda worker: old[worker].origin))
    calls = max(reach.calls for reach in old.values())
    if any(reach.calls < calls - 1 for reach in old.values()):
        counts = ", ".join(f"{reach.calls} by rank {reach.origin}" for reach in old.values())
        raise Mismatch(
            f"workers have come apart: they have completed different numbers of calls ({counts})"
        )
    ahead = [worker for worker in members if old[worker].calls == calls]
    fresh = tuple(sorted(worker for worker in reaches if worker not in old))
    origins = tuple(old[worker].origin for worker in members)
    turn, asked = (
        max(old[worker].turn for worker in ahead),
        max(old[worker].asked for worker in ahead),
    )
    admits = bool(fresh) or any(old[worker].admits for worker in ahead)
    return RecoveryPlan(
        members, origins, fresh, calls, frozenset(members) - {*ahead}, ahead[0], turn, asked, admits
    )
