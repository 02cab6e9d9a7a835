"""The output of many workers on one screen.

    worker 0 --- pipe ---> OutputStream: filters, whole lines ---+
    worker 1 --- pipe ---> OutputStream -------------------------+---> Screen: "[0] ...", "[1] ..."
    launcher ----------------------------------------------------+     and the bar below

Lines are whole, and each begins with the rank of its worker. With `bare` they are shown as the
worker writes them.
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
_WRITE_BYTES = 4096  # a pipe that is ready takes these without blocking (PIPE_BUF)
_HELD_BYTES = 1 << 16  # a line longer than this is passed on in parts
_FULL_BYTES = 1 << 20  # output that may wait for a screen before workers have to wait
_TAIL_BYTES = 1 << 16  # output that is remembered of each stream
# torch's store prints this with a stack when a client sends what it can't read. If torch renames
# the file, its messages are shown whole again.
_COMPLAINT = b"TCPStoreLibUvBackend.cpp:"
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

    It never blocks. While it `is_full`, nothing more should be read from the workers.

    Invariant: `_pending_bytes` is the length of all of `_pending`. `_last_byte` is the last byte
    that was put, so a line is under way unless it is a newline.

    Args:
        descriptor: Where to write.
        prefix: Makes the beginning of a writer's lines. Default: its rank in brackets.
        copy: Called with all bytes that are shown. Default: not.
        at_once: Show parts of lines as soon as they come. Lines of several writers may then mix.
        bar: Drawn below everything else, if this is a terminal.
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
        self._ending = b"\n"

    @property
    def full(self) -> bool:
        """Whether so much output waits that writers should wait, too."""
        return self._size > _FULL_BYTES

    @property
    def pending(self) -> bool:
        """Whether output waits to be written."""
        return self._size > 0

    def put(self, rank: Hashable, piece: bytes) -> None:
        """Show a line, or a part of one. The writer is a worker by its rank, or another key."""
        if self._ending != b"\n" and rank != self.last:
            self._add(b"\n")
        # A carriage return goes back to the start of the line. The text that follows needs the
        # prefix again, but the carriage return itself needs none.
        is_line_end = piece == b"\r" or (piece == b"\n" and self._ending == b"\r")
        was_empty = self._ending == b"\n"
        self._add(
            (b"" if is_line_end or self._ending not in {b"\n", b"\r"} else self._prefix(rank))
            + piece
        )
        if is_line_end and was_empty:
            self._ending = b"\n"  # the line is still empty
        self.last = rank

    def say(self, text: str) -> None:
        """Show lines of the launcher itself."""
        self._add((b"" if self._ending == b"\n" else b"\n") + text.encode(errors="replace") + b"\n")
        self.last = None

    def follow(self, status: RunStatus | None) -> None:
        """Show the progress of the run below everything else.

        None leaves the last progress on the screen as text.
        """
        if self._bar is None:
            return
        if status is None:
            self._draw(self._bar.leave())
        else:
            self._bar.follow(status)
            # A slow terminal gets the bar less often.
            if self._size < _WRITE_BYTES:
                self._draw(self._bar.again())

    def settle(self) -> None:
        """Draw the bar again, if lines were written over it."""
        if self._bar is not None and self._size < _WRITE_BYTES:
            self._draw(self._bar.back())

    def write(self) -> None:
        """Write as much as possible. Call it when the descriptor is ready."""
        chunk = b""
        while self._pending and len(chunk) < _WRITE_BYTES:
            chunk += self._pending.popleft()
        try:
            written = os.write(self.descriptor, chunk[:_WRITE_BYTES])
        except BlockingIOError:
            written = 0
        except OSError:
            # The pipe or terminal is closed. Drop the rest, and let the launcher see `is_broken`.
            self.broken = True
            self.drop()
            return
        if written < len(chunk):
            self._pending.appendleft(chunk[written:])
        self._size -= written

    def drop(self) -> None:
        """Drop all output that has not been written."""
        self._pending.clear()
        self._size = 0

    def _add(self, data: bytes) -> None:
        """Add bytes of a line. The bar is taken away first."""
        self._ending = data[-1:]
        if self._copy is not None:
            self._copy(data)
        if self._bar is not None:
            self._draw(self._bar.away())
            self._bar.wrote(data)
        self._queue(data)

    def _draw(self, text: str) -> None:
        """Draw the bar, or take it away, by these characters."""
        if text.startswith("\n"):
            self._ending = b"\n"  # the bar has ended the line that was under way
        if text:
            self._queue(text.encode(errors="replace"))

    def _queue(self, data: bytes) -> None:
        if not self.broken:
            self._pending.append(data)
            self._size += len(data)


class _StoreNoiseFilter:
    """Removes the complaints of torch's store about clients that aren't workers.

    Each has a long stack. Only the first line of the first one is shown.
    """

    def __init__(self) -> None:
        self._said = False
        self._lines = 0  # lines of the stack that may still come

    def __call__(self, piece: bytes) -> bytes:
        """Take the next line, and return the bytes to show."""
        if _COMPLAINT in piece:
            first, self._said, self._lines = not self._said, True, _STACK_LINES
            return piece.rstrip() + _NOT_SHOWN + b"\n" if first else b""
        if self._lines and (piece == b"\n" or piece.startswith(_STACK)):
            self._lines = 0 if piece == b"\n" else self._lines - 1
            return b""
        return piece


class _InterruptFilter:
    """Leaves out tracebacks of `KeyboardInterrupt`.

        Exception ignored in: ...               may come before a traceback
        Traceback (most recent call last):
          File ...                              indented lines are part of it
        KeyboardInterrupt                       the last line; after a blank one and "During
                                                handling of ..." another traceback may follow

    A report that names another exception is passed on whole, once its end is known.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        # Whether a traceback has begun and not ended, and whether one names another exception
        self._inside = self._foreign = False
        self._last = b""  # last line that was passed on and isn't blank

    def __call__(self, piece: bytes) -> list[bytes]:
        """Take the next line, and return the lines to show."""
        if self._inside:
            self._held.append(piece)
            if not piece.startswith(b" "):
                self._inside = False
                self._foreign |= re.match(rb"KeyboardInterrupt\b", piece) is None
            return []
        # A traceback may begin behind a line without an end, such as a progress bar.
        if (start := piece.find(_TRACEBACK)) > 0:
            return [*self(piece[:start] + b"\n"), *self(piece[start:])]
        if self._held and piece.startswith((b"\n", *_CHAINED)):
            self._held.append(piece)
            return []
        begins = piece.startswith(_TRACEBACK)
        continues = begins and any(line.startswith((b"\n", _IGNORED)) for line in self._held[-1:])
        shown = [] if continues else self.rest()
        if begins or piece.startswith(_IGNORED):
            self._held.append(piece)
            self._inside = begins
            self._foreign |= begins and self._last.startswith(_CHAINED)
            return shown
        self._last = piece if piece.strip() else self._last
        return [*shown, piece]

    def rest(self) -> list[bytes]:
        """Stop holding lines back, and return those to show."""
        is_shown = self._inside or self._foreign or len(self._held) == 1
        shown, self._held, self._inside, self._foreign = (
            self._held if is_shown else [],
            [],
            False,
            False,
        )
        self._last = b"" if shown else self._last
        return shown


