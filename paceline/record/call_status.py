"""The status of a run on its way from the first worker of a call by `pl.launch` to who has made it,
and shows it.

first worker                                           caller
  MetricsWriter -- step, logged, late, remark --> StatusReports == "status" ==> StatusRelay -- the same --> StatusLine, or a notebook's bar
"""  # noqa: E501

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.cluster.control.calls import CallChannel
from paceline.cluster.discover import Place
from paceline.record.display import choose
from paceline.record.status_line import EVERY, FinishedStep, StatusDisplay, StatusLine
from paceline.trace import PARTS
from paceline.unequal.stragglers.lateness import RankLateness

_APART = EVERY / 2  # seconds between two reports: who shows one a second finds a new one each time
_VALUES = 16  # logged values in a report: nobody shows more


class StatusReports:
    """Sends how far the run is, at most twice a second, and the last step in any case.

    Never holds a step up.
    """

    def __init__(
        self, channel: CallChannel, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._clock = channel, clock
        self._last: FinishedStep | None = None
        self._total: int | None = None
        self._epoch: tuple[int, int] | None = None
        self._unsent = False
        self._next = -float("inf")
        self._seconds = dict.fromkeys(PARTS, 0.0)  # since the last report
        self._samples = 0
        self._late: tuple[int, dict[str, float], str, float] | None = None
        self._remark = ""
        self._begun = False
        # what was logged of a step that was over, and isn't sent yet
        self._beside: tuple[int, dict[str, float]] | None = None

    def step(self, beat: FinishedStep, total: int | None) -> None:
        """Take in the next step, of `total` if that is known."""
        for part in PARTS:
            self._seconds[part] += beat.seconds.get(part, 0.0)
        self._samples += beat.samples
        self._last, self._total, self._unsent = beat, total, True

    def show(self) -> None:
        """Send the newest step, if the last report is old."""
        now = self._clock()
        if self._unsent and now >= self._next:
            self._next = now + _APART
            self._send(self._total, waits=False)

    def at(self, epoch: tuple[int, int] | None) -> None:
        """Report from the next time on which epoch is under way."""
        self._epoch = epoch

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Report with the next step, or at the end, what was logged of a step once it was over."""
        before = self._beside[1] if self._beside is not None and self._beside[0] == step else {}
        self._beside = step, {**before, **values}

    def late(self, latest: RankLateness, host: str, step: float) -> None:
        """Report from the next time on who is latest, on which host, in a step of so many
        seconds.
        """
        self._late = (latest.rank, latest.by_cause, host, step)

    def remark(self, text: str) -> None:
        """Report this text, too, from the next time on."""
        self._remark = text

    def close(self, total: int | None) -> None:
        """Send the last step if it hasn't been. Calling it twice is harmless."""
        if self._unsent or self._beside is not None:
            self._send(total, waits=True)
        self._channel.close()

    def _send(self, total: int | None, *, waits: bool) -> None:
        beat: tuple[Any, ...] | None = None
        if self._last is not None and self._unsent:
            step, when, _, values, _ = self._last
            beat = step, when, self._samples, _fewest(values), self._seconds
        beside = None if self._beside is None else (self._beside[0], _fewest(self._beside[1]))
        report = {
            "beat": beat,
            "total": total,
            "epoch": self._epoch,
            "late": self._late,
            "remark": self._remark,
            "beside": beside,
        }
        report["begins"] = not self._begun
        if self._channel.send("status", report, waits=waits):
            self._begun, self._beside = True, None
            self._samples, self._seconds, self._unsent = 0, dict.fromkeys(PARTS, 0.0), False


def _fewest(values: Mapping[str, float]) -> dict[str, float]:
    """Return as many values as are shown, the loss among them."""
    return {
        name: values[name]
        for name in sorted(values, key=lambda name: (name != "loss", name))[:_VALUES]
    }


class StatusRelay:
    """Shows reports as they come, each run on a display of its own, which `make` makes."""

    def __init__(self, make: Callable[[], StatusDisplay]) -> None:
        self._make = make
        self._display: StatusDisplay | None = None
        self._total: int | None = None

    def show(self, report: dict[str, Any]) -> None:
        """Show the fields of a "status" message."""
        if self._display is None or report["begins"]:
            self.close()
            self._display = self._make()
        self._total = report["total"]
        if report["late"] is not None:
            rank, by_cause, host, step = report["late"]
            self._display.late(RankLateness(rank, by_cause), host, step)
        self._display.remark(report["remark"])
        self._display.at(None if report["epoch"] is None else tuple(report["epoch"]))
        if report["beat"] is not None:
            self._display.step(FinishedStep(*report["beat"]), self._total)
            self._display.show()
        if report["beside"] is not None:
            self._display.logged(*report["beside"])

    def close(self) -> None:
        """Show the last step, and let go of the display. Calling it twice is harmless."""
        if self._display is not None:
            self._display.close(self._total)
            self._display = None


def display(place: Place) -> StatusDisplay:
    """Return where the worker in this place shows how far its run is: on its own output, or at
    the caller of `pl.launch`.
    """
    return (
        StatusLine(choose(place))
        if place.call is None
        else StatusReports(CallChannel.inherited(place.call.channel))
    )
