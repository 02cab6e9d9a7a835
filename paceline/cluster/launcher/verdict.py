"""The verdict on a host: which of its workers failed first.

    record "failed"         an exception, with its time; an *echo* if the exception says itself that
                            another worker is to blame
    exit code, signal       of a worker that has ended
    left without a word     it joined the run, never closed it, and ended with exit code 0 while
                            others train

Signs of a failure may come in any order, so the verdict waits a moment after the first sign, until
the worker that caused it has had the time to show itself.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.cluster.hosts.peers import Failure
from paceline.cluster.launcher.last_words import extract_last_words
from paceline.cluster.launcher.worker import WorkerProcess, describe_end
from paceline.timings import DEFAULT_TIMINGS, SupervisorTimings


class FailureSearch:
    """Searches the workers of this host for the one that failed first.

    Args:
        host: Name of this host.
        workers: All workers that this host has started. More may be added later.
        decided: Tells whether the job is known to have failed.
        timings: How long to wait for which signs.
    """

    def __init__(
        self,
        host: str,
        workers: Sequence[WorkerProcess],
        decided: Callable[[], bool],
        *,
        timings: SupervisorTimings = DEFAULT_TIMINGS.supervisor,
    ) -> None:
        self._host, self._workers, self._is_decided, self._timings = host, workers, decided, timings
        self._first_sign_at: float | None = None  # monotonic

    @property
    def has_sign(self) -> bool:
        """Whether there has been a sign of a failure."""
        return self._first_sign_at is not None

    def find_first_failure(self, now: float) -> Failure | None:
        """Name the worker that failed first.

        None if no worker has failed, or if one that failed earlier may still show itself.
        """
        if not self._list_failures():
            return None
        self._first_sign_at = self._first_sign_at or now
        # Search again: after the first sign, a worker that left without a word counts as failed.
        first = pick_first_failure(self._list_failures(), self._timings.slack)
        patience = self._timings.echo if first.is_echo else self._timings.culprit
        if any(worker.rank == first.rank and worker.ended_at is None for worker in self._workers):
            # Its record has come before its last words, which the other hosts are to see too.
            patience += self._timings.last_words
        all_ended = all(worker.ended_at is not None for worker in self._workers)
        return first if all_ended or now - self._first_sign_at > patience else None

    def find_failure(self, worker: WorkerProcess) -> Failure | None:
        """The failure of this worker; None if it hasn't failed.

        It is found by the worker's own record, its exit code, or its leaving without a word.
        """
        now = time.time()
        age = 0.0 if worker.ended_at is None else now - worker.ended_at + self._timings.slack
        code = 0 if worker.sent_signals or worker.ended_at is None else worker.exit_code
        failure = Failure(worker.rank, self._host, code or 1, "", age=age)
        record = next((record for record in worker.records if record["event"] == "failed"), None)
        if record is not None:
            # A script with an exit code of its own hasn't failed by an echo: its error at exit may
            # come from a run without `with` that could not be closed.
            is_echo = bool(record["is_echo"]) and not 1 < code <= 128
            # Without a code of its own, the worker was ended by the launcher.
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
                tail=_get_last_words(worker, record),
            )
        if code:
            # Exit codes count as a little older than records, as they are noticed late. Not so
            # SIGABRT, by which libraries react to the failure of another worker.
            head_start = self._timings.slack if code == 128 + signal.SIGABRT else 0.0
            return replace(
                failure,
                words=describe_end(code),
                age=age - head_start,
                tail=_get_last_words(worker),
            )
        left_silently = (
            worker.ended_at is not None
            and not worker.sent_signals
            and not worker.has_reported("closed")
        )
        if left_silently and worker.has_reported("joined") and self._others_train(worker):
            words = (
                "left in the middle (exit code 0) while others were training: "
                "it joined the run and never closed it"
            )
            return replace(failure, words=words, tail=_get_last_words(worker))
        if left_silently and not worker.has_reported("joined") and self._is_awaited(worker):
            words = (
                "ended (exit code 0) before it joined the run, where others wait for it: "
                "all workers have to come to pl.start"
            )
            return replace(failure, words=words, tail=_get_last_words(worker))
        return None

    def _is_awaited(self, leaver: WorkerProcess) -> bool:
        """Whether workers here are in a run that this one, which has ended, never joined."""
        assert leaver.ended_at is not None
        return (
            bool(self._list_training_workers())
            and time.time() - leaver.ended_at > self._timings.left
        )

    def _list_training_workers(self) -> list[WorkerProcess]:
        """List the workers that are in a run."""
        return [
            worker
            for worker in self._workers
            if worker.ended_at is None
            and worker.has_reported("joined")
            and not worker.has_reported("closed")
        ]

    def _list_failures(self) -> list[Failure]:
        """List the failures of all workers that have failed."""
        return [
            failure
            for worker in self._workers
            if (failure := self.find_failure(worker)) is not None
        ]

    def _others_train(self, leaver: WorkerProcess) -> bool:
        """Whether others still train well after this worker has left.

        They may be on this host, or on hosts that haven't finished.
        """
        if self.has_sign or self._is_decided():
            return True
        assert leaver.ended_at is not None
        others = self._list_training_workers()
        end_times = [worker.ended_at for worker in self._workers if worker.ended_at is not None]
        since = leaver.ended_at if others else max(end_times)
        some_run = len(end_times) < len(self._workers)
        return (bool(others) or not some_run) and time.time() - since > self._timings.left


def _get_last_words(worker: WorkerProcess, record: Mapping[str, object] | None = None) -> str:
    """Last words of a worker that has failed, beginning with the error of this record."""
    fields = {} if record is None else record
    kind, message_lines = fields.get("type"), fields.get("more")
    return extract_last_words(
        worker.streams[1].get_tail(),
        None if kind is None else str(kind),
        message_lines if isinstance(message_lines, int) else None,
    )


def pick_first_failure(suspects: list[Failure], slack: float) -> Failure:
    """Pick the failure that came first.

    Failures without a record that came within `slack` seconds have no order. Of these, one by a
    signal is the first, as the other workers noticed its death.
    """
    first = min(suspects, key=lambda failure: (failure.is_echo, -failure.age))
    if first.words != describe_end(first.code):
        return first
    together = [
        other
        for other in suspects
        if other.words == describe_end(other.code) and first.age - other.age < slack
    ]
    return next(
        (other for other in together if other.code > 128 and other.code != 128 + signal.SIGABRT),
        first,
    )
