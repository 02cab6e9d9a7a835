"""The time that workers get to save a checkpoint after SIGTERM, before the launcher ends them."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from paceline.cluster.launcher.worker import WorkerProcess


class SavingTime:
    """Time in which the workers of this host save a checkpoint and end by themselves.

    Args:
        seconds: Length of this time. 0: nothing is saved.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = 0.0  # monotonic
        self._savers: list[WorkerProcess] = []

    def begin(self, workers: Sequence[WorkerProcess], now: float) -> str:
        """Ask the workers to save, if they can. Returns a line about it, or "" if they can't.

        Workers report that they can as soon as all of them have begun to train. Before that there
        is nothing to save.
        """
        running = [worker for worker in workers if worker.ended_at is None]
        savers = [worker for worker in running if worker.has_reported("saves")]
        survives = any(worker.worker_number >= 0 for worker in running)
        is_late = any(worker.has_reported("closed") for worker in workers)
        if not self._seconds or is_late or not savers or (savers != running and not survives):
            return ""
        self._savers, self._ends_at = savers, now + self._seconds
        for worker in savers:
            # In a job that survives losses, workers end the run together when all have to leave.
            if survives:
                worker.send_order(b'{"leave": true}\n')
            else:
                worker.send_signal(signal.SIGTERM)
        return (
            "paceline: asked to end by SIGTERM: the run saves a checkpoint after its present step, "
            f"within {self._seconds:g} s"
        )

    def lasts(self, now: float) -> bool:
        """Whether the workers still have time. It ends early if one of them fails."""
        if not self._savers:
            return False
        has_failed = any(
            worker.ended_at is not None
            and not (worker.has_reported("closed") or worker.has_reported("left"))
            for worker in self._savers
        )
        if now < self._ends_at and not has_failed:
            return True
        self._savers = []
        return False

    def end(self) -> None:
        """End it now."""
        self._ends_at = 0.0

    def describe_rest(self, now: float) -> str:
        """Describe how long it still lasts, after another SIGTERM."""
        return (
            f"paceline: a checkpoint is being saved already, for {self._ends_at - now:.0f} s at "
            "most; Ctrl-C (SIGINT) ends the job without it"
        )


def pick_end_signal(worker: WorkerProcess) -> int:
    """Signal that ends a worker which didn't end by itself.

    SIGTERM, unless the worker would save a checkpoint at that.
    """
    return signal.SIGKILL if worker.has_reported("saves") else signal.SIGTERM
