"""All workers that took part in a run, in order of arrival: place, steps and time of each.

worker 0   [ steps 1 ............................ 320 ]      rank 0 at the end
worker 1   [ steps 1 ............................ 320 ]      rank 1
worker 2   [ steps 1 .... 90 ]                               lost or left: no rank any more
worker 3                         [ steps 200 .... 320 ]      rank 2: it replaced worker 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.record.outcome.worker_time import WorkerSeconds
from paceline.trace import DESTINATIONS, STEP_PARTS

# Seconds between two looks at all workers: at least this, and at least this share of the time so
# far. Looks become rarer, so that a day has only a few thousand.
LOOK_INTERVAL = 1.0
LOOK_SHARE = 0.002


@dataclass
class MemberTotals:
    """Totals over steps of one worker: all of them, or those since the last look.

    `late` is the seconds by which it was later than usual.
    """

    steps_made: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(STEP_PARTS))
    late: float = 0.0
    sent: list[int] = field(default_factory=lambda: [0] * len(DESTINATIONS))
    first_step: int = 0  # first step; 0 before there is one
    last_step: int = 0
    first_began: float = 0.0  # time of the run at which the first step began
    last_ended: float = 0.0

    def add_step(
        self, step: int, seconds: Sequence[float], sent: Sequence[int], time: float = 0.0
    ) -> None:
        """Add a step with its seconds of PARTS and bytes of SENT, which ended at `time`."""
        if not self.steps_made:
            self.first_began = max(time - sum(seconds), 0.0)
        self.last_ended = time
        self.steps_made += 1
        self.first_step, self.last_step = self.first_step or step, step
        for at, value in enumerate(seconds):
            self.seconds[at] += value
        for at, more in enumerate(sent):
            self.sent[at] += more

    def add_totals(self, other: MemberTotals) -> None:
        """Add the totals of later steps of the same worker."""
        self.first_began = self.first_began if self.steps_made else other.first_began
        self.last_ended = other.last_ended if other.steps_made else self.last_ended
        self.steps_made, self.late = self.steps_made + other.steps_made, self.late + other.late
        self.first_step, self.last_step = (
            self.first_step or other.first_step,
            other.last_step or self.last_step,
        )
        self.seconds = [a + b for a, b in zip(self.seconds, other.seconds, strict=True)]
        self.sent = [a + b for a, b in zip(self.sent, other.sent, strict=True)]


class RunMembers:
    """The members of a run by worker number, which stays the same when ranks change.

    Steps are counted in `_recent_totals` until the next look, and then move to `_all_totals`.
    """

    def __init__(self) -> None:
        self._all_totals: dict[int, MemberTotals] = {}
        self._recent_totals: dict[int, MemberTotals] = {}
        self._hosts: dict[int, str] = {}
        # Numbers of the current workers, in rank order.
        self._present_workers: tuple[int, ...] = ()
        # Time of the next look, in seconds since the start of the run.
        self._next_look = 0.0

    def set_workers(self, numbers: Sequence[int], hosts: Sequence[str]) -> None:
        """Set the current workers and their hosts, in rank order.

        `hosts` is empty if they aren't known.
        """
        self._present_workers = tuple(numbers)
        self._hosts.update(zip(numbers, hosts, strict=False))

    def add_step(
        self,
        worker: int,
        step: int,
        seconds: Sequence[float],
        sent: Sequence[int],
        time: float = 0.0,
    ) -> None:
        """Count a step of a worker.

        Args:
            worker: Number of the worker.
            step: Number of the step.
            seconds: Its seconds of PARTS.
            sent: Its bytes of SENT.
            time: Time of the run at which it ended.
        """
        self._totals_of_worker(worker).add_step(step, seconds, sent, time)

    def add_lateness(self, seconds: Mapping[int, float]) -> None:
        """Add the seconds by which workers were late."""
        for worker, late_seconds in seconds.items():
            self._totals_of_worker(worker).late += late_seconds

    def _totals_of_worker(self, worker: int) -> MemberTotals:
        """Return the totals of a worker since the last look."""
        return self._recent_totals.setdefault(worker, MemberTotals())

    def _move_recent(self) -> dict[int, MemberTotals]:
        """Move the counts since the last look to all counts, and return them."""
        recent, self._recent_totals = self._recent_totals, {}
        for worker, totals in recent.items():
            self._all_totals.setdefault(worker, MemberTotals()).add_totals(totals)
        return recent

    def take_look(self, time: float) -> dict[str, list[float]] | None:
        """Totals of each worker since the last look, if it is time for a look.

        Values are steps, the seconds of PARTS in them, and the seconds of lateness.
        """
        # A single worker needs no looks: its steps are in the lines anyway.
        if time < self._next_look or len(self._recent_totals) < 2:
            return None
        self._next_look = time + max(LOOK_INTERVAL, LOOK_SHARE * time)
        return {
            str(worker): [
                totals.steps_made,
                *(round(value, 6) for value in (*totals.seconds, totals.late)),
            ]
            for worker, totals in sorted(self._move_recent().items())
        }

    def sum_seconds(self, worker: int) -> dict[str, float]:
        """Sum up the seconds of PARTS of a worker, over all steps."""
        totals = self._add_up().get(worker, MemberTotals())
        return dict(zip(STEP_PARTS, totals.seconds, strict=True))

    def list_lost_times(self, log_began: float) -> list[WorkerSeconds]:
        """List the times of workers that were lost or have left, up to their last record.

        Args:
            log_began: Seconds from the start of the run to time 0 of the records.
        """
        lost = []
        for worker, totals in self._add_up().items():
            if worker not in self._present_workers:
                # A worker of the start was there before its first step. Others have joined for it.
                start = totals.first_began + log_began if totals.first_step == 1 else 0.0
                present = totals.last_ended - totals.first_began + start
                lost.append(WorkerSeconds(present, start, 0.0, 0.0, 0.0, tuple(totals.seconds)))
        return lost

    def _add_up(self) -> dict[int, MemberTotals]:
        """Add up all totals of each worker."""
        totals_by_worker = {
            worker: MemberTotals() for worker in sorted({*self._all_totals, *self._recent_totals})
        }
        # `_recent_totals` stays as it is, so that this call doesn't disturb the looks.
        for totals in (self._all_totals, self._recent_totals):
            for worker, member_totals in totals.items():
                totals_by_worker[worker].add_totals(member_totals)
        return totals_by_worker

    def to_fields(self) -> list[dict[str, Any]]:
        """Return the fields of each member for the summary.

        They are its number, host, rank at the end (None if it had left), steps, and the seconds and
        bytes of a mean step.
        """
        return [
            {
                "worker": worker,
                "host": self._hosts.get(worker),
                "rank": self._present_workers.index(worker)
                if worker in self._present_workers
                else None,
                "steps": totals.steps_made,
                "first_step": totals.first_step,
                "last_step": totals.last_step,
                "seconds": {
                    part: value / max(totals.steps_made, 1)
                    for part, value in zip(STEP_PARTS, totals.seconds, strict=True)
                },
                "late": totals.late / max(totals.steps_made, 1),
                "bytes_sent": {
                    where: value / max(totals.steps_made, 1)
                    for where, value in zip(DESTINATIONS, totals.sent, strict=True)
                },
            }
            for worker, totals in self._add_up().items()
        ]
