"""Eviction: a worker that repeatedly makes the others wait has to leave, between two turns.

looks at five flushes each      1       2       3       4
ranks that are late             2      2, 3     2
                                                2 leaves ->

After three looks in a row rank 2 leaves. The turn that is under way is dealt again to the other
workers, so each sample still counts once.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.departure import Departure
from paceline.errors import UsageError
from paceline.record.history import RunHistory
from paceline.sync.abilities import Abilities
from paceline.unequal.stragglers.stragglers import FLUSHES, Judgement, name_ranks
from paceline.workers.groups import CurrentView

LATE_LOOKS = 3  # looks in a row in which a worker has to be late


def check_eviction(abilities: Abilities) -> None:
    """Raise `UsageError` if workers don't wait for each other in each step, or have servers."""
    if abilities.remote is not None or abilities.sample_queue is not None:
        raise UsageError(
            "straggler='evict' is for strategies without servers; with a parameter server, use "
            "backup_workers=1 or straggler='drop', so that a slow worker isn't waited for"
        )


class LateCount:
    """Counts the consecutive looks in which each worker was late.

    Looks overlap: each covers several flushes. Only looks that share no flush are counted.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by the number of the worker
        self._looks = 0

    def count_late_ranks(self, names: Sequence[int], judgement: Judgement) -> int | None:
        """Count the late ranks of a judgement. `names` has the number of each rank's worker.

        Returns the rank that was late in enough looks, or the slowest if there are several.
        """
        self._looks += 1
        if self._looks % FLUSHES:
            return None
        self._counts = {
            names[rank]: self._counts.get(names[rank], 0) + 1 for rank in judgement.late
        }
        due = [rank for rank in judgement.late if self._counts[names[rank]] >= LATE_LOOKS]
        return max(due, key=lambda rank: judgement.work[rank], default=None)


class Eviction:
    """Evicts a worker that is late in several looks in a row, if enough workers remain.

    All workers choose the same one.
    """

    def __init__(self, view: CurrentView, leaving: Departure, history: RunHistory) -> None:
        self._view, self._departure, self._history = view, leaving, history
        self._counts = LateCount()
        self._worker_numbers: tuple[int, ...] = ()
        self._needed_workers: set[int] = set()  # late workers that stay because the job needs them

    def handle_judgement(
        self, names: Sequence[int], judgement: Judgement | None, hosts: Sequence[str], me: int
    ) -> None:
        """Handle the sensor's judgement, which is equal on all workers.

        Args:
            names: Number of each rank's worker.
            judgement: The late ranks. None: there is no judgement yet.
            hosts: Host of each rank, for messages.
            me: Rank of this worker.
        """
        if tuple(names) != self._worker_numbers:
            self._worker_numbers, self._counts = tuple(names), LateCount()
        if judgement is None:
            return
        rank = self._counts.count_late_ranks(names, judgement)
        if rank is None:
            return
        worker_text = name_ranks(frozenset({rank}), hosts)
        reason = (
            f"{worker_text} was late in {LATE_LOOKS} looks in a row, for {judgement.cause_in_words}"
        )
        min_workers = self._view.worker.place.min_workers
        if len(names) <= min_workers:
            if names[rank] not in self._needed_workers:
                self._needed_workers.add(names[rank])
                self._history.announce_event(
                    f"{reason}, and stays: the job needs {min_workers} workers (--min-workers)"
                )
            return
        self._history.announce_event(
            f"{reason}: it leaves, and its samples are dealt to the others"
        )
        if rank == me:
            self._departure.release_worker()
