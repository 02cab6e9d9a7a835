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
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from paceline.cluster.launcher.last_words import CHAINED_PREFIXES, TRACEBACK_LINE
from paceline.status.live_bar import LiveBar
from paceline.status.run_status import RunStatus
from paceline.timings import SupervisorTimings

_LINE_PATTERN = re.compile(rb"[^\r\n]*[\r\n]")
_WRITE_BYTES = 4096  # a pipe that is ready takes these without blocking (PIPE_BUF)
_HELD_BYTES = 1 << 16  # a line longer than this is passed on in parts
_FULL_BYTES = 1 << 20  # output that may wait for a screen before workers have to wait
_TAIL_BYTES = 1 << 16  # output that is remembered of each stream
# torch's store prints this with a stack when a client sends what it can't read. If torch renames
# the file, its messages are shown whole again.
_STORE_COMPLAINT = b"TCPStoreLibUvBackend.cpp:"
_STACK_PREFIXES, _STACK_LINES = (b"Exception raised from ", b"frame #"), 64
_COMPLAINT_NOTE = (
    b" (somebody sends to torch's store what no worker does: that ends its connection; "
    b"more of the kind is not shown)"
)
_TRACEBACK_LINE, _IGNORED_PREFIX = TRACEBACK_LINE.encode(), b"Exception ignored "
_CHAINED_PREFIXES = tuple(line.encode() for line in CHAINED_PREFIXES)
_IDLE_SECONDS = 0.25  # a line without an end is shown after this time (prompts, dots)


def _make_rank_prefix(rank: Hashable) -> bytes:
    return b"[%d] " % rank if isinstance(rank, int) else b""


def _make_empty_prefix(rank: Hashable) -> bytes:
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
        prefix: Callable[[Any], bytes] = _make_rank_prefix,
        copy: Callable[[bytes], object] | None = None,
        *,
        at_once: bool = False,
        bar: LiveBar | None = None,
    ) -> None:
        self.descriptor, self.at_once, self._bar = descriptor, at_once, bar
        self.is_broken = False
        self.last_writer: Hashable = None  # the last writer; None: the launcher
        self._prefix, self._copy = prefix, copy
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._last_byte = b"\n"

    @property
    def is_full(self) -> bool:
        """Whether so much output waits that writers should wait, too."""
        return self._pending_bytes > _FULL_BYTES

    @property
    def has_pending(self) -> bool:
        """Whether output waits to be written."""
        return self._pending_bytes > 0

    def put_line(self, rank: Hashable, piece: bytes) -> None:
        """Show a line, or a part of one. The writer is a worker by its rank, or another key."""
        if self._last_byte != b"\n" and rank != self.last_writer:
            self._add_bytes(b"\n")
        # A carriage return goes back to the start of the line. The text that follows needs the
        # prefix again, but the carriage return itself needs none.
        is_line_end = piece == b"\r" or (piece == b"\n" and self._last_byte == b"\r")
        was_empty = self._last_byte == b"\n"
        self._add_bytes(
            (b"" if is_line_end or self._last_byte not in {b"\n", b"\r"} else self._prefix(rank))
            + piece
        )
        if is_line_end and was_empty:
            self._last_byte = b"\n"  # the line is still empty
        self.last_writer = rank

    def show_line(self, text: str) -> None:
        """Show lines of the launcher itself."""
        self._add_bytes(
            (b"" if self._last_byte == b"\n" else b"\n") + text.encode(errors="replace") + b"\n"
        )
        self.last_writer = None

    def show_status(self, status: RunStatus | None) -> None:
        """Show the progress of the run below everything else.

        None leaves the last progress on the screen as text.
        """
        if self._bar is None:
            return
        if status is None:
            self._draw_bar(self._bar.leave_on_screen())
        else:
            self._bar.set_status(status)
            # A slow terminal gets the bar less often.
            if self._pending_bytes < _WRITE_BYTES:
                self._draw_bar(self._bar.redraw_bar())

    def redraw_bar(self) -> None:
        """Draw the bar again, if lines were written over it."""
        if self._bar is not None and self._pending_bytes < _WRITE_BYTES:
            self._draw_bar(self._bar.draw_bar())

    def write_pending(self) -> None:
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
            self.is_broken = True
            self.drop_pending()
            return
        if written < len(chunk):
            self._pending.appendleft(chunk[written:])
        self._pending_bytes -= written

    def drop_pending(self) -> None:
        """Drop all output that has not been written."""
        self._pending.clear()
        self._pending_bytes = 0

    def _add_bytes(self, data: bytes) -> None:
        """Add bytes of a line. The bar is taken away first."""
        self._last_byte = data[-1:]
        if self._copy is not None:
            self._copy(data)
        if self._bar is not None:
            self._draw_bar(self._bar.erase_bar())
            self._bar.note_output(data)
        self._queue_bytes(data)

    def _draw_bar(self, text: str) -> None:
        """Draw the bar, or take it away, by these characters."""
        if text.startswith("\n"):
            self._last_byte = b"\n"  # the bar has ended the line that was under way
        if text:
            self._queue_bytes(text.encode(errors="replace"))

    def _queue_bytes(self, data: bytes) -> None:
        if not self.is_broken:
            self._pending.append(data)
            self._pending_bytes += len(data)


