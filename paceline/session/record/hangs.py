"""Notices that this worker waits for others far longer than it ever did, and tells its launcher, which finds the missing worker.

thread    looks at the call under way, four times a second          main thread   says when a call begins and ends (`Agreement`)
          answers when the launcher asks what this worker does
"""

from __future__ import annotations

import statistics
import threading
import time
from itertools import pairwise

from paceline.cluster.control import commands, events
from paceline.cluster.discover import Place
from paceline.comm.agreement import Agreement
from paceline.errors import UsageError
from paceline.timings import DEFAULTS, HangTimings

FACTOR, WIDEST = 10.0, 3.0  # times the median interval between calls, and times the longest
BORNE = 2.0  # times the longest wait that was reported and then ended well
KNOWN = 8  # calls that have to be known


class HangDetector:
    """A thread that measures how long the present call takes, and answers its launcher.

    `deadline` is when waits are given up, `late_after` how long one may last before it is reported (None: learnt from the run's own calls);
    both in seconds.
    """

    def __init__(self, place: Place, agreement: Agreement, deadline: float, late_after: float | None = None) -> None:
        self._place, self._agreement, self._late_after = place, agreement, late_after
        self._timings = place.timings.hangs
        self._given_up = giving_up(deadline, timings=self._timings)
        self._listens = place.worker is None  # else the thread that hears of views listens for questions, too (`commands.CommandPipe`)
        self._borne = 0.0  # seconds
        self._over = threading.Event()
        if place.stack_fd is not None:  # only `paceline run` asks its workers
            events.show(place)
            threading.Thread(target=self._watch, name="paceline watching", daemon=True).start()

    def answer(self) -> None:
        """Tell the launcher what this worker does."""
        agreement = self._agreement
        seconds = time.monotonic() - (agreement.ended[-1] if agreement.ended else time.monotonic())
        events.where(self._place, agreement.calls, agreement.what, seconds, waits=agreement.since is not None)

    def stop(self) -> None:
        """Stop watching, as the run is over."""
        self._over.set()

    @property
    def limit(self) -> float:
        """Seconds after which a wait is reported: ten times what is usual in this run."""
        if self._late_after is not None:
            return self._late_after
        moments = list(self._agreement.ended)
        intervals = [after - before for before, after in pairwise(moments)]
        if len(intervals) < KNOWN:
            return self._given_up
        usual = max(FACTOR * statistics.median(intervals), WIDEST * max(intervals), BORNE * self._borne)
        return min(max(self._timings.least, usual), self._given_up)

    def _watch(self) -> None:
        agreement, reported, lasting = self._agreement, (-1, 0), 0.0
        while not self._pause():
            calls, since = agreement.calls, agreement.since
            if since is None or agreement.calls != calls:  # or it may have begun just now
                continue
            waited = time.monotonic() - since
            if calls > reported[0]:
                self._borne, lasting = max(self._borne, lasting), 0.0
            due = 2 if waited > self._given_up else 1 if waited > self.limit else 0
            lasting = waited if due == 1 else 0.0
            if due and (calls, due) > reported:
                reported = (calls, due)
                events.late(self._place, calls, agreement.what, given_up=due == 2)

    def _pause(self) -> bool:
        """Wait until the next look, answering a launcher that asks. Returns whether the run is over."""
        if not self._listens or self._place.orders_fd is None:
            return self._over.wait(self._timings.look)
        if commands.asked(self._place.orders_fd, self._timings.look):
            self.answer()
        return self._over.is_set()


def giving_up(deadline: float, *, timings: HangTimings = DEFAULTS.hangs) -> float:
    """Return how many seconds a wait may last before the launcher gives up the missing worker; workers give up at the deadline."""
    return max(deadline / 2, deadline - timings.margin)


def check_lateness(late_after: float | None, deadline: float, *, timings: HangTimings = DEFAULTS.hangs) -> None:
    """Raise `UsageError` if waits can't be reported after `late_after` seconds."""
    latest = giving_up(deadline, timings=timings)
    if late_after is not None and not 0 < late_after <= latest:
        raise UsageError(
            f"late_after={late_after:g} can't be honoured: give seconds above 0, and at most {latest:g} (waits are given up "
            f"after deadline={deadline:g}), or leave it out"
        )
