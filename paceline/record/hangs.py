"""Reports a worker that waits far longer than usual, so that its launcher finds the cause.

main thread      begins and ends calls (`Agreement`)
watching thread  looks at the current call four times a second, and reports it if it takes long;
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
from paceline.timings import DEFAULT_TIMINGS, HangTimings

# A wait is late if it is longer than all of these: so many times the median and the longest
# interval between calls, and so many times the longest wait that was reported and then ended well.
MEDIAN_FACTOR, LONGEST_FACTOR = 10.0, 3.0
ENDED_WAIT_FACTOR = 2.0
# Calls that are needed to learn the usual interval.
MIN_KNOWN_CALLS = 8


class WaitSource(Protocol):
    """A source of waits for other workers, such as an `Agreement`."""

    @property
    def since(self) -> float | None:
        """When the current wait began (`time.monotonic`); None if there is none."""
        ...

    @property
    def what(self) -> str:
        """Description of the current wait, or of the last one."""
        ...

    @property
    def calls(self) -> int:
        """Number of calls that have ended. It is the same on all workers at the same place."""
        ...

    @property
    def ended(self) -> Sequence[float]:
        """Times at which the last calls ended (`time.monotonic`)."""
        ...


class CurrentWait(NamedTuple):
    """Description of the current wait of this worker, and when it began."""

    what: str
    since: float


class HangDetector:
    """A thread that measures how long the current call takes, and answers the launcher's questions.

    Args:
        place: Place of this worker, with the pipes to its launcher.
        agreement: Calls of all workers.
        deadline: Seconds after which waits are given up.
        late_after: Seconds after which a wait is reported. None: learned from the run's own calls.
        others: Further sources of waits, such as the axes of a mesh. Calls on an axis happen inside
            calls of `agreement`.
    """

    def __init__(
        self,
        place: Place,
        agreement: Agreement,
        deadline: float,
        late_after: float | None = None,
        *,
        others: Sequence[WaitSource] = (),
    ) -> None:
        self._place, self._late_after = place, late_after
        self._sources: tuple[WaitSource, ...] = (agreement, *others)
        self._timings = place.timings.hangs
        self._give_up_seconds = give_up_seconds(deadline, timings=self._timings)
        # If views of the membership can change, the thread that receives them receives the
        # launcher's questions, too (`commands.CommandPipe`).
        self._listens_for_questions = place.worker is None
        # Seconds of the longest wait that was reported and then ended well.
        self._longest_ended_wait = 0.0
        self._stopped = threading.Event()
        # Only `paceline run` asks its workers.
        if place.stack_fd is not None:
            events.register_stack_dump(place)
            threading.Thread(
                target=self._watch_waits, name="paceline watching", daemon=True
            ).start()

    def answer_launcher(self) -> None:
        """Tell the launcher what this worker does."""
        now, wait = time.monotonic(), self._current_wait()
        last_source = max(self._sources, key=lambda each: each.ended[-1] if each.ended else 0.0)
        seconds = now - (last_source.ended[-1] if last_source.ended else now)
        events.report_position(
            self._place,
            self._ended_calls,
            last_source.what if wait is None else wait.what,
            seconds,
            waits=wait is not None,
        )

    @property
    def _ended_calls(self) -> int:
        """Number of calls that have ended, over all sources."""
        return sum(source.calls for source in self._sources)

    def _current_wait(self) -> CurrentWait | None:
        """Return the innermost current wait; None if this worker doesn't wait."""
        # A call of all workers may contain an exchange along an axis, and axes come last.
        for source in reversed(self._sources):
            what, since = source.what, source.since
            if since is not None:
                return CurrentWait(what, since)
        return None

    def stop_watching(self) -> None:
        """Stop watching, as the run is over."""
        self._stopped.set()

    @property
    def late_after_seconds(self) -> float:
        """Seconds after which a wait is reported: ten times the usual interval of this run.

        Before enough calls are known, it is the time after which the missing worker is given up.
        """
        if self._late_after is not None:
            return self._late_after
        times_by_source = [list(source.ended) for source in self._sources]
        end_times = next((times for times in times_by_source if len(times) > MIN_KNOWN_CALLS), [])
        intervals = [after - start for start, after in pairwise(end_times)]
        if not intervals:
            return self._give_up_seconds
        usual = max(
            MEDIAN_FACTOR * statistics.median(intervals),
            LONGEST_FACTOR * max(intervals),
            ENDED_WAIT_FACTOR * self._longest_ended_wait,
        )
        return min(max(self._timings.least, usual), self._give_up_seconds)

    def _watch_waits(self) -> None:
        """Report each wait once when it is late, and once more when it is given up."""
        last_report, late_seconds = (-1, 0), 0.0
        while not self._wait_for_next_look():
            calls, wait = self._ended_calls, self._current_wait()
            # The main thread changes these values without a lock. If a call has ended in between,
            # `wait` may belong to the next call.
            if wait is None or self._ended_calls != calls:
                continue
            waited = time.monotonic() - wait.since
            # The reported call has ended after all: longer waits are normal in this run.
            if calls > last_report[0]:
                self._longest_ended_wait, late_seconds = (
                    max(self._longest_ended_wait, late_seconds),
                    0.0,
                )
            # 0: nothing to report, 1: late, 2: given up.
            severity = (
                2
                if waited > self._give_up_seconds
                else 1
                if waited > self.late_after_seconds
                else 0
            )
            late_seconds = waited if severity == 1 else 0.0
            if severity and (calls, severity) > last_report:
                last_report = (calls, severity)
                events.report_late_wait(self._place, calls, wait.what, given_up=severity == 2)

    def _wait_for_next_look(self) -> bool:
        """Wait until the next look and answer the launcher. Returns whether the run is over."""
        if not self._listens_for_questions or self._place.orders_fd is None:
            return self._stopped.wait(self._timings.look)
        if commands.wait_for_question(self._place.orders_fd, self._timings.look):
            self.answer_launcher()
        return self._stopped.is_set()


def give_up_seconds(deadline: float, *, timings: HangTimings = DEFAULT_TIMINGS.hangs) -> float:
    """Return the seconds after which the launcher gives up a missing worker.

    This is shortly before `deadline`, at which the workers themselves give up, so the launcher can
    name the missing worker first.
    """
    return max(deadline / 2, deadline - timings.margin)


def check_late_after(
    late_after: float | None, deadline: float, *, timings: HangTimings = DEFAULT_TIMINGS.hangs
) -> None:
    """Raise `UsageError` if waits can't be reported after `late_after` seconds."""
    latest = give_up_seconds(deadline, timings=timings)
    if late_after is not None and not 0 < late_after <= latest:
        raise UsageError(
            f"late_after={late_after:g} can't be honoured: give seconds above 0, and at most "
            f"{latest:g} (waits are given up after deadline={deadline:g}), or leave it out"
        )
