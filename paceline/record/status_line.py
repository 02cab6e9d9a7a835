"""Makes the status of a run from its steps, about once a second, and shows it on a display."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from paceline.record.display import Display, PlainLines
from paceline.status.run_status import RunStatus, ValueCurve
from paceline.trace import STEP_PARTS
from paceline.unequal.stragglers.lateness import RankLateness

# Least seconds between two statuses. Steps arrive about once a second, so a full second would miss
# every other one.
STATUS_INTERVAL = 0.9
# Logged values in a status, the loss among them.
_MAX_VALUES = 4
_MAX_LATE_VALUES = 10  # logged values in a line of their own
# A late worker is shown if it is late by this share of a step, and by these seconds.
LATE_SHARE, LATE_SECONDS = 0.2, 1e-3
# Statuses over which the time left is estimated.
ESTIMATE_WINDOW = 30


class FinishedStep(NamedTuple):
    """A finished step.

    `time` is in seconds since the run began; `seconds` are those of each part of the step, the mean
    over workers.
    """

    step: int
    time: float
    samples: int
    values: Mapping[str, float]
    seconds: Mapping[str, float]


class StatusDisplay(Protocol):
    """A display of the status of a run."""

    def step(self, finished: FinishedStep, total: int | None) -> None:
        """Add the next finished step. `total` is the number of steps, if it is known."""

    def show(self) -> None:
        """Show the newest step, if it is time."""

    def at(self, epoch: tuple[int, int] | None) -> None:
        """Set the epoch that is shown from now on: its number, from 1 on, and the total."""

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Show values that were logged after their step had ended."""

    def late(self, latest: RankLateness, host: str, step: float) -> None:
        """Set the latest worker, its host, and the mean seconds of a step.

        It is shown from now on, if it is late enough to matter.
        """

    def remark(self, text: str) -> None:
        """Set a text that is shown from now on, too."""

    def close(self, total: int | None) -> None:
        """Show the last step if it is still unshown, and close. Calling it twice is harmless."""


