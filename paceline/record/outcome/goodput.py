"""Goodput: the share of the workers' time that trained samples that count, and where the rest went.

    worker 0  start | useful data waiting exchange | checkpoint | ... idle | ...
    worker 1  start | ...          | killed: its time ends with its last record
    worker 2                           recovery | useful ...         it replaces worker 1

All workers are added up. Times are whole microseconds, so that they add up exactly. If the whole
job has started again, its earlier starts count, too: what they have trained after the checkpoint
is repeated work, and the time between two starts is recovery.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.record.outcome.worker_time import WorkerSeconds, WorkerTime
from paceline.trace import STEP_PARTS

# Where the time of workers goes, in the order of the report.
GOODPUT_PARTS: Final = (
    "useful",
    "start",
    "data",
    "waiting",
    "exchange",
    "checkpoint",
    "recovery",
    "repeated",
    "idle",
)
_STEP_NAMES: Final = dict(zip(STEP_PARTS, ("useful", "exchange", "waiting", "data"), strict=True))
# If parts exceed the whole by an error of measurement, these give way first.
_UNCERTAIN_PARTS: Final = ("exchange", "waiting", "data", "useful", "repeated", "recovery",
                           "checkpoint", "start")  # fmt: skip
_HUNDREDTHS: Final = 10_000  # of a percent, in the whole


def divide_time(worker: WorkerSeconds) -> dict[str, int]:
    """Divide the time of a worker into `GOODPUT_PARTS`, in microseconds that add up exactly."""
    seconds = {
        "start": worker.start,
        "checkpoint": worker.checkpoint,
        "recovery": worker.recovery,
        "repeated": worker.repeated,
        **{_STEP_NAMES[part]: value for part, value in zip(STEP_PARTS, worker.steps, strict=True)},
    }
    parts = {name: max(round(1e6 * seconds.get(name, 0.0)), 0) for name in GOODPUT_PARTS}
    present = max(round(1e6 * worker.present), 0)
    excess = sum(parts.values()) - present
    for name in _UNCERTAIN_PARTS:
        if excess > 0:
            taken = min(excess, parts[name])
            parts[name], excess = parts[name] - taken, excess - taken
    parts["idle"] = present - sum(parts.values())
    return parts


def add_times(times: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up the times of several workers, or of several starts."""
    rows = list(times)
    return {name: sum(row.get(name, 0) for row in rows) for name in GOODPUT_PARTS}


def compute_percent(parts: Mapping[str, int]) -> dict[str, float]:
    """Compute the percent of each part, with two digits, so that they add up to 100.

    The largest remainders are rounded up.
    """
    whole = sum(parts.values())
    if whole == 0:
        return dict.fromkeys(parts, 0.0)
    hundredths = {name: value * _HUNDREDTHS // whole for name, value in parts.items()}
    by_remainder = sorted(parts, key=lambda name: -(parts[name] * _HUNDREDTHS % whole))
    for name in by_remainder[: _HUNDREDTHS - sum(hundredths.values())]:
        hundredths[name] += 1
    return {name: value / 100 for name, value in hundredths.items()}


@dataclass
class EarlierStarts:
    """The time of the earlier starts of a job, which the first worker knows.

    Attributes:
        parts: Microseconds of all workers, by part.
        workers: Number of workers that they had.
        unrecorded: Seconds of PARTS on the first worker of steps without a line in the metrics.
        until: Wall time until which it is known. None: there was no earlier start.
        restarts: Number of restarts, this one included.
        restart_seconds: Seconds of all restarts but this one.
        ended: Wall time at which the last start ended. None: there was none.
        heals: Recoveries from losses.
        heal_seconds: Seconds of them.
    """

    parts: dict[str, int] = field(default_factory=dict)
    workers: int = 1
    unrecorded: dict[str, float] = field(default_factory=dict)
    until: float | None = None
    restarts: int = 0
    restart_seconds: float = 0.0
    ended: float | None = None
    heals: int = 0
    heal_seconds: float = 0.0

    def move_repeated(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Count steps as repeated work: those with these lines of the metrics.

        What had no line yet was lost with the workers, and is repeated work, too.
        """
        lines = [*lines, {"seconds": self.unrecorded}]
        self.unrecorded = {}
        for line in lines:
            seconds = line.get("seconds")
            if not isinstance(seconds, dict):
                continue
            for part, name in _STEP_NAMES.items():
                value = round(1e6 * seconds.get(part, 0.0) * self.workers)
                moved = min(max(value, 0), self.parts.get(name, 0))
                self.parts[name] = self.parts.get(name, 0) - moved
                self.parts["repeated"] = self.parts.get("repeated", 0) + moved


def read_earlier_starts(
    live_file: Path, began: float, ends: Sequence[tuple[float, str]], workers: int
) -> EarlierStarts:
    """Read the time of the earlier starts of a job from the file that the last one left.

    Args:
        live_file: `live.json` in the folder of the run. If it can't be read, nothing is known but
            when the first start began.
        began: Wall time at which the first start began.
        ends: When each earlier start ended, and why.
        workers: Number of workers of the job.
    """
    earlier = EarlierStarts(
        workers=workers, until=began, restarts=len(ends), ended=ends[-1][0] if ends else None
    )
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        content = json.loads(live_file.read_text(encoding="utf-8"))
        fields, until = content["goodput"], float(content["live"]["time"])
        parts = {name: round(1e6 * float(fields["seconds"][name])) for name in GOODPUT_PARTS}
        if min(parts.values()) >= 0:
            earlier.parts, earlier.until = parts, until
            unrecorded = content["live"]["unrecorded"]
            earlier.unrecorded = {part: float(unrecorded[part]) for part in STEP_PARTS}
            earlier.restart_seconds = float(fields["restart_seconds"])
            earlier.heals, earlier.heal_seconds = (
                int(fields["heals"]),
                float(fields["heal_seconds"]),
            )
    return earlier


def make_goodput_fields(
    workers: Sequence[WorkerSeconds],
    earlier: EarlierStarts,
    own: WorkerTime,
) -> dict[str, Any]:
    """Make the fields of `goodput` in the summary.

    Args:
        workers: Times of all workers of this start.
        earlier: The earlier starts of the job.
        own: Time of the first worker.
    """
    times = [divide_time(worker) for worker in workers]
    restart_seconds = earlier.restart_seconds
    if earlier.until is not None:
        # The time between two starts, of all workers. Until the last one ended, they trained what
        # is trained again.
        ended = min(max(earlier.ended or earlier.until, earlier.until), own.began)
        lost, gap = max(ended - earlier.until, 0.0), max(own.began - ended, 0.0)
        between = {"repeated": round(1e6 * lost), "recovery": round(1e6 * gap)}
        times += [earlier.parts]
        times += [{name: value * len(workers) for name, value in between.items()}]
    if earlier.ended is not None:
        restart_seconds += max(own.began + own.start_seconds - earlier.ended, 0.0)
    parts = add_times(times)
    return {
        "worker_seconds": sum(parts.values()) / 1e6,
        "seconds": {name: value / 1e6 for name, value in parts.items()},
        "percent": compute_percent(parts),
        "heals": earlier.heals + own.heals,
        "heal_seconds": earlier.heal_seconds + own.heal_seconds,
        "restarts": earlier.restarts,
        "restart_seconds": restart_seconds,
    }
