"""Eviction: a worker that makes the others wait repeatedly is asked to leave, between two turns.

looks at five flushes each      1       2       3       4
ranks that are late             2      2, 3     2
                                                2 goes ->

After three looks in a row rank 2 leaves. The turn that is under way is dealt again to the others,
so each sample still counts once.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.departure import Departure
from paceline.errors import UsageError
from paceline.record.history import RunHistory
from paceline.sync.abilities import Abilities
from paceline.unequal.stragglers.stragglers import FLUSHES, Judgement, named
from paceline.workers.groups import CurrentView

WARNINGS = 3  # looks in a row in which a worker has to be late


def check(abilities: Abilities) -> None:
    """Raise `UsageError` if workers don't wait for each other in each step, or have servers."""
    if abilities.remote is not None or abilities.sample_queue is not None:
        raise UsageError(
            "straggler='evict' is for strategies without servers; with a parameter server, "
            "backup_workers=1 and straggler='drop' keep a "
            "slow worker from being waited for"
        )


class WarningCount:
    """Counts the looks in a row in which each worker was late.

    A look that shares flushes with the one before doesn't count.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by the number of the worker
        self._looks = 0

    def add(self, names: Sequence[int], judgement: Judgement) -> int | None:
        """Take in a judgement over workers with these numbers.

        Returns the rank that has been late often enough, the latest of them.
        """
        self._looks += 1
        if self._looks % FLUSHES:
            return None
        self._counts = {
            names[rank]: self._counts.get(names[rank], 0) + 1 for rank in judgement.late
        }
        due = [rank for rank in judgement.late if self._counts[names[rank]] >= WARNINGS]
        return max(due, key=lambda rank: judgement.work[rank], default=None)


class Eviction:
    """Makes a worker leave that is late in `WARNINGS` looks, if enough workers remain.

    All workers choose the same one.
    """

    def __init__(self, view: CurrentView, leaving: Departure, history: RunHistory) -> None:
        self._view, self._leaving, self._history = view, leaving, history
        self._counts = WarningCount()
        self._names: tuple[int, ...] = ()
        self._kept: set[int] = set()  # workers that would have had to leave, but are needed

    def take(
        self, names: Sequence[int], judgement: Judgement | None, hosts: Sequence[str], me: int
    ) -> None:
        """Take in the sensor's judgement, the same on all workers; `me` is the rank of this one."""
        if tuple(names) != self._names:
            self._names, self._counts = tuple(names), WarningCount()
        if judgement is None:
            return
        rank = self._counts.add(names, judgement)
        if rank is None:
            return
        who = named(frozenset({rank}), hosts)
        why = f"{who} was late in {WARNINGS} looks in a row, for {judgement.words}"
        needed = self._view.worker.place.min_workers
        if len(names) <= needed:
            if names[rank] not in self._kept:
                self._kept.add(names[rank])
                self._history.announce_event(
                    f"{why}, and stays: the job needs {needed} workers (--min-workers)"
                )
            return
        self._history.announce_event(f"{why}: it leaves, and its samples are dealt to the others")
        if rank == me:
            self._leaving.let_go()
