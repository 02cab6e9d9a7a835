"""The output of many workers on one screen: whole lines, each prefixed with the rank that wrote
it, else the script's own bytes.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from paceline.cluster.launcher.last_words import CHAINED, TRACEBACK
from paceline.status.live_bar import LiveBar
from paceline.status.run_status import RunStatus

_PIECES = re.compile(rb"[^\r\n]*[\r\n]")
_WRITE_BYTES = 4096  # what a pipe that is ready takes without blocking (PIPE_BUF)
_HELD_BYTES = 1 << 16  # a line longer than this is passed on in parts
_FULL_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
_COMPLAINT = b"TCPStoreLibUvBackend.cpp:"  # where torch's store reads what clients send
_STACK, _STACK_LINES = (b"Exception raised from ", b"frame #"), 64
_NOT_SHOWN = (
    b" (somebody sends to torch's store what no worker does: that ends its connection; "
    b"more of the kind is not shown)"
)
_TRACEBACK, _IGNORED = TRACEBACK.encode(), b"Exception ignored "
_CHAINED = tuple(line.encode() for line in CHAINED)
_IDLE_SECONDS = 0.25  # a line without an end is shown after this time (prompts, dots)


def _by_rank(rank: Hashable) -> bytes:
    return b"[%d] " % rank if isinstance(rank, int) else b""


def _nothing(rank: Hashable) -> bytes:
    return b""


class Screen:
    """One output of the launcher: its standard output or error.

    Never blocks; `full` asks its writers to wait.

    `prefix` gives the beginning of each writer's lines, `copy` is called with all that is shown.
    `at_once`: parts of lines are shown as soon as they are there, and lines of several writers may
    mix. `bar`: what is drawn below all that, where this is a terminal.
    """

    def __init__(
        self,
        descriptor: int,
        prefix: Callable[[Any], bytes] = _by_rank,
        copy: Callable[[bytes], object] | None = None,
        *,
        at_once: bool = False,
        bar: LiveBar | None = None,
    ) -> None:
        self.descriptor, self.at_once, self._bar = descriptor, at_once, bar
        self.broken = False
        self.last: Hashable = None  # the last writer; None: the launcher
        self._prefix, self._copy = prefix, copy
        self._pending: deque[bytes] = deque()
        self._size = 0
        # the last byte that was put: a line is under way unless it is a newline
        self._ending = b"\n"

    @property
    def full(self) -> bool:
        return self._size > _FULL_BYTES

    @property
    def pending(self) -> bool:
        return self._size > 0

    def put(self, rank: Hashable, piece: bytes) -> None:
        """Show a line, or a part of one, of this writer: a worker by its rank."""
        if self._ending != b"\n" and rank != self.last:
            self._add(b"\n")
        # A carriage return goes back to the start of the line: what follows it needs the prefix
        # again, itself needs none.
        bare = piece == b"\r" or (piece == b"\n" and self._ending == b"\r")
        fresh = self._ending == b"\n"
        self._add(
            (b"" if bare or self._ending not in {b"\n", b"\r"} else self._prefix(rank)) + piece
        )
        if bare and fresh:
            self._ending = b"\n"  # nothing is on the line yet
        self.last = rank

    def say(self, text: str) -> None:
        """Show lines of the launcher itself."""
        self._add((b"" if self._ending == b"\n" else b"\n") + text.encode(errors="replace") + b"\n")
        self.last = None

    def follow(self, status: RunStatus | None) -> None:
        """Show how far the run is, below everything else; with None for the last time, as text."""
        if self._bar is None:
            return
        if status is None:
            self._draw(self._bar.leave())
        else:
            self._bar.follow(status)
            if self._size < _WRITE_BYTES:  # a terminal that is behind gets it by and by
                self._draw(self._bar.again())

    def settle(self) -> None:
        """Draw the bar again, if lines were written where it was."""
        if self._bar is not None and self._size < _WRITE_BYTES:
            self._draw(self._bar.back())

    def write(self) -> None:
        """Write once; to be called when the descriptor is ready."""
        chunk = b""
        while self._pending and len(chunk) < _WRITE_BYTES:
            chunk += self._pending.popleft()
        try:
            written = os.write(self.descriptor, chunk[:_WRITE_BYTES])
        except BlockingIOError:
            written = 0
        except OSError:
            # Nobody reads any more (a closed pipe or terminal): the rest goes nowhere, and the
            # launcher learns of it.
            self.broken = True
            self.drop()
            return
        if written < len(chunk):
            self._pending.appendleft(chunk[written:])
        self._size -= written

    def drop(self) -> None:
        """Forget what has not been written."""
        self._pending.clear()
        self._size = 0

    def _add(self, data: bytes) -> None:
        self._ending = data[-1:]
        if self._copy is not None:
            self._copy(data)
        if self._bar is not None:
            self._draw(self._bar.away())
            self._bar.wrote(data)
        self._queue(data)

    def _draw(self, text: str) -> None:
        if text.startswith("\n"):
            self._ending = b"\n"  # it has ended a line that was under way
        if text:
            self._queue(text.encode(errors="replace"))

    def _queue(self, data: bytes) -> None:
        if not self.broken:
            self._pending.append(data)
            self._size += len(data)


class _StoreNoiseFilter:
    """Removes torch's long complaints, each with a stack, of what strangers send to its store;
    but for the first line of the first.
    """

    def __init__(self) -> None:
        self._said = False
        self._lines = 0  # of such a stack that may still come

    def __call__(self, piece: bytes) -> bytes:
        if _COMPLAINT in piece:
            first, self._said, self._lines = not self._said, True, _STACK_LINES
            return piece.rstrip() + _NOT_SHOWN + b"\n" if first else b""
        if self._lines and (piece == b"\n" or piece.startswith(_STACK)):
            self._lines = 0 if piece == b"\n" else self._lines - 1
            return b""
        return piece


class _InterruptFilter:
    """Leaves out tracebacks of `KeyboardInterrupt`.

    One that names another exception is passed on whole, once its end is known.

    Exception ignored in: ...               which may come before it
    Traceback (most recent call last):
      File ...                              indented: more of it
    KeyboardInterrupt                       the last line; a blank one and "During handling of ..."
                                            may bring another traceback
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        # between the first line of a traceback and the last; one of another exception
        self._inside = self._foreign = False
        self._last = b""  # line that was passed on, but for blank ones

    def __call__(self, piece: bytes) -> list[bytes]:
        """Take the next line; the lines to show."""
        if self._inside:
            self._held.append(piece)
            if not piece.startswith(b" "):
                self._inside = False
                self._foreign |= re.match(rb"KeyboardInterrupt\b", piece) is None
            return []
        if (start := piece.find(_TRACEBACK)) > 0:  # after a line that has no end, such as a bar
            return [*self(piece[:start] + b"\n"), *self(piece[start:])]
        if self._held and piece.startswith((b"\n", *_CHAINED)):
            self._held.append(piece)
            return []
        begins = piece.startswith(_TRACEBACK)
        goes_on = begins and any(line.startswith((b"\n", _IGNORED)) for line in self._held[-1:])
        shown = [] if goes_on else self.rest()
        if begins or piece.startswith(_IGNORED):
            self._held.append(piece)
            self._inside = begins
            self._foreign |= begins and self._last.startswith(_CHAINED)
            return shown
        self._last = piece if piece.strip() else self._last
        return [*shown, piece]

    def rest(self) -> list[bytes]:
        """Decide on what is held: no more of it comes."""
        whole = self._inside or self._foreign or len(self._held) == 1
        held, self._held, self._inside, self._foreign = (
            self._held if whole else [],
            [],
            False,
            False,
        )
        self._last = b"" if held else self._last
        return held


