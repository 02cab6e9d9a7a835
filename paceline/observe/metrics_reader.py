"""Reads the metrics of a run into columns.

Each line is read once, so a file that still grows is followed without starting again.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from io import BufferedReader
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.record.folder import RunFolder
from paceline.trace import DESTINATIONS, STEP_PARTS

# Fields of a line that no script has logged.
OWN_FIELDS = frozenset(("step", "time", "samples", "seconds", "bytes_sent", "ranks"))
Floats = NDArray[np.float64]


class StepColumns(NamedTuple):
    """The finished steps of a run, one element for each step."""

    step: Floats
    time: Floats  # seconds since the start of the run
    samples: Floats
    seconds: Floats  # (steps, parts): a column for each of PARTS
    # (steps, 2): bytes of all workers, a column for each of SENT.
    sent: Floats


class ValueColumns(NamedTuple):
    """The values that were logged under one name, one element for each line that has it."""

    step: Floats
    time: Floats
    value: Floats


class WorkerLook(NamedTuple):
    """What each worker did since the previous look, by its number.

    Values are steps, seconds of each of PARTS, and seconds of lateness.
    """

    step: float
    time: float
    workers: dict[str, list[float]]


class MetricsReader:
    """Reads the metrics of one run.

    `read_new_lines` starts again if the file was replaced or became shorter, as after a resume. An
    incomplete last line is left for the next time. So `_offset` is always the end of a whole line
    of the file `_file_identity`, and the columns have the values of `_line_count` lines.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._reset()

    def _reset(self) -> None:
        """Drop everything that was read."""
        self._file_identity = (0, 0)  # device and inode of the file that was read
        self._offset = self._line_count = 0
        self._last_time = -1.0
        self._step_columns, self._part_columns = (
            [array("d") for _ in range(3)],
            [array("d") for _ in STEP_PARTS],
        )
        self._sent_columns = [array("d") for _ in DESTINATIONS]
        self._looks: list[WorkerLook] = []
        self._value_columns: dict[str, tuple[array[float], array[float], array[float]]] = {}

    def read_new_lines(self) -> bool:
        """Read the new lines, if there is a file. Returns whether there were new lines.

        Raises:
            UsageError: A line is not JSON, or is not of this version.
        """
        try:
            file = self._folder.metrics.open("rb")
        except FileNotFoundError:
            return False
        with file:
            status = os.fstat(file.fileno())
            if (
                status.st_dev,
                status.st_ino,
            ) != self._file_identity or status.st_size < self._offset:
                self._reset()
                self._file_identity = (status.st_dev, status.st_ino)
            lines_before = self._line_count
            file.seek(self._offset)
            self._read_lines(file)
        return self._line_count > lines_before

    def _read_lines(self, file: BufferedReader) -> None:
        """Read lines up to the end of the file, or up to an incomplete line."""
        for text in file:
            try:
                line = json.loads(text)
            except ValueError as error:
                # Nothing follows: this is the last line, which is still being written.
                if not file.read(1):
                    return
                raise UsageError(
                    f"{self._folder.metrics} is damaged in line {self._line_count + 1} ({error}); "
                    "repair or remove that line"
                ) from error
            try:
                self._add_line(line)
            except (AttributeError, KeyError, ValueError, TypeError) as error:
                raise UsageError(
                    f"{self._folder.metrics} is not of this version of paceline: {error!r}"
                ) from error
            self._line_count, self._offset = self._line_count + 1, self._offset + len(text)
            self._last_time = max(self._last_time, float(line["time"]))

    def _add_line(self, line: Mapping[str, Any]) -> None:
        """Add one line to the columns."""
        step, time = float(line["step"]), float(line["time"])
        logged = [(name, float(value)) for name, value in line.items() if name not in OWN_FIELDS]
        # Lines without seconds have only values, which were logged after their step had ended.
        part_seconds = line.get("seconds")
        if part_seconds is not None:
            sent = line.get("bytes_sent", {})
            row = [
                step,
                time,
                float(line["samples"]),
                *(float(part_seconds[part]) for part in STEP_PARTS),
                *(float(sent.get(to, 0)) for to in DESTINATIONS),
            ]
            for column, value in zip(
                (*self._step_columns, *self._part_columns, *self._sent_columns), row, strict=True
            ):
                column.append(value)
        if "ranks" in line:
            workers = {
                str(int(worker)): [float(value) for value in values]
                for worker, values in line["ranks"].items()
            }
            self._looks.append(WorkerLook(step, time, workers))
        for name, value in logged:
            columns = self._value_columns.setdefault(name, (array("d"), array("d"), array("d")))
            for column, item in zip(columns, (step, time, value), strict=True):
                column.append(item)

    @property
    def line_count(self) -> int:
        """Number of lines that were read."""
        return self._line_count

    @property
    def last_seconds(self) -> float | None:
        """Time of the latest line, in seconds since the start of the run; None without a line."""
        return self._last_time if self._line_count else None

    @property
    def steps(self) -> StepColumns:
        """The finished steps that were read."""
        step, time, samples = (_copy_column(column) for column in self._step_columns)
        seconds, sent = (
            np.stack([_copy_column(column) for column in columns], axis=1)
            for columns in (self._part_columns, self._sent_columns)
        )
        return StepColumns(step, time, samples, seconds, sent)

    @property
    def looks(self) -> Sequence[WorkerLook]:
        """The looks at single workers that were read."""
        return tuple(self._looks)

    @property
    def values(self) -> dict[str, ValueColumns]:
        """The values of each logged name, NaN and infinities included."""
        return {
            name: ValueColumns(*(_copy_column(column) for column in columns))
            for name, columns in self._value_columns.items()
        }


def _copy_column(column: array[float]) -> Floats:
    """Copy a column to NumPy."""
    # A view would export the buffer of the array, which can't grow then.
    return np.array(column, dtype=np.float64)
