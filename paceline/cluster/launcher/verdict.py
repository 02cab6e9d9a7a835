"""The verdict on a host's failure: which of its workers failed first, once that one has had the
time to show itself.

record "failed"         an exception, with its time; an echo says itself that another worker is to
                        blame
exit code, signal       of a worker that is gone
left without a word     joined, exit code 0, never closed its run, while others train
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.cluster.hosts.peers import Failure
from paceline.cluster.launcher.last_words import last_words
from paceline.cluster.launcher.worker import WorkerProcess, ending
from paceline.timings import DEFAULTS, SupervisorTimings


class FailureSearch:
    """Searches the workers of this host for the one that failed first.

    `decided` tells whether the job is known to have failed.
    """

    def __init__(
        self,
        host: str,
        workers: Sequence[WorkerProcess],
        decided: Callable[[], bool],
        *,
        timings: SupervisorTimings = DEFAULTS.supervisor,
    ) -> None:
        self._host, self._workers, self._decided, self._timings = host, workers, decided, timings
        self._signed_at: float | None = None  # monotonic

    @property
    def signed(self) -> bool:
        """Whether there has been a sign of a failure."""
        return self._signed_at is not None

    def judge(self, now: float) -> Failure | None:
        """Name the worker that failed first; None while there is none, or an earlier one may
        still show itself.
        """
        if not self._suspects():
            return None
        self._signed_at = self._signed_at or now
        # They are asked again: after the first sign, one that left without a word is among them.
        first = cause(self._suspects(), self._timings.slack)
        grace = self._timings.echo if first.is_echo else self._timings.culprit
        if any(worker.rank == first.rank and worker.ended is None for worker in self._workers):
            # a record comes before the words, which the other hosts shall see too
            grace += self._timings.last_words
        over = all(worker.ended is not None for worker in self._workers)
        return first if over or now - self._signed_at > grace else None

    def suspect(self, worker: WorkerProcess) -> Failure | None:
        """Return the failure of this worker, if it has failed: by its own record, its exit code,
        or its leaving without a word.
        """
        now = time.time()
        age = 0.0 if worker.ended is None else now - worker.ended + self._timings.slack
        code = 0 if worker.was_sent or worker.ended is None else worker.code
        failure = Failure(worker.rank, self._host, code or 1, "", age=age)
        record = next((record for record in worker.records if record["event"] == "failed"), None)
        if record is not None:
            # An error at exit, as of a run without `with` that could not be closed, leaves a
            # script's own exit code as it is.
            is_echo = bool(record["is_echo"]) and not 1 < code <= 128
            # the worker may not have come to its end by itself
            code = code or int(str(record.get("code", 1)))
            words, age = (
                f"failed with exit code {code} ({record['type']})",
                now - float(str(record["time"])),
            )
            return replace(
                failure,
                code=code,
                words=words,
                is_echo=is_echo,
                age=age,
                tail=_tail(worker, record),
            )
        if code:
            # SIGABRT is how libraries answer to another's failure, so it gets no start over
            # records.
            start = self._timings.slack if code == 128 + signal.SIGABRT else 0.0
            return replace(failure, words=ending(code), age=age - start, tail=_tail(worker))
        silent = worker.ended is not None and not worker.was_sent and not worker.said("closed")
        if silent and worker.said("joined") and self._trains(worker):
            words = (
                "left in the middle (exit code 0) while others were training: "
                "it joined the run and never closed it"
            )
            return replace(failure, words=words, tail=_tail(worker))
        if silent and not worker.said("joined") and self._awaited(worker):
            words = (
                "ended (exit code 0) before it joined the run, where others wait for it: "
                "all workers have to come to pl.start"
            )
            return replace(failure, words=words, tail=_tail(worker))
        return None

    def _awaited(self, leaver: WorkerProcess) -> bool:
        """Whether others on this host are in a run that a worker never came to, well after it
        ended.
        """
        assert leaver.ended is not None
        return bool(self._others()) and time.time() - leaver.ended > self._timings.left

    def _others(self) -> list[WorkerProcess]:
        """List the workers that are in a run."""
        return [
            worker
            for worker in self._workers
            if worker.ended is None and worker.said("joined") and not worker.said("closed")
        ]

    def _suspects(self) -> list[Failure]:
        return [
            failure for worker in self._workers if (failure := self.suspect(worker)) is not None
        ]

    def _trains(self, leaver: WorkerProcess) -> bool:
        """Whether others go on (here, or on hosts that have not finished) well after a worker
        left.
        """
        if self.signed or self._decided():
            return True
        assert leaver.ended is not None
        others = self._others()
        ends = [worker.ended for worker in self._workers if worker.ended is not None]
        since = leaver.ended if others else max(ends)
        running = len(ends) < len(self._workers)
        return (bool(others) or not running) and time.time() - since > self._timings.left


def _tail(worker: WorkerProcess, record: Mapping[str, object] | None = None) -> str:
    """Return the last words of a worker that has failed, with the error of this record."""
    given = {} if record is None else record
    kind, more = given.get("type"), given.get("more")
    return last_words(
        worker.streams[1].tail(),
        None if kind is None else str(kind),
        more if isinstance(more, int) else None,
    )


def cause(suspects: list[Failure], slack: float) -> Failure:
    """Return the failure that came first; of several without a record that came together, one by
    a signal: the others noticed its death.
    """
    first = min(suspects, key=lambda failure: (failure.is_echo, -failure.age))
    if first.words != ending(first.code):
        return first
    together = [f for f in suspects if f.words == ending(f.code) and first.age - f.age < slack]
    return next((f for f in together if f.code > 128 and f.code != 128 + signal.SIGABRT), first)
