"""Where the status of a run is shown: as a bar on a terminal, by the launcher on its own, or else
as lines of text.

on a terminal alone    bar at the bottom; what the script prints goes above it       TerminalBar
paceline run           the worker tells its launcher, which draws the bar            LauncherBar
                       (cluster/launcher/output.py)
pipes, CI, torchrun    a line a second, later one a minute
                       PlainLines
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
from paceline.status.live_bar import bar_on
from paceline.status.run_status import RunStatus, line

SELDOM: Final = 60.0  # seconds between two lines, at most, unless something else was asked for


class Display(Protocol):
    """Something that shows statuses."""

    def show(self, status: RunStatus) -> None:
        """Show this status in the place of the last one."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Let go of the terminal. Calling it twice is harmless."""


def choose(place: Place, stream: TextIO | None = None) -> Display:
    """Choose the display of a worker, whose output goes to `stream` (default: standard error)."""
    if place.bar and place.report_fd is not None:
        return LauncherBar(place)
    stream = sys.stderr if stream is None else stream
    return (
        TerminalBar(stream, breaks=place.breaks)
        if place.bar and _is_terminal(stream)
        else PlainLines(stream, place.status_every)
    )


class PlainLines:
    """Writes each status as a line of text, `every` so many seconds: None for fewer and fewer
    lines, infinity for none.
    """

    def __init__(self, stream: TextIO, every: float | None = None) -> None:
        self._stream, self._every = stream, every

    def pause(self, taken: float) -> float:
        """Return the seconds until the next status of a run that has been shown for so long."""
        return min(taken / 10, SELDOM) if self._every is None else self._every

    def show(self, status: RunStatus) -> None:
        """Write a line."""
        self.say(line(status))

    def say(self, text: str) -> None:
        """Write a line."""
        if self._every != math.inf:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: each line is written."""


class LauncherBar:
    """Has the launcher of this worker draw a bar, as it writes what all workers of its host
    print.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def show(self, status: RunStatus) -> None:
        """Tell the launcher."""
        events.progress(self._place, status.fields())

    def say(self, text: str) -> None:
        """Write a line, which the launcher shows above the bar."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Have the launcher leave the bar as it is."""
        events.progress(self._place, None)


class TerminalBar:
    """Draws a bar at the bottom of the terminal that this process alone writes to.

    `breaks`: as for `LiveBar`.

    Standard output and error of the process, where they are a terminal, write above the bar until
    it is closed.
    """

    def __init__(self, stream: TextIO, *, breaks: bool = True) -> None:
        self._stream = stream
        self._bar = bar_on(stream, breaks=breaks)
        self._lock = threading.RLock()  # announcements come from threads, too
        self._undo = contextlib.ExitStack()
        self._stand_in()

    def show(self, status: RunStatus) -> None:
        """Draw the bar anew."""
        with self._lock:
            self._bar.follow(status)
            self._put(self._bar.again())

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        with self._above(f"{text}\n"):
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the bar as it is, and give the process its streams back."""
        with self._lock:
            self._put(self._bar.leave())
        self._undo.close()

    def _put(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()

    def _stand_in(self) -> None:
        """Put streams that write above the bar in the place of those of the process, also where
        its log goes.
        """
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if not _is_terminal(stream):
                continue
            above = StreamAbove(stream, self._above)
            setattr(sys, name, above)
            self._undo.callback(_replace, name, above, stream)
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                    handler.setStream(above)
                    self._undo.callback(_redirect, handler, above, stream)

    @contextlib.contextmanager
    def _above(self, text: str) -> Iterator[None]:
        """Take the bar away while `text` is written."""
        with self._lock:
            self._put(self._bar.away())
            # first: an interrupt may come right behind the text
            self._bar.wrote(text.encode(errors="replace"))
            yield
            self._put(self._bar.back())


class StreamAbove:
    """A stream of a terminal, all of whose text comes above a bar.

    Processes that were forked of this one write as if there were none.
    """

    def __init__(self, stream: TextIO, above: Any) -> None:
        self._stream, self._above, self._process = stream, above, os.getpid()

    def write(self, text: str) -> int:
        """Write a text."""
        if os.getpid() != self._process:
            return self._stream.write(text)
        with self._above(text):
            count = self._stream.write(text)
            self._stream.flush()
        return count

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal.

    Scripts may put anything that has `write` in the place of standard output, or nothing.
    """
    asked = getattr(stream, "isatty", None)
    return asked is not None and bool(asked())


def _replace(name: str, mine: StreamAbove, stream: TextIO) -> None:
    """Put a stream of the process back, unless the script has put another one there since."""
    if getattr(sys, name) is mine:
        setattr(sys, name, stream)


def _redirect(handler: logging.StreamHandler[Any], mine: StreamAbove, stream: TextIO) -> None:
    if handler.stream is mine:
        handler.setStream(stream)
