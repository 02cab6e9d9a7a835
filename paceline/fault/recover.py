"""What the living do when somebody was lost in the middle of a turn: go on, take over the state of who is through, do it again, or go back.

    a turn    exchange . step . (exchange . step) . calls of all workers (means, gathers)      the next turn
              A worker that lost another in an exchange has *failed*: the rest of its loop body does nothing.

    somebody is in the next turn        failed ones take its state over, which is what the turn came to; the next turn is dealt again
    all in one turn, and through        nothing is missing: a call that failed is made again by the living
      "    some through, some failed    those take over the state of these
      "    nobody has stepped           the turn is dealt again: only buffers and generators have changed
      "    stepped in the middle        all go back to a copy from before their first step, and the turn is dealt again

Everything here is a function of what all the living say of themselves, so that all come to the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from paceline.errors import WorkerLost


@dataclass(frozen=True)
class Reach:
    """How far one worker has come. The living are in lockstep: neither `steps` nor `calls` of two of them differ by more than one."""

    steps: int  # turns that are over here
    passes: int = 0  # exchanges of gradients that were completed in the turn under way
    updates: int = 0  # steps of optimizers in it
    failed: bool = False  # an exchange of gradients in it was not
    whole: bool = False  # passes and updates are as many as a turn has
    undo: bool = False  # it has a copy from before its first step in it
    calls: int = 0  # calls of all workers that were completed in the run
    fresh: bool = False  # it has just come, and has no state

    def dump(self) -> list[Any]:
        """As `load` reads it."""
        return list(astuple(self))

    @classmethod
    def load(cls, value: Sequence[Any]) -> Reach:
        """From `dump`."""
        steps, passes, updates, failed, whole, undo, calls, fresh = value
        return cls(int(steps), int(passes), int(updates), bool(failed), bool(whole), bool(undo), int(calls), bool(fresh))


@dataclass(frozen=True)
class Plan:
    """What all do. Ranks are those of the new view."""

    steps: int  # turns that are over, for all, once the loop bodies under way are
    again: frozenset[int]  # whose present turn is dealt again
    undone: frozenset[int]  # who goes back to its copy first
    healed: Mapping[int, int]  # who takes over the state, and from whom
    answers: Mapping[int, int]  # who is told the result of the last call, and by whom


def decide(reaches: Mapping[int, Reach], hosts: Mapping[int, int]) -> Plan:
    """The plan of the living; `hosts` says where each of them is.

    Raises `WorkerLost` if nobody is left who has the state, or who can go back to it.
    """
    old = {rank: reach for rank, reach in reaches.items() if not reach.fresh}
    if not old:
        raise WorkerLost("nobody who has the state of this run is left: resume it from a checkpoint")
    steps, calls = (max(getattr(reach, name) for reach in old.values()) for name in ("steps", "calls"))
    first = [rank for rank, reach in old.items() if reach.steps == steps]
    knowing = [rank for rank, reach in old.items() if reach.calls == calls]
    answers = {rank: _nearest(rank, knowing, hosts) for rank in old if rank not in knowing}
    if len(first) < len(old):  # nobody can have stepped in a turn that others have not reached
        lacking = {rank for rank, reach in old.items() if reach.steps < steps and reach.failed}
        again, undone, sources = set(first), set[int](), first
    else:
        again, undone, lacking = _one_turn(old)
        sources = [rank for rank in old if rank not in lacking]
        steps += not again
    fresh = {rank for rank, reach in reaches.items() if reach.fresh}
    healed = {rank: _nearest(rank, sources, hosts) for rank in sorted(lacking | fresh)}
    answers = {rank: by for rank, by in answers.items() if rank not in healed}
    return Plan(steps, frozenset(again), frozenset(undone), healed, answers)


def _one_turn(old: Mapping[int, Reach]) -> tuple[set[int], set[int], set[int]]:
    """Who does the turn again, who goes back before that, and who lacks what others have; all are in the same turn."""
    failed = {rank for rank, reach in old.items() if reach.failed}
    whole = {rank for rank, reach in old.items() if reach.whole and not reach.failed}
    stepped = {rank for rank, reach in old.items() if reach.updates}
    if whole and whole | failed == set(old):
        return set(), set(), failed
    bound = {rank for rank in stepped if not old[rank].undo}
    if bound and len(bound) == len(old):
        raise WorkerLost(f"a worker was lost in the middle of the turn after step {next(iter(old.values())).steps}, and nobody can go back")
    return set(old), stepped - bound, bound


def _nearest(rank: int, sources: Sequence[int], hosts: Mapping[int, int]) -> int:
    """Who gives something to `rank`: somebody on its host; not all ask the same one."""
    near = [source for source in sources if hosts[source] == hosts[rank]] or sources
    return near[rank % len(near)]


def majority(hashes: Mapping[int, str]) -> tuple[str, list[int]]:
    """The hash that most have, and who has another. In a tie that of the lowest rank counts."""
    counts = Counter(hashes.values())
    most = max(counts.values())
    right = next(found for _, found in sorted(hashes.items()) if counts[found] == most)
    return right, sorted(rank for rank, found in hashes.items() if found != right)
