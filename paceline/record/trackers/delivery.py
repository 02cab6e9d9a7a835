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
MAX_WAITING: Final = 50_000
_Item = TrackedStep | Callable[[], None]


class TrackerDelivery:
    """Gives items to `tracker` in order, on a thread.

    `_queue` is protected by `_condition`, together with the flags. After `has_failed` or
    `_has_ended` nothing is added. `say` is told what the user has to know.
    """

    def __init__(
        self, tracker: Tracker, say: Callable[[str], None], *, most: int = MAX_WAITING
    ) -> None:
        self.tracker, self._say, self._max_waiting = tracker, say, most
        self._queue = deque[_Item]()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._has_ended = self._is_behind = False
        # Whether the tracker has failed, and gets nothing more.
        self.has_failed = False

    def begin_now(self, run: TrackedRun) -> str:
        """Begin the run at once. The error of a tracker that can't is raised."""
        return self.tracker.begin_run(run)

    def begin_later(self, run: TrackedRun, say: Callable[[str], None]) -> None:
        """Begin the run on the thread, and announce where it can be seen."""
        self.deliver_action(lambda: say(f"{self.tracker.name}: {self.tracker.begin_run(run)}"))

    def deliver_steps(self, steps: Sequence[TrackedStep]) -> None:
        """Deliver steps. Never waits."""
        self._enqueue(steps)

    def deliver_action(self, act: Callable[[], None]) -> None:
        """Call `act` on the thread after everything delivered before. Never waits."""
        self._enqueue([act])

    def end_delivery(self, *, failed: bool, deadline: float) -> bool:
        """Close the tracker after everything delivered before.

        Returns False if that is not done at `deadline` (`time.monotonic`). The thread is then left
        alone and ends with the process. Calling it twice is harmless.
        """
        with self._condition:
            if not self._has_ended:
                self._has_ended = True
                self._queue.append(lambda: self.tracker.close(failed=failed))
                self._start_thread()
            self._condition.notify()
        assert self._thread is not None
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def _enqueue(self, items: Sequence[_Item]) -> None:
        """Add items to the queue, and thin it out if it is too long."""
        with self._condition:
            if self.has_failed or self._has_ended:
                return
            self._queue.extend(items)
            overflows = len(self._queue) > self._max_waiting
            if overflows:
                self._thin_out_steps()
            self._start_thread()
            self._condition.notify()
            was_behind, self._is_behind = self._is_behind, self._is_behind or overflows
        # Outside of the lock: `say` may write to a terminal, which may be slow.
        if overflows and not was_behind:
            self._say(
                f"{self.tracker.name} is too slow for all steps of this run, and gets only some of "
                "them; metrics.jsonl has all"
            )

    def _thin_out_steps(self) -> None:
        """Drop every second step that waits.

        Other items stay, as do values that were logged after their step had ended, up to the bound.
        """
        remaining, is_odd = deque[_Item](maxlen=self._max_waiting), False
        for item in self._queue:
            if isinstance(item, TrackedStep) and item.samples is not None:
                is_odd = not is_odd
                if is_odd:
                    continue
            remaining.append(item)
        self._queue = remaining

    def _start_thread(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._deliver_until_end, name=f"paceline-{self.tracker.name}", daemon=True
            )
            self._thread.start()

    def _deliver_until_end(self) -> None:
        """Deliver items until the end."""
        over = False
        while not over:
            with self._condition:
                self._condition.wait_for(lambda: self._queue)
                items, self._queue = list(self._queue), deque[_Item]()
                over = self._has_ended
            try:
                self._give_items(items)
            # Libraries may raise anything, and none of it may end the run.
            except Exception as error:  # noqa: BLE001
                over = self._announce_failure(error)

    def _give_items(self, items: Sequence[_Item]) -> None:
        """Give items to the tracker in order, steps in a row together."""
        steps: list[TrackedStep] = []
        for item in items:
            if isinstance(item, TrackedStep):
                steps.append(item)
                continue
            if steps:
                self.tracker.log_steps(steps)
                steps = []
            item()
        if steps:
            self.tracker.log_steps(steps)

    def _announce_failure(self, error: Exception) -> bool:
        """Announce that the tracker has failed, and close it if possible.

        Returns True, because the delivery is over.
        """
        with self._condition:
            self.has_failed = self._has_ended = True
            self._queue.clear()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._say(
            f"{self.tracker.name} gets nothing more of this run ({reason}); "
            "training goes on, and the run's folder has everything"
        )
        # Its failure is announced already.
        with contextlib.suppress(Exception):
            self.tracker.close(failed=True)
        return True