class StatusLine:
    """Shows the status of a run on a display, about once a second (as text less often).

    The last step is always shown. Between two statuses, seconds and samples add up in `_seconds`
    and `_samples`.
    """

    def __init__(self, display: Display, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._display, self._clock = display, clock
        self._began = clock()
        self._last_step: FinishedStep | None = None
        self._total_steps: int | None = None
        self._unshown = False
        self._next_status = -float("inf")
        # Sums since the last status.
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self._samples = 0
        # Curve of one value: the loss, or else the first by name.
        self._curves: dict[str, ValueCurve] = {}
        self._epoch: tuple[int, int] | None = None
        # Texts at the end of a status.
        self._late_text = self._remark_text = ""
        # Values that were logged after their step had ended, and are not shown yet.
        self._late_values: tuple[int, dict[str, float]] | None = None
        self._next_late_values = -float("inf")
        self._marks: deque[tuple[int, float]] = deque(maxlen=ESTIMATE_WINDOW)

    def step(self, finished: FinishedStep, total: int | None) -> None:
        """Add the next finished step. `total` is the number of steps, if it is known."""
        for part in STEP_PARTS:
            self._seconds[part] += finished.seconds.get(part, 0.0)
        self._samples += finished.samples
        self._last_step, self._total_steps, self._unshown = finished, total, True
        if finished.values:
            name = "loss" if "loss" in finished.values else min(finished.values)
            if name not in self._curves:
                self._curves = {name: ValueCurve()}
            self._curves[name].add_value(finished.values[name])

    def show(self) -> None:
        """Show the newest step, unless the last status is too recent."""
        now = self._clock()
        if self._unshown and now >= self._next_status:
            self._next_status = now + (
                max(STATUS_INTERVAL, self._display.pause_seconds(now - self._began))
                if isinstance(self._display, PlainLines)
                else STATUS_INTERVAL
            )
            self._show_status(self._total_steps)

    def at(self, epoch: tuple[int, int] | None) -> None:
        """Set the epoch that is shown from now on: its number, from 1 on, and the total."""
        self._epoch = epoch

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Show values that were logged after their step had ended, in a line of their own.

        There is at most one such line in a second. The last one is always shown.
        """
        earlier = (
            self._late_values[1]
            if self._late_values is not None and self._late_values[0] == step
            else {}
        )
        self._late_values = (step, {**earlier, **values})
        now = self._clock()
        if now >= self._next_late_values:
            self._next_late_values = now + STATUS_INTERVAL
            self._print_late_values()

    def late(self, latest: RankLateness, host: str, step: float) -> None:
        """Set the latest worker, its host, and the mean seconds of a step."""
        self._late_text = describe_lateness(latest, host, step)

    def remark(self, text: str) -> None:
        """Set the text that statuses end with."""
        self._remark_text = text

    def close(self, total: int | None) -> None:
        """Show the last step if it is still unshown, and close. Calling it twice is harmless."""
        if self._unshown:
            self._show_status(total)
        self._print_late_values()
        self._display.close()

    def _print_late_values(self) -> None:
        """Print the later values, if there are new ones."""
        late_values, self._late_values = self._late_values, None
        if late_values is not None:
            self._display.say(format_late_values(*late_values))

    def _show_status(self, total: int | None) -> None:
        """Show the newest step with the sums since the last status, and reset the sums."""
        assert self._last_step is not None
        self._marks.append((self._last_step.step, self._last_step.time))
        finished = self._last_step._replace(samples=self._samples, seconds=self._seconds)
        curve = self._curves.get(
            "loss" if "loss" in finished.values else min(finished.values, default="")
        )
        seconds_left = estimate_time_left(self._marks, total)
        self._display.show(
            make_status(
                finished,
                total,
                left=seconds_left,
                epoch=self._epoch,
                curve=curve,
                late=self._late_text,
                remark=self._remark_text,
            )
        )
        self._samples, self._seconds, self._unshown = 0, dict.fromkeys(STEP_PARTS, 0.0), False


def make_status(
    beat: FinishedStep,
    total: int | None,
    *,
    left: float | None,
    epoch: tuple[int, int] | None = None,
    curve: ValueCurve | None = None,
    late: str = "",
    remark: str = "",
) -> RunStatus:
    """Make a status of the newest step.

    Args:
        beat: Newest step, with the samples and the seconds of all steps since the last status.
        total: Number of steps, if it is known.
        left: Seconds until the last step, if they are known.
        epoch: Current epoch, from 1 on, and the number of epochs.
        curve: Earlier values of the loss.
        late: Text on the latest worker.
        remark: Text at the end.
    """
    names = sorted(beat.values, key=lambda name: (name != "loss", name))[:_MAX_VALUES]
    step_seconds = sum(beat.seconds.values())
    return RunStatus(
        step=beat.step,
        steps=total,
        epoch=None if epoch is None else epoch[0],
        epochs=None if epoch is None else epoch[1],
        values={name: beat.values[name] for name in names},
        curve=() if curve is None else curve.list_points(),
        rate=beat.samples / step_seconds if step_seconds > 0 else None,
        parts={part: beat.seconds.get(part, 0.0) / step_seconds for part in STEP_PARTS}
        if step_seconds > 0
        else {},
        left=left if left is not None and (total is None or beat.step < total) else None,
        late=late,
        remark=remark,
    )


def describe_lateness(latest: RankLateness, host: str, step: float) -> str:
    """Describe how late the latest worker is, and why; empty if it doesn't matter.

    `step` is the mean seconds of a step.
    """
    seconds = latest.seconds
    matters = seconds >= LATE_SECONDS and seconds >= LATE_SHARE * step
    return (
        f"rank {latest.rank} on {host} late {seconds / step:.0%}: {latest.cause}" if matters else ""
    )


def estimate_time_left(marks: Sequence[tuple[int, float]], total: int | None) -> float | None:
    """Estimate the seconds until step `total`; None if that can't be done.

    `marks` are steps, and the seconds at which they had ended, oldest first.
    """
    (first, began), (last, now) = marks[0], marks[-1]
    if total is None or last == first:
        return None
    return max(total - last, 0) * (now - began) / (last - first)


def format_late_values(step: int, values: Mapping[str, float]) -> str:
    """Format values that were logged after their step had ended."""
    return "  ".join(
        [
            f"step {step}",
            *(f"{name} {values[name]:.4g}" for name in sorted(values)[:_MAX_LATE_VALUES]),
        ]
    )
