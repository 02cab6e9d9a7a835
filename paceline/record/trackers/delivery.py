"""Delivers a run to one tracker on a thread, so that a slow or hanging tracker delays no one.

flush of the log --> queue --> thread --> tracker
                       |         |
                       |         +--> fails: announced once; the rest is dropped, the run goes on
                       +--> too long: steps are thinned out, and that is announced
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from paceline.record.trackers.tracker import TrackedRun, TrackedStep, Tracker

# Items, mostly steps, that may wait for a tracker.
MOST: Final = 50_000
_Thing = TrackedStep | Callable[[], None]


class TrackerDelivery:
    """Gives items to `tracker` in order, on a thread.

    `_queue` is protected by `_condition`, together with the flags. After `has_failed` or
    `_has_ended` nothing is added. `say` is told what the user has to know.
    """

    def __init__(self, tracker: Tracker, say: Callable[[str], None], *, most: int = MOST) -> None:
        self.tracker, self._say, self._most = tracker, say, most
        self._waiting = deque[_Thing]()
        self._there = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = self._behind = False
        # Whether the tracker has failed, and gets nothing more.
        self.failed = False

    def begin(self, run: TrackedRun) -> str:
        """Begin the run at once. The error of a tracker that can't is raised."""
        return self.tracker.begin(run)

    def begin_later(self, run: TrackedRun, say: Callable[[str], None]) -> None:
        """Begin the run on the thread, and announce where it can be seen."""
        self.act(lambda: say(f"{self.tracker.name}: {self.tracker.begin(run)}"))

    def steps(self, steps: Sequence[TrackedStep]) -> None:
        """Deliver steps. Never waits."""
        self._put(steps)

    def act(self, act: Callable[[], None]) -> None:
        """Call `act` on the thread after everything delivered before. Never waits."""
        self._put([act])

    def end(self, *, failed: bool, deadline: float) -> bool:
        """Close the tracker after everything delivered before.

        Returns False if that is not done at `deadline` (`time.monotonic`). The thread is then left
        alone and ends with the process. Calling it twice is harmless.
        """
        with self._there:
            if not self._ended:
                self._ended = True
                self._waiting.append(lambda: self.tracker.close(failed=failed))
                self._start()
            self._there.notify()
        assert self._thread is not None
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def _put(self, items: Sequence[_Thing]) -> None:
        """Add items to the queue, and thin it out if it is too long."""
        with self._there:
            if self.failed or self._ended:
                return
            self._waiting.extend(items)
            overflows = len(self._waiting) > self._most
            if overflows:
                self._thin_out()
            self._start()
            self._there.notify()
            was_behind, self._behind = self._behind, self._behind or overflows
        # Outside of the lock: `say` may write to a terminal, which may be slow.
        if overflows and not was_behind:
            self._say(
                f"{self.tracker.name} is too slow for all steps of this run, and gets only some of "
                "them; metrics.jsonl has all"
            )

    def _thin_out(self) -> None:
        """Drop every second step that waits.

        Other items stay, as do values that were logged after their step had ended, up to the bound.
        """
        remaining, is_odd = deque[_Thing](maxlen=self._most), False
        for item in self._waiting:
            if isinstance(item, TrackedStep) and item.samples is not None:
                is_odd = not is_odd
                if is_odd:
                    continue
            remaining.append(item)
        self._waiting = remaining

    def _start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._deliver, name=f"paceline-{self.tracker.name}", daemon=True
            )
            self._thread.start()

    def _deliver(self) -> None:
        """Deliver items until the end."""
        over = False
        while not over:
            with self._there:
                self._there.wait_for(lambda: self._waiting)
                items, self._waiting = list(self._waiting), deque[_Thing]()
                over = self._ended
            try:
                self._give(items)
            # Libraries may raise anything, and none of it may end the run.
            except Exception as error:  # noqa: BLE001
                over = self._fail(error)

    def _give(self, items: Sequence[_Thing]) -> None:
        """Give items to the tracker in order, steps in a row together."""
        steps: list[TrackedStep] = []
        for item in items:
            if isinstance(item, TrackedStep):
                steps.append(item)
                continue
            if steps:
                self.tracker.steps(steps)
                steps = []
            item()
        if steps:
            self.tracker.steps(steps)

    def _fail(self, error: Exception) -> bool:
        """Announce that the tracker has failed, and close it if possible.

        Returns True, because the delivery is over.
        """
        with self._there:
            self.failed = self._ended = True
            self._waiting.clear()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._say(
            f"{self.tracker.name} gets nothing more of this run ({reason}); "
            "training goes on, and the run's folder has everything"
        )
        # Its failure is announced already.
        with contextlib.suppress(Exception):
            self.tracker.close(failed=True)
        return True
