"""What is shown of a run while it trains: a status now and then, made of its steps, on whatever
display there is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from paceline.record.display import Display, PlainLines
from paceline.status.run_status import RunStatus, ValueCurve
from paceline.trace import PARTS
from paceline.unequal.stragglers.lateness import RankLateness

EVERY = 0.9  # seconds between two statuses at least: steps come about once a second
_VALUES = 4  # logged values that are shown, the loss among them
_BESIDE = 10  # and in a line beside steps
# of a step, and seconds of it, from which on it is shown that a worker is late
LATE, LEAST = 0.2, 1e-3
WINDOW = 30  # statuses over which the time left is estimated


class FinishedStep(NamedTuple):
    """A finished step.

    `time`: seconds since the run began; `seconds`: of each part of it, mean over workers.
    """

    step: int
    time: float
    samples: int
    values: Mapping[str, float]
    seconds: Mapping[str, float]


class StatusDisplay(Protocol):
    """A display of how far a run is."""

    def step(self, beat: FinishedStep, total: int | None) -> None:
        """Take in the next step, of `total` if that is known."""

    def show(self) -> None:
        """Show the newest step, if it is time."""

    def at(self, epoch: tuple[int, int] | None) -> None:
        """Show from the next time on which epoch is under way, from 1 on, and of how many."""

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Show what was logged of a step once it was over."""

    def late(self, latest: RankLateness, host: str, step: float) -> None:
        """Show from the next time on who is latest, on which host, where it matters in a step of
        so many seconds.
        """

    def remark(self, text: str) -> None:
        """Show this text, too, from the next time on."""

    def close(self, total: int | None) -> None:
        """Show the last step if it hasn't been, and let go. Calling it twice is harmless."""


class StatusLine:
    """Shows on `display` how far the run is, about once a second (as text less often), and the
    last step in any case.
    """

    def __init__(self, display: Display, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._display, self._clock = display, clock
        self._began = clock()
        self._last: FinishedStep | None = None  # the newest step
        self._total: int | None = None
        self._unshown = False
        self._next = -float("inf")
        self._seconds = dict.fromkeys(PARTS, 0.0)  # since the last status
        self._samples = 0
        self._curves: dict[str, ValueCurve] = {}  # of the first value alone
        self._epoch: tuple[int, int] | None = None
        self._late = self._remark = ""  # who is late, and what else is to be seen
        # what was logged of a step that was over, and isn't shown yet
        self._beside: tuple[int, dict[str, float]] | None = None
        self._next_beside = -float("inf")
        self._marks: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def step(self, beat: FinishedStep, total: int | None) -> None:
        """Take in the next step, of `total` if that is known."""
        for part in PARTS:
            self._seconds[part] += beat.seconds.get(part, 0.0)
        self._samples += beat.samples
        self._last, self._total, self._unshown = beat, total, True
        if beat.values:
            name = "loss" if "loss" in beat.values else min(beat.values)
            if name not in self._curves:
                self._curves = {name: ValueCurve()}
            self._curves[name].add(beat.values[name])

    def show(self) -> None:
        """Show the newest step, unless the last status is too new."""
        now = self._clock()
        if self._unshown and now >= self._next:
            self._next = now + (
                max(EVERY, self._display.pause(now - self._began))
                if isinstance(self._display, PlainLines)
                else EVERY
            )
            self._show(self._total)

    def at(self, epoch: tuple[int, int] | None) -> None:
        """Show from the next status on which epoch is under way, from 1 on, and of how many."""
        self._epoch = epoch

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Show in a line of its own what was logged of a step once it was over, at most once a
        second, and the last in any case.
        """
        before = self._beside[1] if self._beside is not None and self._beside[0] == step else {}
        self._beside = (step, {**before, **values})
        now = self._clock()
        if now >= self._next_beside:
            self._next_beside = now + EVERY
            self._show_beside()

    def late(self, latest: RankLateness, host: str, step: float) -> None:
        """Show from the next status on who is latest, on which host, where it matters in a step
        of so many seconds.
        """
        self._late = late_words(latest, host, step)

    def remark(self, text: str) -> None:
        """End statuses with this text from the next one on."""
        self._remark = text

    def close(self, total: int | None) -> None:
        """Show the last step if it hasn't been, and release the display.

        Calling it twice is harmless.
        """
        if self._unshown:
            self._show(total)
        self._show_beside()
        self._display.close()

    def _show_beside(self) -> None:
        found, self._beside = self._beside, None
        if found is not None:
            self._display.say(beside_words(*found))

    def _show(self, total: int | None) -> None:
        assert self._last is not None
        self._marks.append((self._last.step, self._last.time))
        beat = self._last._replace(samples=self._samples, seconds=self._seconds)
        curve = self._curves.get("loss" if "loss" in beat.values else min(beat.values, default=""))
        left = time_left(self._marks, total)
        self._display.show(
            summary(
                beat,
                total,
                left=left,
                epoch=self._epoch,
                curve=curve,
                late=self._late,
                remark=self._remark,
            )
        )
        self._samples, self._seconds, self._unshown = 0, dict.fromkeys(PARTS, 0.0), False


def summary(
    beat: FinishedStep,
    total: int | None,
    *,
    left: float | None,
    epoch: tuple[int, int] | None = None,
    curve: ValueCurve | None = None,
    late: str = "",
    remark: str = "",
) -> RunStatus:
    """Make a status of the newest step, which has the samples and the seconds of all since the
    last status. `left`: seconds.
    """
    names = sorted(beat.values, key=lambda name: (name != "loss", name))[:_VALUES]
    whole = sum(beat.seconds.values())
    return RunStatus(
        step=beat.step,
        steps=total,
        epoch=None if epoch is None else epoch[0],
        epochs=None if epoch is None else epoch[1],
        values={name: beat.values[name] for name in names},
        curve=() if curve is None else curve.points(),
        rate=beat.samples / whole if whole > 0 else None,
        parts={part: beat.seconds.get(part, 0.0) / whole for part in PARTS} if whole > 0 else {},
        left=left if left is not None and (total is None or beat.step < total) else None,
        late=late,
        remark=remark,
    )


def late_words(latest: RankLateness, host: str, step: float) -> str:
    """Say by how much of a step of so many seconds the latest worker is late, and why; nothing
    where it doesn't matter.
    """
    seconds = latest.seconds
    matters = seconds >= LEAST and seconds >= LATE * step
    return (
        f"rank {latest.rank} on {host} late {seconds / step:.0%}: {latest.cause}" if matters else ""
    )


def time_left(marks: Sequence[tuple[int, float]], total: int | None) -> float | None:
    """Return the seconds until step `total`, by steps and the seconds at which they were over,
    oldest first; None if that isn't known.
    """
    (first, began), (last, now) = marks[0], marks[-1]
    if total is None or last == first:
        return None
    return max(total - last, 0) * (now - began) / (last - first)


def beside_words(step: int, values: Mapping[str, float]) -> str:
    """Format what was logged of a step once it was over."""
    return "  ".join(
        [f"step {step}", *(f"{name} {values[name]:.4g}" for name in sorted(values)[:_BESIDE])]
    )
