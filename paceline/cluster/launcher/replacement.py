"""Replaces workers that die while others can go on.

Dead workers are left out of the next view, and new ones are started in their place:

    lost -> out of the view -> judged, and started again after a pause -> ready -> in a later view
                            -> or, without restarts left, the others go on without it
                            -> or the job fails: too few workers, or the same error again
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.cluster.hosts.elastic import ElasticPeers
from paceline.cluster.hosts.peers import Failure
from paceline.cluster.launcher import janitor
from paceline.cluster.launcher.worker import WorkerProcess
from paceline.timings import DEFAULTS, ReplacementTimings

Suspect = Callable[[WorkerProcess], Failure | None]


@dataclass
class Replacement:
    """The workers of this host as members of an elastic job.

    Invariants: workers are known by their numbers, which are never used twice; ranks in
    `_restarts_due` and `_early_deaths` are names that stay the same over restarts. A worker goes
    through `_out_since` (it is lost, or leaves), then `_judged` (its process has ended, and what
    follows is decided). `_announced` has the workers that were reported as ready. Each failure in
    `_failures` ended one worker; the job fails with one of them when it can't go on.

    Args:
        assembly: The launchers of all hosts.
        minimum: Number of workers that the job needs.
        restarts: How many workers may still be started on this host.
        patience: Seconds for which fewer workers wait for others.
        again: Starts a worker in place of the one of this rank.
        say: Shows a line of text.
        timings: Waits and pauses.
    """

    assembly: ElasticPeers
    minimum: int
    restarts: int
    patience: float
    again: Callable[[int], None]
    say: Callable[[str], None]
    timings: ReplacementTimings = field(default=DEFAULTS.replacement, kw_only=True)
    # Workers that are lost or leave, and when that was noticed
    _gone: dict[int, float] = field(default_factory=dict)
    _buried: set[int] = field(default_factory=set)
    # When to start new workers, and as which ranks
    _due: list[tuple[float, int]] = field(default_factory=list)
    _told: dict[int, int] = field(default_factory=dict)  # number of the last view of each worker
    _called: set[int] = field(default_factory=set)  # workers that were reported as ready
    _causes: set[tuple[str, str]] = field(default_factory=set)  # errors that workers reported
    _failures: list[tuple[float, Failure]] = field(default_factory=list)  # and when they happened
    # By rank: how often in a row it died before it had trained for a while
    _falls: dict[int, int] = field(default_factory=dict)
    _stopped: dict[int, float] = field(default_factory=dict)  # workers in SIGSTOP, and since when
    _looked_at: float = 0.0
    _short_since: float | None = None  # since when there are fewer workers than the job needs
    _parting_since: float | None = None  # since when a host that leaves has no workers

    def active(self, workers: Sequence[WorkerProcess]) -> bool:
        """Whether losses are survived yet: all first workers have begun to train."""
        return bool(workers) and all(
            worker.joining or worker.said("surviving") for worker in workers
        )

    def members(self, workers: Sequence[WorkerProcess]) -> list[WorkerProcess]:
        """Workers of this host that are in the present view."""
        return [worker for worker in workers if worker.number in self.assembly.view.workers]

    @property
    def waiting(self) -> bool:
        """Whether a worker is going to be started."""
        return bool(self._due)

    def look(self, workers: Sequence[WorkerProcess]) -> None:
        """Report dead and ready workers to the other launchers, and send new views to the workers.

        This doesn't wait until a dead worker is reaped, so the others go on as soon as possible.
        """
        now = time.monotonic()
        candidates = [w for w in workers if w.number not in self._gone and not w.said("closed")]
        lost_workers = [
            w for w in candidates if w.ended is not None or w.said("failed") or w.said("left")
        ]
        if lost_workers:
            self._gone |= {worker.number: now for worker in lost_workers}
            self.assembly.lost([worker.number for worker in lost_workers])
        ready_numbers = [
            w.number
            for w in workers
            if w.ended is None
            and w.said("ready")
            and w.number not in self._called
            and w.number not in self._gone
        ]
        if ready_numbers:
            self._called |= {*ready_numbers}
            self.assembly.come(ready_numbers)
        # Hosts can join as soon as a worker has reported which run they would join.
        if self.assembly.run is None:
            opened = next(
                (
                    record
                    for worker in workers
                    for record in worker.records
                    if record["event"] == "opened"
                ),
                None,
            )
            self.assembly.run = (
                None if opened is None else json.dumps([opened["folder"], opened["seed"]])
            )
        if any(worker.said("closed") for worker in workers):
            self.assembly.tell_closing()
        self._free(workers, now)
        for worker in workers:
            for record in worker.take("broken"):
                self.assembly.renew(int(str(record["view"])))
        self._tell(workers)

    def leave(self, workers: Sequence[WorkerProcess]) -> bool:
        """Have all workers of this host leave after their present step.

        False if no other worker could go on.
        """
        other_seats = [
            seat
            for seat in self.assembly.view.seats
            if seat.host != self.assembly.host and seat.workers
        ]
        if not other_seats or not self.active(workers):
            return False
        self.say(
            "paceline: asked to leave (SIGTERM): the workers of this "
            "host go after their present step"
        )
        self._due.clear()
        self.restarts = 0
        for worker in workers:
            worker.order(b'{"leave": true}\n')
        return True

    def parted(self) -> bool:
        """Whether this host, which leaves and has no workers any more, can end.

        It can once the others have decided to go on without it, or when they take too long to
        decide.
        """
        now = time.monotonic()
        if self._parting_since is None:
            self._parting_since = now
            self.assembly.leave()
        return self.assembly.parted or now - self._parting_since > self.timings.part

    def _free(self, workers: Sequence[WorkerProcess], now: float) -> None:
        """End workers that were stopped (SIGSTOP) and don't go on.

        The other processes see only a worker that is late, and can't tell that it won't ever
        answer.
        """
        if now - self._looked_at < self.timings.look:
            return
        self._looked_at = now
        for worker in workers:
            if (
                worker.ended is not None
                or worker.number in self._gone
                or janitor.state(worker.process.pid) != "T"
            ):
                self._stopped.pop(worker.number, None)
            elif now - self._stopped.setdefault(worker.number, now) > self.timings.stopped:
                self.say(
                    f"paceline: rank {worker.rank} has been stopped "
                    f"for {self.timings.stopped:g} s (SIGSTOP): "
                    "it is ended, and counts as lost"
                )
                os.kill(worker.process.pid, signal.SIGKILL)

    def _tell(self, workers: Sequence[WorkerProcess]) -> None:
        """Send each worker the views that it hasn't got yet."""
        for worker in workers:
            for roster in self.assembly.rosters:
                if worker.ended is None and roster.number > self._told.get(worker.number, 0):
                    self._told[worker.number] = roster.number
                    worker.order(roster.dump())

    def turn(self, workers: Sequence[WorkerProcess], suspect: Suspect) -> Failure | None:
        """Decide what follows on the end of each worker, and start new ones when it is time.

        Args:
            workers: All workers that this host has started.
            suspect: Gives the failure of a worker that has ended.

        Returns:
            The failure that ends the job, if one does.
        """
        now = time.monotonic()
        # The run is over: no worker is let in any more.
        if self.assembly.closing:
            self._due.clear()
            for worker in workers:
                if worker.joining and not worker.said("surviving"):
                    self._buried.add(worker.number)
                    worker.send(signal.SIGTERM)
        for worker in workers:
            if (
                worker.number in self._gone
                and worker.ended is None
                and now - self._gone[worker.number] > self.timings.leave
            ):
                worker.send(signal.SIGKILL)
            if (
                worker.ended is None
                or worker.number in self._buried
                or (failure := suspect(worker)) is None
            ):
                continue
            self._buried.add(worker.number)
            # It had finished its run, or was asked to leave: that is no failure.
            if worker.said("closed") or worker.said("left"):
                continue
            self._failures.append((now - failure.age, failure))
            cause = next(
                (
                    (str(r["type"]), str(r["message"]))
                    for r in worker.records
                    if r["event"] == "failed" and not r["is_echo"]
                ),
                None,
            )
            if cause is not None and cause in self._causes:
                # The same error ends one worker after the other: it is in the script or the data.
                return failure
            self._causes |= set() if cause is None else {cause}
            self._replace(worker, failure, now)
        if self._due and now >= self._due[0][0]:
            self.again(self._due.pop(0)[1])
        if (
            self.assembly.joined
            and self._failures
            and not self._due
            and not any(w.ended is None or w.said("surviving") for w in workers)
        ):
            # No worker of this host ever got in, so the others go on without this host.
            self.assembly.verdict = self._failures[0][1]
        return self._too_few(workers)

    def _replace(self, worker: WorkerProcess, failure: Failure, now: float) -> None:
        """Start another worker in place of this one, if restarts are left."""
        # A new worker whose failure is an echo found no other workers to join: another one wouldn't
        # find any either.
        starts_again = self.restarts > 0 and not (worker.joining and failure.is_echo)
        self.say(
            f"{failure.line()}; {'it is started again' if starts_again else 'the others go on'}"
        )
        if starts_again:
            self.restarts -= 1
            self._due.append((now + self._pause(worker), worker.rank))
            self._due.sort()

    def _pause(self, worker: WorkerProcess) -> float:
        """Number of seconds before a worker is started again.

        It doubles each time the worker dies before it has trained for a while.
        """
        trains_since = next(
            (
                float(str(record["time"]))
                for record in worker.records
                if record["event"] == "surviving"
            ),
            math.inf,
        )
        was_steady = (worker.ended or time.time()) - trains_since > self.timings.steady
        self._falls[worker.rank] = early_deaths = (
            1 if was_steady else self._falls.get(worker.rank, 0) + 1
        )
        return float(
            min(self.timings.backoff * 2 ** (early_deaths - 1), self.timings.longest_backoff)
        )

    def _too_few(self, workers: Sequence[WorkerProcess]) -> Failure | None:
        """The failure that ends the job if there have been too few workers for too long."""
        members = self.assembly.view.workers
        if (
            not self._failures
            or len(members) >= self.minimum
            or any(worker.said("closed") for worker in workers)
        ):
            self._short_since = None
            return None
        self._short_since = self._short_since or time.monotonic()
        if members and time.monotonic() - self._short_since < self.patience:
            return None
        if not members and (self._due or any(worker.ended is None for worker in workers)):
            # New workers notice themselves that no others are left, and then fail. And a worker
            # that is failing may not have reported its error yet.
            return None
        # The last failure that is no echo: the job survived all earlier ones.
        return max(self._failures, key=lambda dated: (not dated[1].is_echo, dated[0]))[1]
