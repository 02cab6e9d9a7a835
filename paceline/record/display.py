"""Displays the status of a run: as a bar on a terminal, through the launcher, or as lines of text.

terminal, one process     a bar at the bottom; printed text appears above it         TerminalBar
paceline run              the worker tells its launcher, which draws the bar         LauncherBar
pipes, CI, torchrun       a line a second at first, later one a minute               PlainLines

The launcher's side is `cluster/launcher/output.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol, TextIO

from paceline.cluster.control import events
from paceline.cluster.discover import Place
from paceline.status.live_bar import make_bar
from paceline.status.run_status import RunStatus, format_status

# Most seconds between two lines, unless the user chose an interval.
MAX_LINE_INTERVAL: Final = 60.0


class Display(Protocol):
    """A display of run statuses."""

    def show(self, status: RunStatus) -> None:
        """Replace the last status with this one."""

    def say(self, text: str) -> None:
        """Print a line that stays on the screen."""

    def close(self) -> None:
        """Release the terminal. Calling it twice is harmless."""


def choose_display(place: Place, stream: TextIO | None = None) -> Display:
    """Choose the display of a worker.

    Args:
        place: Place of the worker, which says whether there may be a bar.
        stream: Stream that the worker's output goes to. Default: standard error.
    """
    if place.bar and place.report_fd is not None:
        return LauncherBar(place)
    stream = sys.stderr if stream is None else stream
    return (
        TerminalBar(stream, breaks=place.breaks)
        if place.bar and _is_terminal(stream)
        else PlainLines(stream, place.status_every)
    )


class PlainLines:
    """Writes each status as a line of text.

    `every` is the number of seconds between two lines: None for less and less often as the run goes
    on, infinity for no lines at all.
    """

    def __init__(self, stream: TextIO, every: float | None = None) -> None:
        self._stream, self._every = stream, every

    def pause_seconds(self, shown_seconds: float) -> float:
        """Return the seconds until the next line, after the run was shown for `shown_seconds`."""
        return min(shown_seconds / 10, MAX_LINE_INTERVAL) if self._every is None else self._every

    def show(self, status: RunStatus) -> None:
        """Write the status as a line."""
        self.say(format_status(status))

    def say(self, text: str) -> None:
        """Write a line, unless lines are switched off."""
        if self._every != math.inf:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing, because each line is already written."""


class LauncherBar:
    """Lets this worker's launcher draw the bar, as the launcher writes all output of the host."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def show(self, status: RunStatus) -> None:
        """Send the status to the launcher."""
        events.report_progress(self._place, status.to_fields())

    def say(self, text: str) -> None:
        """Write a line. The launcher shows it above the bar."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Tell the launcher to leave the bar as it is."""
        events.report_progress(self._place, None)


class TerminalBar:
    """Draws a bar at the bottom of a terminal that only this process writes to.

    Until it is closed, the standard output and error of the process are replaced by streams that
    write above the bar, if they are terminals. `breaks` is passed to `LiveBar`.
    """

    def __init__(self, stream: TextIO, *, breaks: bool = True) -> None:
        self._stream = stream
        self._bar = make_bar(stream, breaks=breaks)
        # Announcements come from other threads, too.
        self._lock = threading.RLock()
        self._undo = contextlib.ExitStack()
        self._replace_streams()

    def show(self, status: RunStatus) -> None:
        """Redraw the bar."""
        with self._lock:
            self._bar.set_status(status)
            self._write_text(self._bar.redraw_bar())

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        with self._lift_bar(f"{text}\n"):
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the bar as it is and give the process its own streams back."""
        with self._lock:
            self._write_text(self._bar.leave_on_screen())
        self._undo.close()

    def _write_text(self, text: str) -> None:
        """Write a text to the terminal at once."""
        if text:
            self._stream.write(text)
            self._stream.flush()

    def _replace_streams(self) -> None:
        """Make the standard streams, and the log's streams, write above the bar."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if not _is_terminal(stream):
                continue
            stream_above = StreamAboveBar(stream, self._lift_bar)
            setattr(sys, name, stream_above)
            self._undo.callback(_restore_stream, name, stream_above, stream)
            # Handlers of the root logger keep a reference to the old stream, and would write into
            # the bar.
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                    handler.setStream(stream_above)
                    self._undo.callback(_restore_handler, handler, stream_above, stream)

    @contextlib.contextmanager
    def _lift_bar(self, text: str) -> Iterator[None]:
        """Remove the bar while `text` is written, then draw it again."""
        with self._lock:
            self._write_text(self._bar.erase_bar())
            # Before the text is written, because Ctrl-C may interrupt right after it.
            self._bar.note_output(text.encode(errors="replace"))
            yield
            self._write_text(self._bar.draw_bar())


class StreamAboveBar:
    """A terminal stream whose text appears above the bar.

    A process that was forked from this one has no bar, so there it writes to the stream directly.
    """

    def __init__(self, stream: TextIO, above: Any) -> None:
        self._stream, self._above, self._process = stream, above, os.getpid()

    def write(self, text: str) -> int:
        """Write a text above the bar."""
        if os.getpid() != self._process:
            return self._stream.write(text)
        with self._above(text):
            count = self._stream.write(text)
            self._stream.flush()
        return count

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts above the bar."""
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal.

    A script may replace standard output by None, or by any object that has `write`.
    """
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and bool(isatty())


def _restore_stream(name: str, stream_above: StreamAboveBar, stream: TextIO) -> None:
    """Put a stream of the process back, unless the script has replaced it again since."""
    if getattr(sys, name) is stream_above:
        setattr(sys, name, stream)


def _restore_handler(
    handler: logging.StreamHandler[Any], stream_above: StreamAboveBar, stream: TextIO
) -> None:
    """Give a log handler its stream back, unless the script has changed it since."""
    if handler.stream is stream_above:
        handler.setStream(stream)
