"""The status line: one line kept up to date on a terminal, or a line of text a second elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

from paceline.session.record.folder import PARTS
from paceline.session.record.lateness import RankLateness

if TYPE_CHECKING:
    from rich.live import Live

EVERY = 1.0  # seconds between two lines
_VALUES = 4  # logged values that are shown, the loss among them
LATE, LEAST = 0.2, 1e-3  # of a step, and seconds of it, from which on it is shown that a worker is late
WINDOW = 30  # lines over which the time left is estimated


class FinishedStep(NamedTuple):
    """A finished step. `time`: seconds since the run began; `seconds`: of each part of it, mean over workers."""

    step: int
    time: float
    samples: int
    values: Mapping[str, float]
    seconds: Mapping[str, float]


class StatusDisplay(Protocol):
    """A display of how far a run is."""

    def step(self, beat: FinishedStep, total: int | None) -> None:
        """Take in the next step, of `total` if that is known."""

    def late(self, latest: RankLateness, host: str, step: float) -> None:
        """Show from the next time on who is latest, on which host, where it matters in a step of so many seconds."""

    def remark(self, text: str) -> None:
        """Show this text, too, from the next time on."""

    def close(self, total: int | None) -> None:
        """Show the last step if it hasn't been, and let go. Calling it twice is harmless."""


class StatusLine:
    """Shows how far the run is, at most once a second, and the last step in any case."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._live: Live | None = None
        self._last: FinishedStep | None = None  # the newest step
        self._unshown = False
        self._next = -float("inf")
        self._seconds = dict.fromkeys(PARTS, 0.0)  # since the last line
        self._samples = 0
        self._late = self._remark = ""  # who is late, and what else is to be seen
        self._marks: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def step(self, beat: FinishedStep, total: int | None) -> None:
        """Take in the next step, of `total` if that is known, and show it if the last line is a second old."""
        for part in PARTS:
            self._seconds[part] += beat.seconds.get(part, 0.0)
        self._samples += beat.samples
        self._last, self._unshown = beat, True
        now = self._clock()
        if now >= self._next:
            self._next = now + EVERY
            self._show(total)

    def late(self, latest: RankLateness, host: str, step: float) -> None:
        """Show from the next line on who is latest, on which host, where it matters in a step of so many seconds."""
        self._late = late_words(latest, host, step)

    def remark(self, text: str) -> None:
        """End lines with this text from the next one on."""
        self._remark = text

    def close(self, total: int | None) -> None:
        """Show the last step if it hasn't been, and release the terminal. Calling it twice is harmless."""
        if self._unshown:
            self._show(total)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, total: int | None) -> None:
        assert self._last is not None
        self._marks.append((self._last.step, self._last.time))
        text = describe(
            self._last,
            self._samples,
            self._seconds,
            total=total,
            left=time_left(self._marks, total),
            remark="  ".join(filter(None, (self._late, self._remark))),
        )
        self._samples, self._seconds, self._unshown = 0, dict.fromkeys(PARTS, 0.0), False
        if not self._stream.isatty():
            print(text, file=self._stream, flush=True)
            return
        from rich.console import Console  # here: it takes as long to import as all of paceline, and only a terminal needs it
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            # refreshed by hand: a thread of its own would take time from training
            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def late_words(latest: RankLateness, host: str, step: float) -> str:
    """Say by how much of a step of so many seconds the latest worker is late, and why; nothing where it doesn't matter."""
    seconds = latest.seconds
    matters = seconds >= LEAST and seconds >= LATE * step
    return f"rank {latest.rank} on {host} late {seconds / step:.0%}: {latest.cause}" if matters else ""


def time_left(marks: Sequence[tuple[int, float]], total: int | None) -> float | None:
    """Return the seconds until step `total`, by steps and the seconds at which they were over, oldest first; None if that isn't known."""
    (first, began), (last, now) = marks[0], marks[-1]
    if total is None or last == first:
        return None
    return max(total - last, 0) * (now - began) / (last - first)


def describe(
    beat: FinishedStep, samples: int, seconds: Mapping[str, float], *, total: int | None, left: float | None, remark: str = ""
) -> str:
    """Format the line. `samples` and `seconds` are those of the steps since the last line, `left` is the time left in seconds.

    `remark`: who is late, if anybody is.
    """
    parts = [f"step {beat.step}" if total is None else f"step {beat.step}/{total}"]
    names = sorted(beat.values, key=lambda name: (name != "loss", name))[:_VALUES]
    parts += [f"{name} {beat.values[name]:.4g}" for name in names]
    whole = sum(seconds.values())
    if whole > 0:
        parts.append(f"{samples / whole:,.0f} samples/s")
        parts.append(" ".join(f"{part} {seconds.get(part, 0.0) / whole:.0%}" for part in PARTS))
    if left is not None and (total is None or beat.step < total):
        parts.append(f"{spoken(left)} left")
    if remark:
        parts.append(remark)
    return "  ".join(parts)


def spoken(seconds: float) -> str:
    """Format a time in seconds as on a clock: 0:07, 12:34, 1:02:03."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
