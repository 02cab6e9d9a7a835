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
    TrackedEvent,
    TrackedRun,
    TrackedStep,
    TrackedSummary,
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
        self._folder, self._history, self._settings, self._is_restart, self._timings = (
            folder,
            history,
            settings or {},
            again,
            timings,
        )
        self._deliveries = [
            TrackerDelivery(tracker, history.announce_event) for tracker in trackers
        ]
        self._media_delivery: TrackerDelivery | None = None
        self._reported_events = events_told
        self._say, self._has_begun = say, False
        # Histograms and images whose step has no line yet.
        self._waiting_media: list[MediaItem] = []

    def begin_trackers(self) -> None:
        """Begin the run in all trackers, and announce where it can be seen.

        Raises:
            UsageError: A tracker can't begin.
        """
        run, self._has_begun = self._describe_run(again=self._is_restart), True
        for place, delivery in enumerate(self._deliveries):
            try:
                self._say(f"{delivery.tracker.name}: {delivery.begin_now(run)}")
            except Exception as error:
                # All or none: trackers that have begun are closed again.
                deadline = time.monotonic() + self._timings.leave
                for begun in self._deliveries[:place]:
                    begun.end_delivery(failed=True, deadline=deadline)
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
        self._has_begun = True
        for delivery in self._deliveries:
            delivery.begin_later(self._describe_run(again=True), self._say)

    def skip_events(self) -> None:
        """Leave the events up to now to the first worker."""
        self._reported_events = len(self._history.events)

    def write_lines(
        self, lines: Sequence[Mapping[str, Any]], late: Callable[[int], Sequence[RankLateness]]
    ) -> None:
        """Report lines of the metrics, and the events since the last call.

        `late` returns the late workers of a step.
        """
        steps: list[TrackedStep] = []
        for line in lines if self._deliveries or self._waiting_media else ():
            steps.append(TrackedStep.from_line(line, late(line["step"])))
            # Some trackers want steps in order, so media of this step come before the next line.
            if self._waiting_media and self._waiting_media[0].step <= line["step"]:
                self._deliver_steps(steps)
                self._deliver_media(line["step"])
                steps = []
        self._deliver_steps(steps)
        events = [
            TrackedEvent(event["time"], event["what"])
            for event in self._history.events[self._reported_events :]
        ]
        self._reported_events += len(events)
        for delivery in self._deliveries:
            for event in events:
                delivery.deliver_action(functools.partial(delivery.tracker.log_event, event))

    def show_media(self, items: Sequence[MediaItem]) -> None:
        """Report histograms and images after the line of their step."""
        self._waiting_media.extend(items)

    def _deliver_steps(self, steps: Sequence[TrackedStep]) -> None:
        """Deliver steps to all trackers."""
        for delivery in self._deliveries if steps else ():
            delivery.deliver_steps(steps)

    def _deliver_media(self, upto: float) -> None:
        """Deliver histograms and images of steps up to `upto` to the trackers and the folder."""
        items = [item for item in self._waiting_media if item.step <= upto]
        self._waiting_media = [item for item in self._waiting_media if item.step > upto]
        if not items:
            return
        if self._media_delivery is None:
            self._media_delivery = TrackerDelivery(
                MediaFolder(self._folder), self._history.announce_event
            )
        for delivery in (self._media_delivery, *self._deliveries):
            delivery.deliver_action(functools.partial(delivery.tracker.log_media, items))

    def rewind_to_step(self, step: int) -> None:
        """Report that the run goes on after `step`, and takes later steps again."""
        if self._media_delivery is None:
            MediaFolder(self._folder).rewind_to_step(step)
        for delivery in (
            *self._deliveries,
            *([] if self._media_delivery is None else [self._media_delivery]),
        ):
            delivery.deliver_action(functools.partial(delivery.tracker.rewind_to_step, step))

    def report_summary(self, fields: Mapping[str, Any]) -> None:
        """Report the summary, given its fields."""
        self._deliver_media(math.inf)
        self.write_lines([], lambda step: ())
        end = TrackedSummary.from_fields(fields, self._folder.summary, self._settings)
        for delivery in self._deliveries:
            delivery.deliver_action(functools.partial(delivery.tracker.log_summary, end))

    def close_trackers(self, *, failed: bool) -> None:
        """Let trackers take in the rest, and close them. Calling it twice is harmless.

        It waits for slow trackers, up to a limit, and announces that.
        """
        self._deliver_media(math.inf)
        unfinished = [
            *(self._deliveries if self._has_begun else []),
            *([] if self._media_delivery is None else [self._media_delivery]),
        ]
        self._deliveries, self._media_delivery = [], None
        began_at = time.monotonic()
        # First a short wait without a word, then an announcement and a longer one.
        patience = self._timings.leave if failed else self._timings.quiet
        unfinished = [
            delivery
            for delivery in unfinished
            if not delivery.end_delivery(failed=failed, deadline=began_at + patience)
        ]
        if unfinished and not failed:
            self._say(
                f"waiting for {_join_names(unfinished)} to take in the rest of the run, "
                f"{self._timings.close:g} s at most"
            )
            deadline = began_at + self._timings.close
            unfinished = [
                delivery
                for delivery in unfinished
                if not delivery.end_delivery(failed=failed, deadline=deadline)
            ]
        if unfinished:
            self._say(
                f"{_join_names(unfinished)} did not take in all of the run; "
                "the run's folder has everything"
            )

    def _describe_run(self, *, again: bool) -> TrackedRun:
        """Describe the run for trackers."""
        history = self._history
        settings = {**self._settings, "seed": history.seed}
        return TrackedRun(
            self._folder.name,
            self._folder.path,
            history.make_identity(self._folder.name),
            history.began,
            settings,
            again,
        )


def _join_names(deliveries: Sequence[TrackerDelivery]) -> str:
    """Join the names of trackers."""
    return " and ".join(delivery.tracker.name for delivery in deliveries)
