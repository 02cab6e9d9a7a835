"""Feeds trackers on the first worker: metrics, histograms, images, events, and the summary.

MetricsWriter --> TrackerFeed --> TrackerDelivery --> tensorboard
(lines, media)        ^    |----> TrackerDelivery --> wandb
                      |    +----> TrackerDelivery --> the run's folder, for histograms and images
RunHistory (events) --+

A worker that may become the first has a feed that stands by: it delivers nothing before
`take_over`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.record.folder import RunFolder
from paceline.record.history import RunHistory
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.delivery import TrackerDelivery
from paceline.record.trackers.media_folder import MediaFolder
from paceline.record.trackers.tracker import (
    Setting,
    TrackedEnd,
    TrackedEvent,
    TrackedRun,
    TrackedStep,
    Tracker,
)
from paceline.timings import TrackerTimings
from paceline.unequal.stragglers.lateness import RankLateness


class TrackerFeed:
    """Reports a run to trackers, and its histograms and images to its folder.

    Args:
        trackers: Trackers, which have not begun yet.
        folder: Folder of the run.
        history: History, with the events to report.
        say: Function that shows a message to the user.
        settings: Settings of the summary that are known at the beginning.
        again: Whether an earlier start of the job may have begun the run in the trackers.
        events_told: Number of events that the earlier start has reported.
        timings: Seconds to wait for trackers at the end.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        folder: RunFolder,
        history: RunHistory,
        say: Callable[[str], None],
        *,
        settings: Mapping[str, Setting] | None = None,
        again: bool = False,
        events_told: int = 0,
        timings: TrackerTimings,
    ) -> None:
        self._folder, self._history, self._settings, self._again, self._timings = (
            folder,
            history,
            settings or {},
            again,
            timings,
        )
        self._trackers = [TrackerDelivery(tracker, history.tell) for tracker in trackers]
        self._media: TrackerDelivery | None = None
        self._events_told = events_told
        self._say, self._begun = say, False
        # Histograms and images whose step has no line yet.
        self._shown: list[MediaItem] = []

    def begin(self) -> None:
        """Begin the run in all trackers, and announce where it can be seen.

        Raises:
            UsageError: A tracker can't begin.
        """
        run, self._begun = self._run(again=self._again), True
        for place, delivery in enumerate(self._trackers):
            try:
                self._say(f"{delivery.tracker.name}: {delivery.begin(run)}")
            except Exception as error:
                # All or none: trackers that have begun are closed again.
                deadline = time.monotonic() + self._timings.leave
                for begun in self._trackers[:place]:
                    begun.end(failed=True, deadline=deadline)
                if isinstance(error, PacelineError):
                    raise
                name, reason = delivery.tracker.name, " ".join(str(error).split())
                raise UsageError(
                    f"the run can't be reported to {name} ({type(error).__name__}: {reason}); fix "
                    f"that, or leave {name} out of report_to"
                ) from error

    def take_over(self) -> None:
        """Go on in all trackers, in place of a lost worker.

        They begin on their threads, because other workers wait for this one.
        """
        self._begun = True
        for delivery in self._trackers:
            delivery.begin_later(self._run(again=True), self._say)

    def pass_over(self) -> None:
        """Leave the events up to now to the first worker."""
        self._events_told = len(self._history.events)

    def write(
        self, lines: Sequence[Mapping[str, Any]], late: Callable[[int], Sequence[RankLateness]]
    ) -> None:
        """Report lines of the metrics, and the events since the last call.

        `late` returns the late workers of a step.
        """
        steps: list[TrackedStep] = []
        for line in lines if self._trackers or self._shown else ():
            steps.append(TrackedStep.of(line, late(line["step"])))
            # Some trackers want steps in order, so media of this step come before the next line.
            if self._shown and self._shown[0].step <= line["step"]:
                self._give(steps)
                self._give_media(line["step"])
                steps = []
        self._give(steps)
        events = [
            TrackedEvent(event["time"], event["what"])
            for event in self._history.events[self._events_told :]
        ]
        self._events_told += len(events)
        for delivery in self._trackers:
            for event in events:
                delivery.act(functools.partial(delivery.tracker.event, event))

    def show(self, items: Sequence[MediaItem]) -> None:
        """Report histograms and images after the line of their step."""
        self._shown.extend(items)

    def _give(self, steps: Sequence[TrackedStep]) -> None:
        """Deliver steps to all trackers."""
        for delivery in self._trackers if steps else ():
            delivery.steps(steps)

    def _give_media(self, upto: float) -> None:
        """Deliver histograms and images of steps up to `upto` to the trackers and the folder."""
        items = [item for item in self._shown if item.step <= upto]
        self._shown = [item for item in self._shown if item.step > upto]
        if not items:
            return
        if self._media is None:
            self._media = TrackerDelivery(MediaFolder(self._folder), self._history.tell)
        for delivery in (self._media, *self._trackers):
            delivery.act(functools.partial(delivery.tracker.media, items))

    def rewind(self, step: int) -> None:
        """Report that the run goes on after `step`, and takes later steps again."""
        if self._media is None:
            MediaFolder(self._folder).rewind(step)
        for delivery in (*self._trackers, *([] if self._media is None else [self._media])):
            delivery.act(functools.partial(delivery.tracker.rewind, step))

    def conclude(self, fields: Mapping[str, Any]) -> None:
        """Report the summary, given its fields."""
        self._give_media(math.inf)
        self.write([], lambda step: ())
        end = TrackedEnd.of(fields, self._folder.summary, self._settings)
        for delivery in self._trackers:
            delivery.act(functools.partial(delivery.tracker.conclude, end))

    def close(self, *, failed: bool) -> None:
        """Let trackers take in the rest, and close them. Calling it twice is harmless.

        It waits for slow trackers, up to a limit, and announces that.
        """
        self._give_media(math.inf)
        unfinished = [
            *(self._trackers if self._begun else []),
            *([] if self._media is None else [self._media]),
        ]
        self._trackers, self._media = [], None
        began_at = time.monotonic()
        # First a short wait without a word, then an announcement and a longer one.
        patience = self._timings.leave if failed else self._timings.quiet
        unfinished = [
            delivery
            for delivery in unfinished
            if not delivery.end(failed=failed, deadline=began_at + patience)
        ]
        if unfinished and not failed:
            self._say(
                f"waiting for {_named(unfinished)} to take in the rest of the run, "
                f"{self._timings.close:g} s at most"
            )
            deadline = began_at + self._timings.close
            unfinished = [
                delivery
                for delivery in unfinished
                if not delivery.end(failed=failed, deadline=deadline)
            ]
        if unfinished:
            self._say(
                f"{_named(unfinished)} did not take in all of the run; "
                "the run's folder has everything"
            )

    def _run(self, *, again: bool) -> TrackedRun:
        """Describe the run for trackers."""
        history = self._history
        settings = {**self._settings, "seed": history.seed}
        return TrackedRun(
            self._folder.name,
            self._folder.path,
            history.identity(self._folder.name),
            history.began,
            settings,
            again,
        )


def _named(deliveries: Sequence[TrackerDelivery]) -> str:
    """Join the names of trackers."""
    return " and ".join(delivery.tracker.name for delivery in deliveries)
