"""What the living do when somebody was lost: a function of what all of them say, so that all come to the same plan.

Workers make the same calls (exchanges, means, meetings) in the same order, and none ends anywhere before all have begun it:

    call           ... k-2    k-1      k            a, b: have completed k-1, and were cut off in k
    a, b, d        ...  ok    ok       lost         c: was cut off in k-1, and is told by a what that gave
    c              ...  ok    lost                  d: is dead

Then all are at call k. If that lies in a turn of training whose gradients are not complete, the turn can't be completed any more: a part
of its batch died. So they are left out on all workers, nothing steps, and the same batch is dealt again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from paceline.errors import Mismatch, WorkerLost


@dataclass(frozen=True)
class WorkerProgress:
    """How far one worker has come."""

    origin: int  # what it was called at the start, or when it was let in; -1: it has just come, and has no state
    calls: int = 0  # that it has completed
    turn: int = 0  # the turn of training that is under way, from 1 on; 0: none

    def dump(self) -> list[int]:
        """As `WorkerProgress(*...)` takes it."""
        return list(astuple(self))


@dataclass(frozen=True)
class RecoveryPlan:
    """What all do."""

    members: tuple[int, ...]  # who goes on, in the order of new ranks: that of their origins
    origins: tuple[int, ...]
    fresh: tuple[int, ...]  # who has just come, and is let in later
    calls: int  # that all have completed then
    behind: frozenset[int]  # who is told what the last one gave
    teller: int  # by whom
    turn: int  # the turn in which no exchange of gradients can be completed any more; 0: none


def decide(reaches: Mapping[int, WorkerProgress]) -> RecoveryPlan:
    """The plan of the living.

    Raises `WorkerLost` if nobody is left who has the state, and `Mismatch` if workers had come apart before.
    """
    old = {worker: reach for worker, reach in reaches.items() if reach.origin >= 0}
    if not old:
        raise WorkerLost("nobody who has the state of this run is left: resume it from a checkpoint")
    members = tuple(sorted(old, key=lambda worker: old[worker].origin))
    calls = max(reach.calls for reach in old.values())
    if any(reach.calls < calls - 1 for reach in old.values()):
        counts = ", ".join(f"{reach.calls} by rank {reach.origin}" for reach in old.values())
        raise Mismatch(f"workers have come apart: they have completed different numbers of calls ({counts})")
    ahead = [worker for worker in members if old[worker].calls == calls]
    fresh = tuple(sorted(worker for worker in reaches if worker not in old))
    origins = tuple(old[worker].origin for worker in members)
    return RecoveryPlan(members, origins, fresh, calls, frozenset(members) - {*ahead}, ahead[0], max(old[worker].turn for worker in ahead))


def nearest(rank: int, sources: Sequence[int], hosts: Sequence[int]) -> int:
    """Who gives something to `rank`: somebody on its host; not all ask the same one."""
    near = [source for source in sources if hosts[source] == hosts[rank]] or sources
    return near[rank % len(near)]


def majority(hashes: Mapping[int, str]) -> tuple[str, list[int]]:
    """The hash that most have, and who has another. In a tie that of the lowest rank counts."""
    counts = Counter(hashes.values())
    most = max(counts.values())
    right = next(found for _, found in sorted(hashes.items()) if counts[found] == most)
    return right, sorted(rank for rank, found in hashes.items() if found != right)
