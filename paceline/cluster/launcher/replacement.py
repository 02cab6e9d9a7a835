"""Replaces workers that die while others can go on: has them left out of the view, and starts
others in their place.
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
    """The workers of this host as members of the job.

    `again` starts a worker in place of the one of this rank, `restarts` is how many are started in
    all, `minimum` how many the job needs, and `patience` for how many seconds fewer wait for
    others.
    """

    assembly: ElasticPeers
    minimum: int
    restarts: int
    patience: float
    again: Callable[[int], None]
    say: Callable[[str], None]
    timings: ReplacementTimings = field(default=DEFAULTS.replacement, kw_only=True)
    # workers that are out of the view, and since when
    _gone: dict[int, float] = field(default_factory=dict)
    _buried: set[int] = field(default_factory=set)
    # when others are started in their place, and as which ranks
    _due: list[tuple[float, int]] = field(default_factory=list)
    _told: dict[int, int] = field(default_factory=dict)  # the last view that each worker got
    _called: set[int] = field(default_factory=set)  # workers that are ready, as the others know
    _causes: set[tuple[str, str]] = field(default_factory=set)  # of failures, as the workers said
    _failures: list[tuple[float, Failure]] = field(default_factory=list)  # and when each happened
    # by rank: how often in a row it died before it had trained for a while
    _falls: dict[int, int] = field(default_factory=dict)
    _stopped: dict[int, float] = field(default_factory=dict)  # since when
    _looked_at: float = 0.0
    _short_since: float | None = None  # when there were fewer than the job needs
    _parting_since: float | None = None  # when the last worker of a host that leaves had gone

    def active(self, workers: Sequence[WorkerProcess]) -> bool:
        """Whether losses are survived by now: all workers of the start have begun to train."""
        return bool(workers) and all(
            worker.joining or worker.said("surviving") for worker in workers
        )

    def members(self, workers: Sequence[WorkerProcess]) -> list[WorkerProcess]:
        """Return the workers of the present view."""
        return [worker for worker in workers if worker.number in self.assembly.view.workers]

    @property
    def waiting(self) -> bool:
        """Whether a worker is about to be started."""
        return bool(self._due)

    def look(self, workers: Sequence[WorkerProcess]) -> None:
        """Have the dead left out of the view, at once, and ready workers let in; tell the
        others.
        """
        now = time.monotonic()
        left = [w for w in workers if w.number not in self._gone and not w.said("closed")]
        gone = [w for w in left if w.ended is not None or w.said("failed") or w.said("left")]
        if gone:
            self._gone |= {worker.number: now for worker in gone}
            self.assembly.lost([worker.number for worker in gone])
        ready = [
            w.number
            for w in workers
            if w.ended is None
            and w.said("ready")
            and w.number not in self._called
            and w.number not in self._gone
        ]
        if ready:
            self._called |= {*ready}
            self.assembly.come(ready)
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
        """Have all workers of this host go after their present turn; False where no others could
        go on.
        """
        others = [
            seat
            for seat in self.assembly.view.seats
            if seat.host != self.assembly.host and seat.workers
        ]
        if not others or not self.active(workers):
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
        """Whether a host that leaves, and has no workers any more, can go: the others have
        decided that, or take too long for it.
        """
        now = time.monotonic()
        if self._parting_since is None:
            self._parting_since = now
            self.assembly.leave()
        return self.assembly.parted or now - self._parting_since > self.timings.part

    def _free(self, workers: Sequence[WorkerProcess], now: float) -> None:
        """End a worker that was stopped (SIGSTOP) and doesn't go on: no other process can tell
        that it won't answer.
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
        """Send each worker the views that it doesn't know."""
        for worker in workers:
            for roster in self.assembly.rosters:
                if worker.ended is None and roster.number > self._told.get(worker.number, 0):
                    self._told[worker.number] = roster.number
                    worker.order(roster.dump())

    def turn(self, workers: Sequence[WorkerProcess], suspect: Suspect) -> Failure | None:
        """Remove workers that have ended, and start others; return the failure that ends the
        job, if one does.
        """
        now = time.monotonic()
        if self.assembly.closing:  # the run is over: no worker is let in any more
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
                # what ends one worker after the other is in the script, or in the data
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
            # none of this host ever got in: the others go on without it
            self.assembly.verdict = self._failures[0][1]
        return self._too_few(workers)

    def _replace(self, worker: WorkerProcess, failure: Failure, now: float) -> None:
        # no worker was left to join
        again = self.restarts > 0 and not (worker.joining and failure.is_echo)
        self.say(f"{failure.line()}; {'it is started again' if again else 'the others go on'}")
        if again:
            self.restarts -= 1
            self._due.append((now + self._pause(worker), worker.rank))
            self._due.sort()

    def _pause(self, worker: WorkerProcess) -> float:
        """Return the seconds before a worker is replaced: longer each time, where it dies
        repeatedly without having trained for a while.
        """
        trained = next(
            (
                float(str(record["time"]))
                for record in worker.records
                if record["event"] == "surviving"
            ),
            math.inf,
        )
        steady = (worker.ended or time.time()) - trained > self.timings.steady
        self._falls[worker.rank] = falls = 1 if steady else self._falls.get(worker.rank, 0) + 1
        return float(min(self.timings.backoff * 2 ** (falls - 1), self.timings.longest_backoff))

    def _too_few(self, workers: Sequence[WorkerProcess]) -> Failure | None:
        """Reason why the job can't go on, if there are too few workers."""
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
            # newcomers find out by themselves that nobody is left, and one that fails hasn't said
            # yet why
            return None
        # the last: the job survived the others
        return max(self._failures, key=lambda found: (not found[1].is_echo, found[0]))[1]
