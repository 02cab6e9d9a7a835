"""The load that other programs put on the processors meanwhile: where it is high, measurements
say little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MAX_OTHER_SHARE = 0.1  # of what is needed: when others take so much of it, they disturb
_BUSY_COLUMNS = (
    0,
    1,
    2,
    5,
    6,
    7,
)  # of a line in /proc/stat: user, nice, system, irq, softirq, steal


class ClockReading(NamedTuple):
    """The clocks at one moment, in seconds."""

    now: float
    busy: float  # of the cores that this process may use, since the machine began
    ours: float  # of this process and the children that have ended


def read_clocks() -> ClockReading | None:
    """Read the clocks; None where the kernel doesn't tell."""
    try:
        text = Path("/proc/stat").read_text(encoding="ascii")
        mine = os.sched_getaffinity(0)
    except (OSError, AttributeError):  # another system than Linux
        return None
    used = os.times()
    return ClockReading(
        time.monotonic(), count_busy_ticks(text, mine) / os.sysconf("SC_CLK_TCK"), sum(used[:4])
    )


def count_busy_ticks(text: str, cores: Iterable[int]) -> int:
    """Count the ticks that these cores have worked, in the text of /proc/stat."""
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    return sum(
        int(words[1 + tick])
        for words in lines
        if words[0] in names
        for tick in _BUSY_COLUMNS
        if len(words) > 1 + tick
    )


def compute_other_load(before: ClockReading | None, after: ClockReading | None) -> float:
    """Mean number of cores that other programs kept busy between two readings; 0 if unknown."""
    if before is None or after is None or after.now <= before.now:
        return 0.0
    return max(0.0, (after.busy - before.busy) - (after.ours - before.ours)) / (
        after.now - before.now
    )


def is_crowded(taken: float, needed: int, there: int) -> bool:
    """Whether others that keep so many cores busy leave less than `needed` of those that are
    `there` (with a quota these are more).
    """
    return there - taken < (1 - MAX_OTHER_SHARE) * needed