class OutputStream:
    """One output of one worker on its way to a screen; `tail` keeps its last bytes."""

    def __init__(self, rank: int, descriptor: int, screen: Screen) -> None:
        self.rank, self.descriptor, self.screen = rank, descriptor, screen
        self.open = True
        self._held = b""
        self._since = 0.0
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._hush = _StoreNoiseFilter()
        self._interrupts: _InterruptFilter | None = None

    def hush_interrupts(self) -> None:
        """Show no traceback of a `KeyboardInterrupt` from now on: the worker gets one that it
        was meant to get.
        """
        self._interrupts = self._interrupts or _InterruptFilter()

    def read(self) -> bool:
        """Read what is there (the descriptor doesn't block); False when there was nothing."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        # only what is new is searched: a line may come in many parts
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        lines, self._held = (
            (self._held + data[:end], data[end:]) if end else (b"", self._held + data)
        )
        for match in _PIECES.finditer(lines):
            if piece := self._hush(match[0]):
                self._pass_on(piece)
        self._since = time.monotonic()
        if len(self._held) > _HELD_BYTES or (self.screen.at_once and self._interrupts is None):
            self.show()
        return True

    def _pass_on(self, piece: bytes) -> None:
        self._put([piece] if self._interrupts is None else self._interrupts(piece))

    def _put(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            self._remember(piece)
            self.screen.put(self.rank, piece)

    def idle(self, now: float) -> None:
        """Show the start of a line whose end doesn't come."""
        if self._held and self._interrupts is None and now - self._since > _IDLE_SECONDS:
            self.show()

    def show(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._pass_on(held)

    def close(self) -> None:
        """Show the rest and let go of the descriptor."""
        if self.open:
            self.show()
            if self._interrupts is not None:
                self._put(self._interrupts.rest())
            os.close(self.descriptor)
            self.open = False

    @property
    def waiting(self) -> bool:
        """Whether `idle` has something to do later."""
        return bool(self._held)

    def tail(self) -> str:
        """Return the last text that was written."""
        return b"".join((*self._tail, self._held)).decode(errors="replace")

    def _remember(self, data: bytes) -> None:
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) > _TAIL_BYTES:
            self._tail_size -= len(self._tail.popleft())


def stand_in() -> None:
    """Open /dev/null as standard input, output or error where that is closed, as under cron:
    sockets would get these numbers else.

    To be called before anything is opened. What is started from here has all three then.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            # the lowest number that is free: this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            # (for as long as this process lives)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def screens(*, bare: bool = False, bar: LiveBar | None = None) -> tuple[Screen, Screen]:
    """Make the screens of standard output and error; one when both are the same file, so that their
    lines don't mix.

    `bare`: what is written is shown at once and as it is, without the rank that wrote it. `bar`:
    what is drawn below standard error.
    """
    out, err = os.fstat(1), os.fstat(2)
    prefix = _nothing if bare else _by_rank
    alike = (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)
    last = Screen(2, prefix, at_once=bare, bar=bar)
    return (last if alike else Screen(1, prefix, at_once=bare)), last