class _StoreNoiseFilter:
    """Removes the complaints of torch's store about clients that aren't workers.

    Each has a long stack. Only the first line of the first one is shown.
    """

    def __init__(self) -> None:
        self._has_complained = False
        self._stack_lines_left = 0  # lines of the stack that may still come

    def __call__(self, piece: bytes) -> bytes:
        """Take the next line, and return the bytes to show."""
        if _STORE_COMPLAINT in piece:
            first, self._has_complained, self._stack_lines_left = (
                not self._has_complained,
                True,
                _STACK_LINES,
            )
            return piece.rstrip() + _COMPLAINT_NOTE + b"\n" if first else b""
        if self._stack_lines_left and (piece == b"\n" or piece.startswith(_STACK_PREFIXES)):
            self._stack_lines_left = 0 if piece == b"\n" else self._stack_lines_left - 1
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
        self._held_lines: list[bytes] = []
        # Whether a traceback has begun and not ended, and whether one names another exception
        self._is_inside = self._is_foreign = False
        self._last_line = b""  # last line that was passed on and isn't blank

    def __call__(self, piece: bytes) -> list[bytes]:
        """Take the next line, and return the lines to show."""
        if self._is_inside:
            self._held_lines.append(piece)
            if not piece.startswith(b" "):
                self._is_inside = False
                self._is_foreign |= re.match(rb"KeyboardInterrupt\b", piece) is None
            return []
        # A traceback may begin behind a line without an end, such as a progress bar.
        if (start := piece.find(_TRACEBACK_LINE)) > 0:
            return [*self(piece[:start] + b"\n"), *self(piece[start:])]
        if self._held_lines and piece.startswith((b"\n", *_CHAINED_PREFIXES)):
            self._held_lines.append(piece)
            return []
        begins = piece.startswith(_TRACEBACK_LINE)
        continues = begins and any(
            line.startswith((b"\n", _IGNORED_PREFIX)) for line in self._held_lines[-1:]
        )
        shown = [] if continues else self.flush_held()
        if begins or piece.startswith(_IGNORED_PREFIX):
            self._held_lines.append(piece)
            self._is_inside = begins
            self._is_foreign |= begins and self._last_line.startswith(_CHAINED_PREFIXES)
            return shown
        self._last_line = piece if piece.strip() else self._last_line
        return [*shown, piece]

    def flush_held(self) -> list[bytes]:
        """Stop holding lines back, and return those to show."""
        is_shown = self._is_inside or self._is_foreign or len(self._held_lines) == 1
        shown, self._held_lines, self._is_inside, self._is_foreign = (
            self._held_lines if is_shown else [],
            [],
            False,
            False,
        )
        self._last_line = b"" if shown else self._last_line
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
        self.is_open = True
        self._partial_line = b""
        self._read_at = 0.0
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._store_filter = _StoreNoiseFilter()
        self._interrupt_filter: _InterruptFilter | None = None

    def hush_interrupts(self) -> None:
        """Leave out tracebacks of `KeyboardInterrupt` from now on.

        To be called before the worker is sent the signal that ends it.
        """
        self._interrupt_filter = self._interrupt_filter or _InterruptFilter()

    def read_output(self) -> bool:
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
        lines, self._partial_line = (
            (self._partial_line + data[:end], data[end:])
            if end
            else (b"", self._partial_line + data)
        )
        for match in _LINE_PATTERN.finditer(lines):
            if piece := self._store_filter(match[0]):
                self._filter_line(piece)
        self._read_at = time.monotonic()
        if len(self._partial_line) > _HELD_BYTES or (
            self.screen.at_once and self._interrupt_filter is None
        ):
            self.show_partial_line()
        return True

    def _filter_line(self, piece: bytes) -> None:
        self._show_lines(
            [piece] if self._interrupt_filter is None else self._interrupt_filter(piece)
        )

    def _show_lines(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            self._add_to_tail(piece)
            self.screen.put_line(self.rank, piece)

    def show_if_idle(self, now: float) -> None:
        """Show the beginning of a line if its end hasn't come for a while."""
        if (
            self._partial_line
            and self._interrupt_filter is None
            and now - self._read_at > _IDLE_SECONDS
        ):
            self.show_partial_line()

    def show_partial_line(self) -> None:
        """Show the beginning of a line."""
        if self._partial_line:
            held, self._partial_line = self._partial_line, b""
            self._filter_line(held)

    def close(self) -> None:
        """Show the rest, and close the descriptor."""
        if self.is_open:
            self.show_partial_line()
            if self._interrupt_filter is not None:
                self._show_lines(self._interrupt_filter.flush_held())
            os.close(self.descriptor)
            self.is_open = False

    @property
    def has_partial_line(self) -> bool:
        """Whether the beginning of a line is held back."""
        return bool(self._partial_line)

    def get_tail(self) -> str:
        """The last output, about 64 KiB of it."""
        return b"".join((*self._tail, self._partial_line)).decode(errors="replace")

    def _add_to_tail(self, data: bytes) -> None:
        """Add bytes to the tail, and drop its oldest pieces."""
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) > _TAIL_BYTES:
            self._tail_size -= len(self._tail.popleft())


