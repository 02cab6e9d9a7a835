"""The metrics of a run in columns: each line is read once, so that a file which still grows is
followed without beginning again.
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
from paceline.trace import PARTS, SENT

# fields of a line that nobody has logged
OWN = frozenset(("step", "time", "samples", "seconds", "bytes_sent", "ranks"))
Floats = NDArray[np.float64]


class StepColumns(NamedTuple):
    """The finished steps of a run, one element each."""

    step: Floats
    time: Floats  # seconds since the start of the run
    samples: Floats
    seconds: Floats  # a column for each of PARTS
    sent: Floats  # bytes of all workers, a column for each of SENT


class ValueColumns(NamedTuple):
    """What was logged by one name, one element for each line that has it."""

    step: Floats
    time: Floats
    value: Floats


class Look(NamedTuple):
    """What each worker did in the steps since the look before, by its number: steps, seconds of
    PARTS, and seconds of lateness.
    """

    step: float
    time: float
    workers: dict[str, list[float]]


class MetricsReader:
    """Reads the metrics of one run.

    `read` takes in the lines that are new, and begins again where the file is another one.

    A last line that isn't whole is left for the next time. Another one that is no JSON, or isn't of
    this version, raises UsageError.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._forget()

    def _forget(self) -> None:
        self._file = (0, 0)  # device and inode
        self._offset = self._lines = 0
        self._last = -1.0
        self._steps, self._parts = [array("d") for _ in range(3)], [array("d") for _ in PARTS]
        self._sent = [array("d") for _ in SENT]
        self._looks: list[Look] = []
        self._values: dict[str, tuple[array[float], array[float], array[float]]] = {}

    def read(self) -> bool:
        """Take in what is new; without a file there is nothing.

        Returns whether there was something.
        """
        try:
            file = self._folder.metrics.open("rb")
        except FileNotFoundError:
            return False
        with file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != self._file or found.st_size < self._offset:
                self._forget()
                self._file = (found.st_dev, found.st_ino)
            before = self._lines
            file.seek(self._offset)
            self._take(file)
        return self._lines > before

    def _take(self, file: BufferedReader) -> None:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError as error:
                if not file.read(1):
                    return  # the last one, which is half-written
                raise UsageError(
                    f"{self._folder.metrics} is damaged in line {self._lines + 1} ({error}); "
                    "mend or remove that line"
                ) from error
            try:
                self._add(line)
            except (AttributeError, KeyError, ValueError, TypeError) as error:
                raise UsageError(
                    f"{self._folder.metrics} is not of this version of paceline: {error!r}"
                ) from error
            self._lines, self._offset = self._lines + 1, self._offset + len(text)
            self._last = max(self._last, float(line["time"]))

    def _add(self, line: Mapping[str, Any]) -> None:
        step, time = float(line["step"]), float(line["time"])
        named = [(name, float(value)) for name, value in line.items() if name not in OWN]
        spent = line.get("seconds")
        if spent is not None:
            sent = line.get("bytes_sent", {})
            row = [
                step,
                time,
                float(line["samples"]),
                *(float(spent[part]) for part in PARTS),
                *(float(sent.get(to, 0)) for to in SENT),
            ]
            for column, value in zip((*self._steps, *self._parts, *self._sent), row, strict=True):
                column.append(value)
        if "ranks" in line:
            workers = {
                str(int(number)): [float(value) for value in values]
                for number, values in line["ranks"].items()
            }
            self._looks.append(Look(step, time, workers))
        for name, value in named:
            columns = self._values.setdefault(name, (array("d"), array("d"), array("d")))
            for column, each in zip(columns, (step, time, value), strict=True):
                column.append(each)

    @property
    def lines(self) -> int:
        """The number of lines taken in."""
        return self._lines

    @property
    def seconds(self) -> float | None:
        """How far the lines go, in seconds since the start of the run; None without a line."""
        return self._last if self._lines else None

    @property
    def steps(self) -> StepColumns:
        """What was read of finished steps."""
        step, time, samples = (_copied(column) for column in self._steps)
        seconds, sent = (
            np.stack([_copied(column) for column in columns], axis=1)
            for columns in (self._parts, self._sent)
        )
        return StepColumns(step, time, samples, seconds, sent)

    @property
    def looks(self) -> Sequence[Look]:
        """What was read of single workers."""
        return tuple(self._looks)

    @property
    def values(self) -> dict[str, ValueColumns]:
        """What was read of each logged name; nan and infinities are among the values."""
        return {
            name: ValueColumns(*(_copied(column) for column in columns))
            for name, columns in self._values.items()
        }


def _copied(column: array[float]) -> Floats:
    return np.array(column, dtype=np.float64)  # a view would keep the column from growing
