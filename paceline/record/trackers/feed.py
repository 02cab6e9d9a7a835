"""Feeds trackers on the first worker: the lines of the metrics as they are written, histograms,
images, events, and the summary.

MetricsWriter --> TrackerFeed --> TrackerDelivery --> tensorboard         a worker that may become the first has one that stands by:
(lines, media)        ^    |----> TrackerDelivery --> wandb               it gives nothing to
                           anybody before `take_over`
                      |    +----> TrackerDelivery --> the run's folder, for histograms and images
RunHistory (events) --+
"""  # noqa: E501

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
    """Gives a run to `trackers`, and its histograms and images to its folder.

    `settings`: what is known of the summary's when it begins. `again`: an earlier start of the job
    may have begun it there, and has told of the first `events_told` events.
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
        self._shown: list[MediaItem] = []  # whose step has no line yet

    def begin(self) -> None:
        """Begin in all trackers, and say where. Raises `UsageError` if one of them can't."""
        run, self._begun = self._run(again=self._again), True
        for place, delivery in enumerate(self._trackers):
            try:
                self._say(f"{delivery.tracker.name}: {delivery.begin(run)}")
            except Exception as error:
                deadline = time.monotonic() + self._timings.leave
                for begun in self._trackers[:place]:
                    begun.end(failed=True, deadline=deadline)
                if isinstance(error, PacelineError):
                    raise
                name, reason = delivery.tracker.name, " ".join(str(error).split())
                raise UsageError(
                    f"the run can't be reported to {name} ({type(error).__name__}: {reason}); "
                    f"mend that, or leave {name} out of report_to"
                ) from error

    def take_over(self) -> None:
        """Go on in all trackers, in place of a worker that was lost; on their threads, as others
        wait for this one.
        """
        self._begun = True
        for delivery in self._trackers:
            delivery.begin_later(self._run(again=True), self._say)

    def pass_over(self) -> None:
        """Leave to the first worker what has happened up to now."""
        self._events_told = len(self._history.events)

    def write(
        self, lines: Sequence[Mapping[str, Any]], late: Callable[[int], Sequence[RankLateness]]
    ) -> None:
        """Report lines of the metrics, with how late workers were in a step, and what has
        happened since the last time.
        """
        steps: list[TrackedStep] = []
        for line in lines if self._trackers or self._shown else ():
            steps.append(TrackedStep.of(line, late(line["step"])))
            # trackers may want steps in order
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
        """Report histograms and images behind the line of their step."""
        self._shown.extend(items)

    def _give(self, steps: Sequence[TrackedStep]) -> None:
        for delivery in self._trackers if steps else ():
            delivery.steps(steps)

    def _give_media(self, upto: float) -> None:
        """Report what is shown of steps up to this one."""
        items = [item for item in self._shown if item.step <= upto]
        self._shown = [item for item in self._shown if item.step > upto]
        if not items:
            return
        if self._media is None:
            self._media = TrackerDelivery(MediaFolder(self._folder), self._history.tell)
        for delivery in (self._media, *self._trackers):
            delivery.act(functools.partial(delivery.tracker.media, items))

    def rewind(self, step: int) -> None:
        """Report that the run goes on behind this step, and takes later ones again."""
        if self._media is None:
            MediaFolder(self._folder).rewind(step)
        for delivery in (*self._trackers, *([] if self._media is None else [self._media])):
            delivery.act(functools.partial(delivery.tracker.rewind, step))

    def conclude(self, fields: Mapping[str, Any]) -> None:
        """Report the summary, whose fields these are."""
        self._give_media(math.inf)
        self.write([], lambda step: ())
        end = TrackedEnd.of(fields, self._folder.summary, self._settings)
        for delivery in self._trackers:
            delivery.act(functools.partial(delivery.tracker.conclude, end))

    def close(self, *, failed: bool) -> None:
        """Let trackers take in what there is, and close them.

        Waits a while for slow ones, and says so. Calling it twice is harmless.
        """
        self._give_media(math.inf)
        open_ones = [
            *(self._trackers if self._begun else []),
            *([] if self._media is None else [self._media]),
        ]
        self._trackers, self._media = [], None
        began = time.monotonic()
        patience = self._timings.leave if failed else self._timings.quiet
        open_ones = [
            delivery
            for delivery in open_ones
            if not delivery.end(failed=failed, deadline=began + patience)
        ]
        if open_ones and not failed:
            self._say(
                f"waiting for {_named(open_ones)} to take in the rest of the run, "
                f"{self._timings.close:g} s at most"
            )
            deadline = began + self._timings.close
            open_ones = [
                delivery
                for delivery in open_ones
                if not delivery.end(failed=failed, deadline=deadline)
            ]
        if open_ones:
            self._say(
                f"{_named(open_ones)} had not taken in all of the run in the end; "
                "the run's folder has everything"
            )

    def _run(self, *, again: bool) -> TrackedRun:
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
    return " and ".join(delivery.tracker.name for delivery in deliveries)