def print_message(text: str | None) -> None:
    """Print a message of the launcher, before there are screens; None is no message."""
    if text is not None:
        print(f"paceline: {text}", file=sys.stderr, flush=True)


def open_missing_streams() -> None:
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


def make_screens(*, bare: bool = False, bar: LiveBar | None = None) -> tuple[Screen, Screen]:
    """Make the screens of standard output and error.

    If both are the same file, they are the same screen, so that their lines don't mix.

    Args:
        bare: Show the output at once, and without the rank of its writer.
        bar: Drawn below standard error. Default: no bar.
    """
    output_status, error_status = os.fstat(1), os.fstat(2)
    prefix = _make_empty_prefix if bare else _make_rank_prefix
    same_file = (output_status.st_dev, output_status.st_ino) == (
        error_status.st_dev,
        error_status.st_ino,
    )
    error_screen = Screen(2, prefix, at_once=bare, bar=bar)
    return (error_screen if same_file else Screen(1, prefix, at_once=bare)), error_screen


def flush_screens(
    screens: set[Screen], wake_fd: int, timings: SupervisorTimings, hurried: Callable[[], bool]
) -> None:
    """Write out what is left on the screens.

    If the end was asked for (`hurried`), give up after a while, as the reader may never read.
    """
    deadline = time.monotonic() + timings.flush
    for screen in screens:
        while screen.has_pending:
            poll = select.poll()
            poll.register(screen.descriptor, select.POLLOUT)
            poll.register(wake_fd, select.POLLIN)
            ready_fds = [descriptor for descriptor, _ in poll.poll(1000 * timings.look)]
            if screen.descriptor in ready_fds:
                screen.write_pending()
            elif hurried() and time.monotonic() > deadline:
                screen.drop_pending()
            if wake_fd in ready_fds:
                drain_pipe(wake_fd)


def drain_pipe(descriptor: int) -> None:
    """Read a pipe that doesn't block until it is empty."""
    try:
        while os.read(descriptor, 4096):
            continue
    except BlockingIOError:
        return
