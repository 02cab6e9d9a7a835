"""Hands to one tracker what a run has to say, on a thread: a tracker that is slow, or hangs, holds
nobody up.

flush of the log --> queue --> thread --> tracker        the queue has a bound: from there on steps
                                                         are thinned out, and that is said
                                 |
                                 +--> fails: said once, the rest is dropped, and the run goes on
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from paceline.record.trackers.tracker import TrackedRun, TrackedStep, Tracker

MOST: Final = 50_000  # steps, or other things, that wait for a tracker
_Thing = TrackedStep | Callable[[], None]


class TrackerDelivery:
    """Gives things to `tracker` in order. `say` is told what the user has to know."""

    def __init__(self, tracker: Tracker, say: Callable[[str], None], *, most: int = MOST) -> None:
        self.tracker, self._say, self._most = tracker, say, most
        self._waiting = deque[_Thing]()
        self._there = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = self._behind = False
        self.failed = False  # nothing more is given to it

    def begin(self, run: TrackedRun) -> str:
        """Begin here and now; the error of a tracker that can't is raised."""
        return self.tracker.begin(run)

    def begin_later(self, run: TrackedRun, say: Callable[[str], None]) -> None:
        """Begin on the thread, and say where."""
        self.act(lambda: say(f"{self.tracker.name}: {self.tracker.begin(run)}"))

    def steps(self, steps: Sequence[TrackedStep]) -> None:
        """Hand over steps. Never waits."""
        self._put(steps)

    def act(self, act: Callable[[], None]) -> None:
        """Do something with the tracker, behind all that was handed over before. Never waits."""
        self._put([act])

    def end(self, *, failed: bool, deadline: float) -> bool:
        """Close the tracker behind everything else.

        Returns False if that takes longer than until the `deadline` (time.monotonic).

        The thread is left to itself then, and ends with the process. Calling it twice is harmless.
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

    def _put(self, things: Sequence[_Thing]) -> None:
        with self._there:
            if self.failed or self._ended:
                return
            self._waiting.extend(things)
            behind = len(self._waiting) > self._most
            if behind:
                self._thin_out()
            self._start()
            self._there.notify()
            said, self._behind = self._behind, self._behind or behind
        if behind and not said:
            self._say(
                f"{self.tracker.name} is too slow for all steps of this run, and gets some of them "
                "only; metrics.jsonl has all"
            )

    def _thin_out(self) -> None:
        """Drop every second step that waits; what was logged beside steps, and what else waits,
        stays, up to the bound.
        """
        kept, odd = deque[_Thing](maxlen=self._most), False
        for thing in self._waiting:
            if isinstance(thing, TrackedStep) and thing.samples is not None:
                odd = not odd
                if odd:
                    continue
            kept.append(thing)
        self._waiting = kept

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._deliver, name=f"paceline-{self.tracker.name}", daemon=True
            )
            self._thread.start()

    def _deliver(self) -> None:
        over = False
        while not over:
            with self._there:
                self._there.wait_for(lambda: self._waiting)
                things, self._waiting = list(self._waiting), deque[_Thing]()
                over = self._ended
            try:
                self._give(things)
            except Exception as error:  # noqa: BLE001
                # libraries raise what they like, and none of it may end the run
                over = self._fail(error)

    def _give(self, things: Sequence[_Thing]) -> None:
        steps: list[TrackedStep] = []
        for thing in things:
            if isinstance(thing, TrackedStep):
                steps.append(thing)
                continue
            if steps:
                self.tracker.steps(steps)
                steps = []
            thing()
        if steps:
            self.tracker.steps(steps)

    def _fail(self, error: Exception) -> bool:
        """Say that a tracker has failed, and close it as well as it goes.

        Returns True: nothing follows.
        """
        with self._there:
            self.failed = self._ended = True
            self._waiting.clear()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._say(
            f"{self.tracker.name} gets nothing more of this run ({reason}); "
            "training goes on, and the run's folder has everything"
        )
        with contextlib.suppress(Exception):  # it was said that it has failed
            self.tracker.close(failed=True)
        return True
