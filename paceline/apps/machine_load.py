"""Measures how busy other programs keep the processors. If they are busy, timings mean little."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MAX_OTHER_SHARE = 0.1  # part of the needed cores that other programs may use without disturbing
# Columns of a line in /proc/stat: user, nice, system, irq, softirq, steal.
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


class ClockReading(NamedTuple):
    """The clocks at one moment, in seconds.

    Attributes:
        now: Time of a clock that never goes back.
        busy: Time for which the cores of this process have been busy, since the machine began.
        ours: Processor time of this process, and of its children that have ended.
    """

    now: float
    busy: float
    ours: float


def read_clocks() -> ClockReading | None:
    """Read the clocks. Returns None if the system doesn't tell how busy its cores are."""
    try:
        text = Path("/proc/stat").read_text(encoding="ascii")
        cores = os.sched_getaffinity(0)
    except (OSError, AttributeError):  # not Linux
        return None
    times = os.times()
    return ClockReading(
        time.monotonic(), count_busy_ticks(text, cores) / os.sysconf("SC_CLK_TCK"), sum(times[:4])
    )


def count_busy_ticks(text: str, cores: Iterable[int]) -> int:
    """Count the ticks for which these cores have been busy. `text` is the content of /proc/stat."""
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    return sum(
        int(words[1 + column])
        for words in lines
        if words[0] in names
        for column in _BUSY_COLUMNS
        if len(words) > 1 + column
    )


def compute_other_load(before: ClockReading | None, after: ClockReading | None) -> float:
    """Compute the mean number of cores that other programs kept busy between two readings.

    The result is 0 if a reading is missing.
    """
    if before is None or after is None or after.now <= before.now:
        return 0.0
    return max(0.0, (after.busy - before.busy) - (after.ours - before.ours)) / (
        after.now - before.now
    )


def is_crowded(taken: float, needed: int, there: int) -> bool:
    """Tell whether other programs leave too few cores.

    Args:
        taken: Number of cores that other programs keep busy.
        needed: Number of cores that are needed.
        there: Number of cores of this machine. With a quota this is more than `needed`.
    """
    return there - taken < (1 - MAX_OTHER_SHARE) * needed
