"""Notices that this worker waits for others far longer than it ever did, and tells its launcher, which finds out who doesn't come."""

from __future__ import annotations

import faulthandler
import signal
import statistics
import threading
import time
from itertools import pairwise

from paceline.cluster import report
from paceline.cluster.discover import Place
from paceline.comm.ordered import Agreement

LEAST_SECONDS = 5.0
FACTOR, WIDEST = 10.0, 3.0  # times the median of what calls took to come, and times the longest
KNOWN = 8  # calls that have to be known
MARGIN = 4.0  # seconds before the deadline
LOOK_SECONDS = 0.25


class Watching:
    """A thread that looks at how long the present call takes. `deadline` (seconds) is when waits are given up."""

    def __init__(self, place: Place, agreement: Agreement, deadline: float) -> None:
        self._place, self._agreement, self._deadline = place, agreement, deadline
        self._over = threading.Event()
        if place.stack_fd is not None and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            faulthandler.register(signal.SIGUSR1, file=place.stack_fd, all_threads=True, chain=False)
        threading.Thread(target=self._watch, name="paceline watching", daemon=True).start()

    def answer(self) -> None:
        """Say where this worker is."""
        agreement = self._agreement
        seconds = time.monotonic() - (agreement.ended[-1] if agreement.ended else time.monotonic())
        report.where(self._place, agreement.calls, agreement.what, seconds, waits=agreement.since is not None)

    def stop(self) -> None:
        """The run is over."""
        self._over.set()

    @property
    def limit(self) -> float:
        """Seconds after which a wait is told: ten times what is usual, as learnt from the run's own calls."""
        moments = list(self._agreement.ended)
        intervals = [after - before for before, after in pairwise(moments)]
        if len(intervals) < KNOWN:
            return self._given_up
        usual = max(FACTOR * statistics.median(intervals), WIDEST * max(intervals))
        return min(max(LEAST_SECONDS, usual), self._given_up)

    @property
    def _given_up(self) -> float:
        """Whoever doesn't come is given up before those who wait for it give up."""
        return max(self._deadline / 2, self._deadline - MARGIN)

    def _watch(self) -> None:
        agreement, told = self._agreement, (-1, 0)
        while not self._over.wait(LOOK_SECONDS):
            since, calls = agreement.since, agreement.calls
            if since is None:
                continue
            waited = time.monotonic() - since
            due = 2 if waited > self._given_up else 1 if waited > self.limit else 0
            if (calls, due) > told and due:
                told = (calls, due)
                report.late(self._place, calls, agreement.what, waited, given_up=due == 2)