class OutputStream:
    """One output of one worker on its way to a screen.

    Args:
        rank: Rank of the worker.
        descriptor: Pipe from the worker, which doesn't block.
        screen: Where to show its lines.
    """

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
        """Leave out tracebacks of `KeyboardInterrupt` from now on.

        To be called before the worker is sent the signal that ends it.
        """
        self._interrupts = self._interrupts or _InterruptFilter()

    def read(self) -> bool:
        """Read the output that has come. False if there was none."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        # Only the new bytes are searched, as a long line may come in many parts.
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
        """Show the beginning of a line if its end hasn't come for a while."""
        if self._held and self._interrupts is None and now - self._since > _IDLE_SECONDS:
            self.show()

    def show(self) -> None:
        """Show the beginning of a line."""
        if self._held:
            held, self._held = self._held, b""
            self._pass_on(held)

    def close(self) -> None:
        """Show the rest, and close the descriptor."""
        if self.open:
            self.show()
            if self._interrupts is not None:
                self._put(self._interrupts.rest())
            os.close(self.descriptor)
            self.open = False

    @property
    def waiting(self) -> bool:
        """Whether the beginning of a line is held back."""
        return bool(self._held)

    def tail(self) -> str:
        """The last output, about 64 KiB of it."""
        return b"".join((*self._tail, self._held)).decode(errors="replace")

    def _remember(self, data: bytes) -> None:
        """Add bytes to the tail, and drop its oldest pieces."""
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) > _TAIL_BYTES:
            self._tail_size -= len(self._tail.popleft())


def stand_in() -> None:
    """Open /dev/null in place of a closed standard input, output or error, as under cron.

    Otherwise sockets and files would get the numbers 0 to 2, and would receive other output. Call
    it before anything is opened. All child processes then have all three.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            # `open` takes the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            # It stays open as long as this process lives.
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def screens(*, bare: bool = False, bar: LiveBar | None = None) -> tuple[Screen, Screen]:
    """Make the screens of standard output and error.

    If both are the same file, they are the same screen, so that their lines don't mix.

    Args:
        bare: Show the output at once, and without the rank of its writer.
        bar: Drawn below standard error. Default: no bar.
    """
    output_status, error_status = os.fstat(1), os.fstat(2)
    prefix = _nothing if bare else _by_rank
    same_file = (output_status.st_dev, output_status.st_ino) == (
        error_status.st_dev,
        error_status.st_ino,
    )
    error_screen = Screen(2, prefix, at_once=bare, bar=bar)
    return (error_screen if same_file else Screen(1, prefix, at_once=bare)), error_screen
