"""The TensorBoard tracker: an event file in the run's folder, or in another one.

paceline run --report-to tensorboard           runs/NAME/tensorboard/    tensorboard --logdir runs
paceline run --report-to tensorboard:/logs     /logs/NAME/               tensorboard --logdir /logs
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
    TrackedEvent,
    TrackedRun,
    TrackedStep,
    TrackedSummary,
)

EVENTS_TAG: Final = "paceline/events"
# Prefix of the names of a run's results.
SUMMARY_PREFIX: Final = "summary/"
_FILE_NUMBERS = itertools.count()


class TensorBoardTracker:
    """Writes an event file.

    `detail` is the folder in which the run gets a folder of its own. Default: the run's own folder.
    """

    name = "tensorboard"

    def __init__(self, detail: str) -> None:
        self._root = Path(detail) if detail else None
        self._file: EventFile | None = None
        self._began = 0.0
        # Last step that was delivered.
        self._last_step = 0

    def begin_run(self, run: TrackedRun) -> str:
        """Begin a new file, which TensorBoard reads after the files that are in the folder already.

        Raises:
            OSError: The folder can't be written.
            ImportError: TensorBoard isn't installed.
        """
        folder = run.folder / "tensorboard" if self._root is None else self._root / run.name
        self._file, self._began = EventFile(folder), run.began
        self._file.write_text("settings", _format_table(run.settings), 0, run.began)
        self._file.flush()
        return (
            "tensorboard --logdir "
            f"{shlex.quote(str(run.folder.parent if self._root is None else self._root))}"
        )

    def log_steps(self, steps: Sequence[TrackedStep]) -> None:
        """Write the numbers of steps."""
        assert self._file is not None
        for step_record in steps:
            for name, value in step_record.to_scalars().items():
                self._file.write_scalar(
                    name, value, step_record.step, self._began + step_record.time
                )
        self._last_step = max([self._last_step, *(step_record.step for step_record in steps)])
        self._file.flush()

    def log_media(self, items: Sequence[MediaItem]) -> None:
        """Write histograms and images."""
        assert self._file is not None
        for item in items:
            wall_time = self._began + item.time
            if isinstance(item.content, HistogramCounts):
                self._file.write_histogram(item.name, item.content, item.step, wall_time)
            else:
                self._file.write_image(
                    item.name, item.content.to_png(), item.content.data.shape, item.step, wall_time
                )
        self._file.flush()

    def log_event(self, event: TrackedEvent) -> None:
        """Write an event as a text at the last step that was written."""
        assert self._file is not None
        self._file.write_text(EVENTS_TAG, event.what, self._last_step, self._began + event.time)
        self._file.flush()

    def rewind_to_step(self, step: int) -> None:
        """Tell readers to forget everything that was written for later steps."""
        assert self._file is not None
        self._file.restart_at_step(step + 1)
        self._last_step = step

    def log_summary(self, end: TrackedSummary) -> None:
        """Write the settings as hyperparameters, and the results as their metrics."""
        assert self._file is not None
        results = {SUMMARY_PREFIX + name: value for name, value in end.results.items()}
        for name, value in results.items():
            self._file.write_scalar(name, value, self._last_step, time.time())
        self._file.write_parameters(dict(end.settings), results)
        self._file.flush()

    def close(self, *, failed: bool) -> None:
        """Close the file. Calling it twice is harmless."""
        if self._file is not None:
            self._file.close()


class EventFile:
    """A file of events for TensorBoard.

    Events are written on the calling thread, so a full disk raises there. torch's `SummaryWriter`
    would write on a thread of its own.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import RecordWriter, summary

        self._events, self._log, self._summaries, self._make = Event, SessionLog, Summary, summary
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard finds files by "tfevents" in their names, and reads them in alphabetic order.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_FILE_NUMBERS)}.paceline"  # noqa: E501
        self._file = (folder / name).open("xb")
        self._writer = RecordWriter(self._file)
        # The first event of a file has to be its version.
        self._write_event(time.time(), file_version="brain.Event:2")

    def write_scalar(self, name: str, value: float, step: int, when: float) -> None:
        """Write a number. TensorBoard keeps 32 bits of it."""
        self._write_summary(
            self._summaries(value=[self._summaries.Value(tag=name, simple_value=value)]), step, when
        )

    def write_histogram(self, name: str, counts: HistogramCounts, step: int, when: float) -> None:
        """Write a histogram."""
        summary = self._make.histogram_raw(
            name,
            counts.low,
            counts.high,
            counts.count,
            counts.total,
            counts.squares,
            bucket_limits=counts.bin_edges[1:],
            bucket_counts=list(counts.counts),
        )
        self._write_summary(summary, step, when)

    def write_image(
        self, name: str, png: bytes, shape: tuple[int, ...], step: int, when: float
    ) -> None:
        """Write a PNG with its (height, width, channels)."""
        height, width, channels = shape
        image = self._summaries.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=png
        )
        self._write_summary(
            self._summaries(value=[self._summaries.Value(tag=name, image=image)]), step, when
        )

    def write_text(self, name: str, text: str, step: int, when: float) -> None:
        """Write a text in Markdown."""
        self._write_summary(self._make.text(name, text), step, when)

    def write_parameters(self, settings: dict[str, Setting], results: dict[str, float]) -> None:
        """Write hyperparameters, and the names of the numbers that are their metrics."""
        for summary in self._make.hparams(settings, results):
            self._write_summary(summary, 0, time.time())

    def restart_at_step(self, step: int) -> None:
        """Tell readers to forget what earlier files have for `step` and later steps."""
        self._write_event(time.time(), step=step, session_log=self._log(status=self._log.START))

    def flush(self) -> None:
        """Write everything to the disk.

        Raises:
            OSError: The disk refuses.
        """
        self._writer.flush()

    def close(self) -> None:
        """Close the file. Calling it twice is harmless."""
        self._file.close()

    def _write_summary(self, summary: Any, step: int, when: float) -> None:
        """Write a summary, TensorBoard's message for a value."""
        self._write_event(when, step=step, summary=summary)

    def _write_event(self, when: float, **fields: Any) -> None:
        """Write an event."""
        self._writer.write(self._events(wall_time=when, **fields).SerializeToString())


def _format_table(settings: Any) -> str:
    """Format settings as a table in Markdown."""
    return "\n".join(
        [
            "| setting | value |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in settings.items()),
        ]
    )
