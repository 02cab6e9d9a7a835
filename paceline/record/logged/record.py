"""What a worker hands over of one finished step: a row of plain data, with all fields in this
order.
"""

from __future__ import annotations

from typing import NamedTuple


class LogRecord(NamedTuple):
    """A finished step of one worker, or what was logged of it once it was over (`seconds`,
    `causes` and `sent` are None then).
    """

    number: int  # of the step in this log
    step: int  # and of the run
    time: float  # seconds since the run began
    samples: int
    seconds: list[float] | None  # of PARTS
    sums: dict[str, list[float]]  # weighted sum and weight of each name
    causes: list[int] | None  # microseconds of MEASURED
    sent: list[int] | None  # bytes of SENT
    states: dict[str, bytes]  # of each metric
