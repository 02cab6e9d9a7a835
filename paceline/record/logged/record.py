"""The record of one finished step that a worker hands over, as a row of plain data."""

from __future__ import annotations

from typing import NamedTuple


class LogRecord(NamedTuple):
    """A finished step of one worker, or values that were logged after it had ended.

    In the second case `seconds`, `causes` and `sent` are None. Records travel as msgpack lists, so
    the order of the fields is the format.
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
