"""One worker process as its launcher sees it: how it is started, what it reports, how it ended."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.control.progress import Page
from paceline.cluster.launcher.output import OutputStream, Screen

_PR_SET_PDEATHSIG = 1


@dataclass
class WorkerCommand:
    """The start of one worker: its rank, command, environment, the descriptors that it inherits,
    and its page if it has one.
    """

    rank: int
    command: Sequence[str]
    environ: dict[str, str]
    descriptors: tuple[int, ...]
    page: Page | None = None
    number: int | None = None  # where losses are survived (`commands.named`)
    joining: bool = False  # the others train already


@dataclass
class WorkerProcess:
    """One worker that was started."""

    rank: int
    process: subprocess.Popen[bytes]
    streams: tuple[OutputStream, OutputStream]
    records_fd: int
    orders_fd: int
    stack_fd: int
    records: list[dict[str, object]] = field(default_factory=list)
    status: dict[str, Any] | None = None  # how far the run is, which was not taken yet
    told_all: bool = False  # nothing more comes of that
    ended: float | None = None  # time.time() of its end
    reaped: bool = False
    code: int = 0  # as a shell would give it
    was_sent: set[int] = field(default_factory=set)
    number: int = -1
    joining: bool = False
    _line: bytes = b""

    def said(self, event: str) -> bool:
        return any(record["event"] == event for record in self.records)

    def take(self, event: str) -> list[dict[str, object]]:
        """Take the records of this kind, once each."""
        taken = [record for record in self.records if record["event"] == event]
        for record in taken:
            self.records.remove(record)
        return taken

    def stack(self) -> str:
        """Return the stack of the worker, if it was asked for (`commands.STACK`) and has come."""
        try:
            return os.read(self.stack_fd, 1 << 16).decode("utf-8", "replace")
        except BlockingIOError:
            return ""

    def order(self, line: bytes) -> None:
        """Send the worker a command; one that is gone, or has not listened for long, misses it."""
        try:
            os.write(self.orders_fd, line)
        except (BrokenPipeError, BlockingIOError):
            return

    def listen(self) -> None:
        """Read the worker's reports."""
        try:
            data = os.read(self.records_fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            os.close(self.records_fd)
            self.records_fd = -1
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for record in map(json.loads, lines):
            if record["event"] != "progress":
                self.records.append(record)
            elif record["status"] is None:
                self.told_all = True
            else:
                self.status, self.told_all = record["status"], False

    def take_status(self) -> dict[str, Any] | None:
        """Take what the worker has told last of how far the run is, once."""
        found, self.status = self.status, None
        return found

    def look(self) -> None:
        """Find out whether the worker has ended."""
        if (
            self.ended is None
            and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            is not None
        ):
            self.ended = time.time()

    def reap(self, seconds: float) -> None:
        """Reap the worker, which has ended, with its last output; a process that escaped may
        hold that open for so many `seconds`.
        """
        self.reaped = True
        status = self.process.wait()
        self.code = status if status >= 0 else 128 - status
        end = time.monotonic() + seconds
        while self.records_fd >= 0 and readable(self.records_fd, 0):
            self.listen()
        for stream in self.streams:
            while (
                stream.open
                and not stream.screen.full
                and readable(stream.descriptor, end - time.monotonic())
            ):
                stream.read()
        if self.records_fd >= 0:
            os.close(self.records_fd)
            self.records_fd = -1
        if self.orders_fd >= 0:
            os.close(self.orders_fd)
            os.close(self.stack_fd)
            self.orders_fd = self.stack_fd = -1

    def send(self, signum: int) -> None:
        """Send the worker a signal, once."""
        if self.ended is None and signum not in self.was_sent:
            self.was_sent.add(signum)
            os.kill(self.process.pid, signum)  # not reaped yet: the number is still its own


def readable(descriptor: int, seconds: float) -> bool:
    """Wait at most so long until a descriptor can be read; returns whether it can."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * seconds)))


def start(
    task: WorkerCommand, prepare: Callable[[], None] | None, screens: tuple[Screen, Screen]
) -> WorkerProcess:
    """Start a worker that leads a process group of its own; its output goes to these screens."""
    ours, theirs = os.pipe()
    heard, orders = os.pipe()
    stack, shown = os.pipe()
    own = {
        "PACELINE_REPORT_FD": str(theirs),
        "PACELINE_ORDERS_FD": str(heard),
        "PACELINE_STACK_FD": str(shown),
    }
    os.set_blocking(shown, False)  # nothing may hold a worker up when nobody reads
    own |= {} if task.number is None else {"PACELINE_WORKER": str(task.number)}
    try:
        process = subprocess.Popen(
            task.command,
            env={**task.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(theirs, heard, shown, *task.descriptors),
            process_group=0,
            preexec_fn=prepare,  # noqa: PLW1509 (the launcher has one thread)
        )
    finally:
        for descriptor in (theirs, heard, shown):
            os.close(descriptor)
    if task.page is not None:
        task.page.started(process.pid)
    assert process.stdout is not None and process.stderr is not None
    pipes = [os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())]
    process.stdout.close()
    process.stderr.close()
    for descriptor in (ours, *pipes, orders, stack):
        os.set_blocking(descriptor, False)
    streams = (
        OutputStream(task.rank, pipes[0], screens[0]),
        OutputStream(task.rank, pipes[1], screens[1]),
    )
    number = -1 if task.number is None else task.number
    return WorkerProcess(
        task.rank, process, streams, ours, orders, stack, number=number, joining=task.joining
    )


def ending(code: int) -> str:
    """End of a process, in words; an exit code above 128 was a signal, as in a shell."""
    if code <= 128:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(code - 128).name} (exit code {code})"
    except ValueError:
        return f"failed with exit code {code}"


def preparation(launcher: int) -> Callable[[], None] | None:
    """Make what a worker runs between fork and exec: it dies with its launcher, and hears Ctrl-C
    even if the launcher's shell didn't.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return prepare
