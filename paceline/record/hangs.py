"""Notices that this worker waits for others far longer than it ever did, and tells its launcher,
which finds the missing worker.

thread    looks at the call under way, four times a second          main thread   says when a call
                                                                    begins and ends (`Agreement`)
          answers when the launcher asks what this worker does
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from paceline.cluster.control import commands, events
from paceline.cluster.discover import Place
from paceline.comm.agreement import Agreement
from paceline.errors import UsageError
from paceline.timings import DEFAULTS, HangTimings

FACTOR, WIDEST = 10.0, 3.0  # times the median interval between calls, and times the longest
BORNE = 2.0  # times the longest wait that was reported and then ended well
KNOWN = 8  # calls that have to be known


class Waits(Protocol):
    """Whatever a worker may wait in for some of the others."""

    @property
    def since(self) -> float | None:
        """When the wait under way has begun (`time.monotonic`); None where there is none."""
        ...

    @property
    def what(self) -> str:
        """The wait under way, or the last one, in words."""
        ...

    @property
    def calls(self) -> int:
        """How many are over: the same number on all workers that have come to the same place."""
        ...

    @property
    def ended(self) -> Sequence[float]:
        """When the last ones were over."""
        ...


class WaitUnderWay(NamedTuple):
    """What this worker waits in, and since when."""

    what: str
    since: float


class HangDetector:
    """A thread that measures how long the present call takes, and answers its launcher.

    `deadline` is when waits are given up, `late_after` how long one may last before it is reported
    (None: learnt from the run's own calls); both in seconds. `others`: where this worker may wait
    beside calls of `agreement`, as along the axes of a mesh.
    """

    def __init__(
        self,
        place: Place,
        agreement: Agreement,
        deadline: float,
        late_after: float | None = None,
        *,
        others: Sequence[Waits] = (),
    ) -> None:
        self._place, self._late_after = place, late_after
        self._waits: tuple[Waits, ...] = (agreement, *others)
        self._timings = place.timings.hangs
        self._given_up = giving_up(deadline, timings=self._timings)
        # else the thread that hears of views listens for questions, too (`commands.CommandPipe`)
        self._listens = place.worker is None
        self._borne = 0.0  # seconds
        self._over = threading.Event()
        if place.stack_fd is not None:  # only `paceline run` asks its workers
            events.show(place)
            threading.Thread(target=self._watch, name="paceline watching", daemon=True).start()

    def answer(self) -> None:
        """Tell the launcher what this worker does."""
        now, wait = time.monotonic(), self._wait()
        last = max(self._waits, key=lambda each: each.ended[-1] if each.ended else 0.0)
        seconds = now - (last.ended[-1] if last.ended else now)
        events.where(
            self._place,
            self._calls,
            last.what if wait is None else wait.what,
            seconds,
            waits=wait is not None,
        )

    @property
    def _calls(self) -> int:
        """The calls that are over."""
        return sum(each.calls for each in self._waits)

    def _wait(self) -> WaitUnderWay | None:
        """Return what this worker waits in; the innermost, as a call of all may exchange along
        an axis.
        """
        for each in reversed(self._waits):
            what, since = each.what, each.since
            if since is not None:
                return WaitUnderWay(what, since)
        return None

    def stop(self) -> None:
        """Stop watching, as the run is over."""
        self._over.set()

    @property
    def limit(self) -> float:
        """Seconds after which a wait is reported: ten times what is usual in this run."""
        if self._late_after is not None:
            return self._late_after
        known = [list(each.ended) for each in self._waits]
        moments = next((found for found in known if len(found) > KNOWN), [])
        intervals = [after - before for before, after in pairwise(moments)]
        if not intervals:
            return self._given_up
        usual = max(
            FACTOR * statistics.median(intervals), WIDEST * max(intervals), BORNE * self._borne
        )
        return min(max(self._timings.least, usual), self._given_up)

    def _watch(self) -> None:
        reported, lasting = (-1, 0), 0.0
        while not self._pause():
            calls, wait = self._calls, self._wait()
            if wait is None or self._calls != calls:  # or it may have begun just now
                continue
            waited = time.monotonic() - wait.since
            if calls > reported[0]:
                self._borne, lasting = max(self._borne, lasting), 0.0
            due = 2 if waited > self._given_up else 1 if waited > self.limit else 0
            lasting = waited if due == 1 else 0.0
            if due and (calls, due) > reported:
                reported = (calls, due)
                events.late(self._place, calls, wait.what, given_up=due == 2)

    def _pause(self) -> bool:
        """Wait until the next look, answering a launcher that asks.

        Returns whether the run is over.
        """
        if not self._listens or self._place.orders_fd is None:
            return self._over.wait(self._timings.look)
        if commands.asked(self._place.orders_fd, self._timings.look):
            self.answer()
        return self._over.is_set()


def giving_up(deadline: float, *, timings: HangTimings = DEFAULTS.hangs) -> float:
    """Return how many seconds a wait may last before the launcher gives up the missing worker;
    workers give up at the deadline.
    """
    return max(deadline / 2, deadline - timings.margin)


def check_lateness(
    late_after: float | None, deadline: float, *, timings: HangTimings = DEFAULTS.hangs
) -> None:
    """Raise `UsageError` if waits can't be reported after `late_after` seconds."""
    latest = giving_up(deadline, timings=timings)
    if late_after is not None and not 0 < late_after <= latest:
        raise UsageError(
            f"late_after={late_after:g} can't be honoured: give seconds above 0, and at most "
            f"{latest:g} (waits are given up "
            f"after deadline={deadline:g}), or leave it out"
        )
