"""TensorBoard: an event file in the run's folder, or in one that was given.

paceline run --report-to tensorboard            runs/NAME/tensorboard/     tensorboard --logdir runs
paceline run --report-to tensorboard:/logs      /logs/NAME/                tensorboard --logdir
                                                /logs
"""

from __future__ import annotations

import itertools
import os
import shlex
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from paceline.record.logged.histogram import HistogramCounts
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.tracker import (
    Setting,
    TrackedEnd,
    TrackedEvent,
    TrackedRun,
    TrackedStep,
)

EVENTS: Final = "paceline/events"
SUMMARY: Final = "summary/"  # before the names of what came of a run
_FILES = itertools.count()


class TensorBoardTracker:
    """Writes an event file.

    `detail`: the folder in which the run has one of its own (default: the run's own folder).
    """

    name = "tensorboard"

    def __init__(self, detail: str) -> None:
        self._root = Path(detail) if detail else None
        self._file: EventFile | None = None
        self._began = 0.0
        self._step = 0  # the last that was told of

    def begin(self, run: TrackedRun) -> str:
        """Begin a new file, which TensorBoard reads after those that are in its folder.

        Raises `OSError` and `ImportError`.
        """
        folder = run.folder / "tensorboard" if self._root is None else self._root / run.name
        self._file, self._began = EventFile(folder), run.began
        self._file.text("settings", _table(run.settings), 0, run.began)
        self._file.flush()
        return (
            "tensorboard --logdir "
            f"{shlex.quote(str(run.folder.parent if self._root is None else self._root))}"
        )

    def steps(self, steps: Sequence[TrackedStep]) -> None:
        """Write the numbers of steps."""
        assert self._file is not None
        for each in steps:
            for name, value in each.scalars().items():
                self._file.scalar(name, value, each.step, self._began + each.time)
        self._step = max([self._step, *(each.step for each in steps)])
        self._file.flush()

    def media(self, items: Sequence[MediaItem]) -> None:
        """Write histograms and images."""
        assert self._file is not None
        for item in items:
            when = self._began + item.time
            if isinstance(item.content, HistogramCounts):
                self._file.histogram(item.name, item.content, item.step, when)
            else:
                self._file.image(
                    item.name, item.content.png(), item.content.data.shape, item.step, when
                )
        self._file.flush()

    def event(self, event: TrackedEvent) -> None:
        """Write an event as text, at the last step that was written."""
        assert self._file is not None
        self._file.text(EVENTS, event.what, self._step, self._began + event.time)
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Have readers forget what was written of later steps."""
        assert self._file is not None
        self._file.restart(step + 1)
        self._step = step

    def conclude(self, end: TrackedEnd) -> None:
        """Write the settings as hyperparameters, and the results as their metrics."""
        assert self._file is not None
        results = {SUMMARY + name: value for name, value in end.results.items()}
        for name, value in results.items():
            self._file.scalar(name, value, self._step, time.time())
        self._file.parameters(dict(end.settings), results)
        self._file.flush()

    def close(self, *, failed: bool) -> None:
        """Close the file. Calling it twice is harmless."""
        if self._file is not None:
            self._file.close()


class EventFile:
    """A file that TensorBoard reads.

    Everything is written by whoever calls, so that a full disk is seen there.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import RecordWriter, summary

        self._events, self._log, self._summaries, self._make = Event, SessionLog, Summary, summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_FILES)}.paceline"  # noqa: E501
        self._file = (folder / name).open("xb")
        self._writer = RecordWriter(self._file)
        self._write(time.time(), file_version="brain.Event:2")

    def scalar(self, name: str, value: float, step: int, when: float) -> None:
        """Write a number; TensorBoard keeps 32 bits of it."""
        self._show(
            self._summaries(value=[self._summaries.Value(tag=name, simple_value=value)]), step, when
        )

    def histogram(self, name: str, counts: HistogramCounts, step: int, when: float) -> None:
        """Write a histogram."""
        found = self._make.histogram_raw(
            name,
            counts.low,
            counts.high,
            counts.count,
            counts.total,
            counts.squares,
            bucket_limits=counts.edges[1:],
            bucket_counts=list(counts.counts),
        )
        self._show(found, step, when)

    def image(self, name: str, png: bytes, shape: tuple[int, ...], step: int, when: float) -> None:
        """Write an image of this height and width, and so many channels."""
        height, width, channels = shape
        found = self._summaries.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=png
        )
        self._show(
            self._summaries(value=[self._summaries.Value(tag=name, image=found)]), step, when
        )

    def text(self, name: str, text: str, step: int, when: float) -> None:
        """Write text in Markdown."""
        self._show(self._make.text(name, text), step, when)

    def parameters(self, settings: dict[str, Setting], results: dict[str, float]) -> None:
        """Write hyperparameters, and which numbers are their metrics."""
        for found in self._make.hparams(settings, results):
            self._show(found, 0, time.time())

    def restart(self, step: int) -> None:
        """Have readers forget what stands before in this folder of this step and later ones."""
        self._write(time.time(), step=step, session_log=self._log(status=self._log.START))

    def flush(self) -> None:
        """Hand everything to the disk. Raises `OSError`."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file. Calling it twice is harmless."""
        self._file.close()

    def _show(self, summary: Any, step: int, when: float) -> None:
        self._write(when, step=step, summary=summary)

    def _write(self, when: float, **fields: Any) -> None:
        self._writer.write(self._events(wall_time=when, **fields).SerializeToString())


def _table(settings: Any) -> str:
    """Return settings as a table in Markdown."""
    return "\n".join(
        [
            "| setting | value |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in settings.items()),
        ]
    )
