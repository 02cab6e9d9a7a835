"""Carries the status of a `pl.launch` run from its first worker to the caller, which displays it.

first worker                                                        caller
  MetricsWriter --> StatusReports == "status" messages ==> StatusRelay --> StatusLine, or the bar of
  (steps, values, lateness, remarks)                                       a notebook
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.cluster.control.calls import CallChannel
from paceline.cluster.discover import Place
from paceline.record.display import choose_display
from paceline.record.status_line import STATUS_INTERVAL, FinishedStep, StatusDisplay, StatusLine
from paceline.trace import STEP_PARTS
from paceline.unequal.stragglers.lateness import RankLateness

# Seconds between two reports. A display that is redrawn once a second finds a new one each time.
_REPORT_INTERVAL = STATUS_INTERVAL / 2
# Logged values in a report. No display shows more.
_MAX_VALUES = 16


class StatusReports:
    """Sends the status of the run to the caller, without ever delaying a step.

    At most two reports are sent in a second. The last step is always sent.

    Between two reports, seconds and samples add up in `_seconds` and `_samples`. They are reset
    only after a report got through, so a report that could not be sent is contained in the next
    one.
    """

    def __init__(
        self, channel: CallChannel, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._clock = channel, clock
        self._last_step: FinishedStep | None = None
        self._total_steps: int | None = None
        self._epoch: tuple[int, int] | None = None
        self._unsent = False
        self._next_report = -float("inf")
        # Sums since the last report that got through.
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self._samples = 0
        self._late: tuple[int, dict[str, float], str, float] | None = None
        self._remark = ""
        self._has_reported = False
        # Step and values that were logged after that step ended, and are not sent yet.
        self._late_values: tuple[int, dict[str, float]] | None = None

    def step(self, finished: FinishedStep, total: int | None) -> None:
        """Add the next finished step. `total` is the number of steps, if it is known."""
        for part in STEP_PARTS:
            self._seconds[part] += finished.seconds.get(part, 0.0)
        self._samples += finished.samples
        self._last_step, self._total_steps, self._unsent = finished, total, True

    def show(self) -> None:
        """Send the newest step, unless the last report is less than half a second old."""
        now = self._clock()
        if self._unsent and now >= self._next_report:
            self._next_report = now + _REPORT_INTERVAL
            self._send_report(self._total_steps, waits=False)

    def at(self, epoch: tuple[int, int] | None) -> None:
        """Include the current epoch in the reports from now on."""
        self._epoch = epoch

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Include values that were logged after their step had ended."""
        earlier = (
            self._late_values[1]
            if self._late_values is not None and self._late_values[0] == step
            else {}
        )
        self._late_values = step, {**earlier, **values}

    def late(self, latest: RankLateness, host: str, step: float) -> None:
        """Include the latest worker, its host and the mean seconds of a step from now on."""
        self._late = (latest.rank, latest.by_cause, host, step)

    def remark(self, text: str) -> None:
        """Include this text in the reports from now on."""
        self._remark = text

    def close(self, total: int | None) -> None:
        """Send the last step if it is still unsent. Calling it twice is harmless."""
        if self._unsent or self._late_values is not None:
            self._send_report(total, waits=True)
        self._channel.close()

    def _send_report(self, total: int | None, *, waits: bool) -> None:
        """Send a report. With `waits`, wait until the channel has room for it."""
        step_fields: tuple[Any, ...] | None = None
        if self._last_step is not None and self._unsent:
            step, when, _, values, _ = self._last_step
            step_fields = step, when, self._samples, _choose_values(values), self._seconds
        late_values = (
            None
            if self._late_values is None
            else (self._late_values[0], _choose_values(self._late_values[1]))
        )
        report = {
            "beat": step_fields,
            "total": total,
            "epoch": self._epoch,
            "late": self._late,
            "remark": self._remark,
            "beside": late_values,
            "begins": not self._has_reported,
        }
        # A report is dropped if the caller hasn't read for long. The sums then stay as they are,
        # and go with the next report.
        if self._channel.send("status", report, waits=waits):
            self._has_reported, self._late_values = True, None
            self._samples, self._seconds, self._unsent = 0, dict.fromkeys(STEP_PARTS, 0.0), False


def _choose_values(values: Mapping[str, float]) -> dict[str, float]:
    """Choose the values that a report has room for. The loss comes first."""
    return {
        name: values[name]
        for name in sorted(values, key=lambda name: (name != "loss", name))[:_MAX_VALUES]
    }


class StatusRelay:
    """Displays reports as they arrive. `make` creates a display for each run."""

    def __init__(self, make: Callable[[], StatusDisplay]) -> None:
        self._make_display = make
        self._display: StatusDisplay | None = None
        self._total_steps: int | None = None

    def show_report(self, report: dict[str, Any]) -> None:
        """Display the fields of a "status" message."""
        # One call may start several runs, one after the other. Each gets a display of its own.
        if self._display is None or report["begins"]:
            self.close()
            self._display = self._make_display()
        self._total_steps = report["total"]
        if report["late"] is not None:
            rank, seconds_by_cause, host, step_seconds = report["late"]
            self._display.late(RankLateness(rank, seconds_by_cause), host, step_seconds)
        self._display.remark(report["remark"])
        self._display.at(None if report["epoch"] is None else tuple(report["epoch"]))
        if report["beat"] is not None:
            self._display.step(FinishedStep(*report["beat"]), self._total_steps)
            self._display.show()
        if report["beside"] is not None:
            self._display.logged(*report["beside"])

    def close(self) -> None:
        """Show the last step and release the display. Calling it twice is harmless."""
        if self._display is not None:
            self._display.close(self._total_steps)
            self._display = None


def make_status_display(place: Place) -> StatusDisplay:
    """Create the status display of the worker in this place.

    It writes to the worker's own output, or reports to the caller of `pl.launch`.
    """
    return (
        StatusLine(choose_display(place))
        if place.call is None
        else StatusReports(CallChannel.from_descriptor(place.call.channel))
    )
