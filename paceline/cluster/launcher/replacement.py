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
from paceline.timings import DEFAULT_TIMINGS, ReplacementTimings

FindFailure = Callable[[WorkerProcess], Failure | None]


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

    elastic_peers: ElasticPeers
    minimum: int
    restarts: int
    patience: float
    start_worker: Callable[[int], None]
    say: Callable[[str], None]
    timings: ReplacementTimings = field(default=DEFAULT_TIMINGS.replacement, kw_only=True)
    # Workers that are lost or leave, and when that was noticed
    _out_since: dict[int, float] = field(default_factory=dict)
    _judged: set[int] = field(default_factory=set)
    # When to start new workers, and as which ranks
    _restarts_due: list[tuple[float, int]] = field(default_factory=list)
    _view_by_worker: dict[int, int] = field(
        default_factory=dict
    )  # number of the last view of each worker
    _announced: set[int] = field(default_factory=set)  # workers that were reported as ready
    _causes: set[tuple[str, str]] = field(default_factory=set)  # errors that workers reported
    _failures: list[tuple[float, Failure]] = field(default_factory=list)  # and when they happened
    # By rank: how often in a row it died before it had trained for a while
    _early_deaths: dict[int, int] = field(default_factory=dict)
    _stopped_since: dict[int, float] = field(
        default_factory=dict
    )  # workers in SIGSTOP, and since when
    _looked_at: float = 0.0
    _short_since: float | None = None  # since when there are fewer workers than the job needs
    _parting_since: float | None = None  # since when a host that leaves has no workers

    def is_active(self, workers: Sequence[WorkerProcess]) -> bool:
        """Whether losses are survived yet: all first workers have begun to train."""
        return bool(workers) and all(
            worker.is_joining or worker.has_reported("surviving") for worker in workers
        )

    def list_members(self, workers: Sequence[WorkerProcess]) -> list[WorkerProcess]:
        """Workers of this host that are in the present view."""
        return [
            worker for worker in workers if worker.worker_number in self.elastic_peers.view.workers
        ]

    @property
    def is_restart_due(self) -> bool:
        """Whether a worker is going to be started."""
        return bool(self._restarts_due)

    def report_changes(self, workers: Sequence[WorkerProcess]) -> None:
        """Report dead and ready workers to the other launchers, and send new views to the workers.

        This doesn't wait until a dead worker is reaped, so the others go on as soon as possible.
        """
        now = time.monotonic()
        candidates = [
            w
            for w in workers
            if w.worker_number not in self._out_since and not w.has_reported("closed")
        ]
        lost_workers = [
            w
            for w in candidates
            if w.ended_at is not None or w.has_reported("failed") or w.has_reported("left")
        ]
        if lost_workers:
            self._out_since |= {worker.worker_number: now for worker in lost_workers}
            self.elastic_peers.report_lost_workers(
                [worker.worker_number for worker in lost_workers]
            )
        ready_numbers = [
            w.worker_number
            for w in workers
            if w.ended_at is None
            and w.has_reported("ready")
            and w.worker_number not in self._announced
            and w.worker_number not in self._out_since
        ]
        if ready_numbers:
            self._announced |= {*ready_numbers}
            self.elastic_peers.report_new_workers(ready_numbers)
        # Hosts can join as soon as a worker has reported which run they would join.
        if self.elastic_peers.run_facts is None:
            opened = next(
                (
                    record
                    for worker in workers
                    for record in worker.records
                    if record["event"] == "opened"
                ),
                None,
            )
            self.elastic_peers.run_facts = (
                None if opened is None else json.dumps([opened["folder"], opened["seed"]])
            )
        if any(worker.has_reported("closed") for worker in workers):
            self.elastic_peers.tell_closing()
        self._end_stopped_workers(workers, now)
        for worker in workers:
            for record in worker.take_records("broken"):
                self.elastic_peers.request_renewal(int(str(record["view"])))
        self._send_views(workers)

    def order_leaving(self, workers: Sequence[WorkerProcess]) -> bool:
        """Have all workers of this host leave after their present step.

        False if no other worker could go on.
        """
        other_seats = [
            seat
            for seat in self.elastic_peers.view.seats
            if seat.host != self.elastic_peers.host and seat.workers
        ]
        if not other_seats or not self.is_active(workers):
            return False
        self.say(
            "paceline: asked to leave (SIGTERM): the workers of this "
            "host go after their present step"
        )
        self._restarts_due.clear()
        self.restarts = 0
        for worker in workers:
            worker.send_order(b'{"leave": true}\n')
        return True

    def has_parted(self) -> bool:
        """Whether this host, which leaves and has no workers any more, can end.

        It can once the others have decided to go on without it, or when they take too long to
        decide.
        """
        now = time.monotonic()
        if self._parting_since is None:
            self._parting_since = now
            self.elastic_peers.announce_leaving()
        return self.elastic_peers.has_parted or now - self._parting_since > self.timings.part

    def _end_stopped_workers(self, workers: Sequence[WorkerProcess], now: float) -> None:
        """End workers that were stopped (SIGSTOP) and don't go on.

        The other processes see only a worker that is late, and can't tell that it won't ever
        answer.
        """
        if now - self._looked_at < self.timings.look:
            return
        self._looked_at = now
        for worker in workers:
            if (
                worker.ended_at is not None
                or worker.worker_number in self._out_since
                or janitor.read_state(worker.process.pid) != "T"
            ):
                self._stopped_since.pop(worker.worker_number, None)
            elif (
                now - self._stopped_since.setdefault(worker.worker_number, now)
                > self.timings.stopped
            ):
                self.say(
                    f"paceline: rank {worker.rank} has been stopped "
                    f"for {self.timings.stopped:g} s (SIGSTOP): "
                    "it is ended, and counts as lost"
                )
                os.kill(worker.process.pid, signal.SIGKILL)

    def _send_views(self, workers: Sequence[WorkerProcess]) -> None:
        """Send each worker the views that it hasn't got yet."""
        for worker in workers:
            for roster in self.elastic_peers.rosters:
                if worker.ended_at is None and roster.number > self._view_by_worker.get(
                    worker.worker_number, 0
                ):
                    self._view_by_worker[worker.worker_number] = roster.number
                    worker.send_order(roster.dump())

    def replace_ended_workers(
        self, workers: Sequence[WorkerProcess], suspect: FindFailure
    ) -> Failure | None:
        """Decide what follows on the end of each worker, and start new ones when it is time.

        Args:
            workers: All workers that this host has started.
            suspect: Gives the failure of a worker that has ended.

        Returns:
            The failure that ends the job, if one does.
        """
        now = time.monotonic()
        # The run is over: no worker is let in any more.
        if self.elastic_peers.is_closing:
            self._restarts_due.clear()
            for worker in workers:
                if worker.is_joining and not worker.has_reported("surviving"):
                    self._judged.add(worker.worker_number)
                    worker.send_signal(signal.SIGTERM)
        for worker in workers:
            if (
                worker.worker_number in self._out_since
                and worker.ended_at is None
                and now - self._out_since[worker.worker_number] > self.timings.leave
            ):
                worker.send_signal(signal.SIGKILL)
            if (
                worker.ended_at is None
                or worker.worker_number in self._judged
                or (failure := suspect(worker)) is None
            ):
                continue
            self._judged.add(worker.worker_number)
            # It had finished its run, or was asked to leave: that is no failure.
            if worker.has_reported("closed") or worker.has_reported("left"):
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
            self._replace_worker(worker, failure, now)
        if self._restarts_due and now >= self._restarts_due[0][0]:
            self.start_worker(self._restarts_due.pop(0)[1])
        if (
            self.elastic_peers.has_joined_late
            and self._failures
            and not self._restarts_due
            and not any(w.ended_at is None or w.has_reported("surviving") for w in workers)
        ):
            # No worker of this host ever got in, so the others go on without this host.
            self.elastic_peers.verdict = self._failures[0][1]
        return self._find_final_failure(workers)

    def _replace_worker(self, worker: WorkerProcess, failure: Failure, now: float) -> None:
        """Start another worker in place of this one, if restarts are left."""
        # A new worker whose failure is an echo found no other workers to join: another one wouldn't
        # find any either.
        starts_again = self.restarts > 0 and not (worker.is_joining and failure.is_echo)
        self.say(
            f"{failure.summary_line()}; "
            f"{'it is started again' if starts_again else 'the others go on'}"
        )
        if starts_again:
            self.restarts -= 1
            self._restarts_due.append((now + self._get_pause_seconds(worker), worker.rank))
            self._restarts_due.sort()

    def _get_pause_seconds(self, worker: WorkerProcess) -> float:
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
        was_steady = (worker.ended_at or time.time()) - trains_since > self.timings.steady
        self._early_deaths[worker.rank] = early_deaths = (
            1 if was_steady else self._early_deaths.get(worker.rank, 0) + 1
        )
        return float(
            min(self.timings.backoff * 2 ** (early_deaths - 1), self.timings.longest_backoff)
        )

    def _find_final_failure(self, workers: Sequence[WorkerProcess]) -> Failure | None:
        """The failure that ends the job if there have been too few workers for too long."""
        members = self.elastic_peers.view.workers
        if (
            not self._failures
            or len(members) >= self.minimum
            or any(worker.has_reported("closed") for worker in workers)
        ):
            self._short_since = None
            return None
        self._short_since = self._short_since or time.monotonic()
        if members and time.monotonic() - self._short_since < self.patience:
            return None
        if not members and (
            self._restarts_due or any(worker.ended_at is None for worker in workers)
        ):
            # New workers notice themselves that no others are left, and then fail. And a worker
            # that is failing may not have reported its error yet.
            return None
        # The last failure that is no echo: the job survived all earlier ones.
        return max(self._failures, key=lambda dated: (not dated[1].is_echo, dated[0]))[1]
