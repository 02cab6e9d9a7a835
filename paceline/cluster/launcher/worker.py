"""One worker process as its launcher sees it: its start, its reports, and its end.

worker ---- standard output and error ---> OutputStream ---> Screen
       ---- reports, JSON lines ---------> `records_fd`
       <--- orders, lines ---------------- `orders_fd`
       ---- its stack, if asked for -----> `stack_fd`
"""

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

from paceline.cluster.control.progress import ProgressPage
from paceline.cluster.launcher.output import OutputStream, Screen

_PR_SET_PDEATHSIG = 1


@dataclass
class WorkerCommand:
    """The start of one worker.

    Args:
        rank: Rank of the worker, or the number by which its launcher calls it.
        command: Command line.
        environ: Whole environment.
        descriptors: Descriptors that the worker inherits.
        page: Its progress page, if the job is observed.
        number: Its number in views, if losses are survived (see `commands.make_worker_number`).
        joining: Whether other workers train already.
    """

    rank: int
    command_line: Sequence[str]
    environ: dict[str, str]
    descriptors: tuple[int, ...]
    page: ProgressPage | None = None
    worker_number: int | None = None
    is_joining: bool = False


@dataclass
class WorkerProcess:
    """A worker that was started.

    It has ended (`ended_at`) when it is a zombie. It is reaped (`is_reaped`) after its process
    group was cleaned up: until then no other process can get its number.
    """

    rank: int
    process: subprocess.Popen[bytes]
    streams: tuple[OutputStream, OutputStream]
    records_fd: int
    orders_fd: int
    stack_fd: int
    records: list[dict[str, object]] = field(default_factory=list)
    status: dict[str, Any] | None = None  # progress of the run, until `take_status`
    has_told_all: bool = False  # no more progress will be reported
    ended_at: float | None = None  # time.time() of its end
    is_reaped: bool = False
    exit_code: int = 0  # exit code as in a shell: 128+n for signal n
    sent_signals: set[int] = field(default_factory=set)  # signals
    worker_number: int = -1
    is_joining: bool = False
    _partial_line: bytes = b""

    def has_reported(self, event: str) -> bool:
        """Whether the worker has reported this event."""
        return any(record["event"] == event for record in self.records)

    def take_records(self, event: str) -> list[dict[str, object]]:
        """Take out the records of this event."""
        matching = [record for record in self.records if record["event"] == event]
        for record in matching:
            self.records.remove(record)
        return matching

    def read_stack(self) -> str:
        """The stack of the worker, if it was asked for (`commands.STACK_SIGNAL`) and has come;
        else "".
        """
        try:
            return os.read(self.stack_fd, 1 << 16).decode("utf-8", "replace")
        except BlockingIOError:
            return ""

    def send_order(self, line: bytes) -> None:
        """Send the worker a command.

        A worker that is gone, or that has not read its commands for long, misses it.
        """
        try:
            os.write(self.orders_fd, line)
        except (BrokenPipeError, BlockingIOError):
            return

    def read_reports(self) -> None:
        """Read the reports that have come from the worker."""
        try:
            data = os.read(self.records_fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            os.close(self.records_fd)
            self.records_fd = -1
            return
        # The last line may be incomplete: the rest of it comes later.
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for record in map(json.loads, lines):
            if record["event"] != "progress":
                self.records.append(record)
            elif record["status"] is None:
                self.has_told_all = True
            else:
                self.status, self.has_told_all = record["status"], False

    def take_status(self) -> dict[str, Any] | None:
        """Take out the latest progress of the run that the worker has reported, if there is any."""
        status, self.status = self.status, None
        return status

    def check_end(self) -> None:
        """Note the time if the worker has ended. It isn't reaped."""
        if (
            self.ended_at is None
            and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            is not None
        ):
            self.ended_at = time.time()

    def reap(self, seconds: float) -> None:
        """Reap the worker, which has ended, and read its last output.

        A process that escaped from its group may hold the pipes open: reading ends after `seconds`.
        """
        self.is_reaped = True
        status = self.process.wait()
        self.exit_code = status if status >= 0 else 128 - status
        deadline = time.monotonic() + seconds
        while self.records_fd >= 0 and wait_readable(self.records_fd, 0):
            self.read_reports()
        for stream in self.streams:
            while (
                stream.is_open
                and not stream.screen.is_full
                and wait_readable(stream.descriptor, deadline - time.monotonic())
            ):
                stream.read_output()
        if self.records_fd >= 0:
            os.close(self.records_fd)
            self.records_fd = -1
        if self.orders_fd >= 0:
            os.close(self.orders_fd)
            os.close(self.stack_fd)
            self.orders_fd = self.stack_fd = -1

    def send_signal(self, signum: int) -> None:
        """Send the worker a signal, unless it has been sent before."""
        if self.ended_at is None and signum not in self.sent_signals:
            self.sent_signals.add(signum)
            # It isn't reaped yet, so the number is still its own.
            os.kill(self.process.pid, signum)


def wait_readable(descriptor: int, seconds: float) -> bool:
    """Wait for at most `seconds` until a descriptor can be read. Returns whether it can."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * seconds)))


def start_worker(
    task: WorkerCommand, prepare: Callable[[], None] | None, screens: tuple[Screen, Screen]
) -> WorkerProcess:
    """Start a worker as the leader of a process group of its own.

    Args:
        task: Its command.
        prepare: Function to call between fork and exec (see `make_preparation`).
        screens: Where its standard output and error go.
    """
    # Three pipes beside its output: reports from the worker, orders to it, and its stack.
    records_fd, report_fd = os.pipe()
    worker_orders_fd, orders_fd = os.pipe()
    stack_fd, worker_stack_fd = os.pipe()
    own_variables = {
        "PACELINE_REPORT_FD": str(report_fd),
        "PACELINE_ORDERS_FD": str(worker_orders_fd),
        "PACELINE_STACK_FD": str(worker_stack_fd),
    }
    if task.worker_number is not None:
        own_variables["PACELINE_WORKER"] = str(task.worker_number)
    # A worker that writes its stack must not block if the launcher doesn't read.
    os.set_blocking(worker_stack_fd, False)
    try:
        process = subprocess.Popen(
            task.command_line,
            env={**task.environ, **own_variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(report_fd, worker_orders_fd, worker_stack_fd, *task.descriptors),
            process_group=0,
            preexec_fn=prepare,  # noqa: PLW1509 (the launcher has one thread)
        )
    finally:
        for descriptor in (report_fd, worker_orders_fd, worker_stack_fd):
            os.close(descriptor)
    if task.page is not None:
        task.page.write_process(process.pid)
    assert process.stdout is not None and process.stderr is not None
    # Copies of the descriptors, as Popen closes its own when it is collected.
    output_fds = [os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())]
    process.stdout.close()
    process.stderr.close()
    for descriptor in (records_fd, *output_fds, orders_fd, stack_fd):
        os.set_blocking(descriptor, False)
    streams = (
        OutputStream(task.rank, output_fds[0], screens[0]),
        OutputStream(task.rank, output_fds[1], screens[1]),
    )
    return WorkerProcess(
        task.rank,
        process,
        streams,
        records_fd,
        orders_fd,
        stack_fd,
        worker_number=-1 if task.worker_number is None else task.worker_number,
        is_joining=task.is_joining,
    )


def describe_end(code: int) -> str:
    """End of a process in words. An exit code above 128 stands for a signal, as in a shell."""
    if code <= 128:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(code - 128).name} (exit code {code})"
    except ValueError:
        return f"failed with exit code {code}"


def make_preparation(launcher: int) -> Callable[[], None] | None:
    """Make the function that a worker runs between fork and exec; None if this isn't Linux.

    It has the worker die with its launcher, and lets it receive Ctrl-C even if the launcher's shell
    ignores it.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The launcher may have died before the line above, and then no signal would come.
        if os.getppid() != launcher:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return prepare
