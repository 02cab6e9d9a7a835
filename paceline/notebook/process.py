"""Runs the launcher of a call as a child process of the caller.

The caller starts it, shows its output, handles the messages of workers, and ends it. All waiting
happens in `wait_for_end`. An interrupt there (Ctrl-C, or the kernel's) ends all workers before it
is raised to the user.

    caller    start -> wait_for_end: copy output, take messages ... -> exit code
                                 |
                                 +-- interrupt: END_SIGNAL -> launcher ends its workers -> raise
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO

from paceline.cluster.control.calls import CallChannel, CallMessage
from paceline.cluster.launcher import agent
from paceline.cluster.launcher.request import LaunchRequest
from paceline.timings import DEFAULT_TIMINGS, CallTimings

Hear = Callable[[CallMessage], object]


class _LauncherPipe:
    """Copies one output of the launcher to the caller's own, which may be a notebook's cell."""

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        self._pipe, self._name = pipe, name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.tail = ""
        self.open = True

    def fileno(self) -> int:
        return self._pipe.fileno()

    def show_arrived(self) -> None:
        """Show the bytes that have arrived, and close the pipe at the end of the output."""
        data = os.read(self._pipe.fileno(), 1 << 16)
        text = self._decoder.decode(data, final=not data)
        if not data:
            self.close()
        if text:
            self.tail = (self.tail + text)[-(1 << 12) :]
            # Looked up each time, because it may have been redirected.
            stream = getattr(sys, self._name)
            stream.write(text)
            stream.flush()

    def close(self) -> None:
        self.open = False
        self._pipe.close()


class LauncherProcess:
    """The launcher of a call, with its workers.

    Args:
        job: The job. Workers inherit the descriptors in its `call`.
        environ: Environment of the launcher.
        channel: Channel of the workers' messages.
        hear: Called with each message.
        timings: Intervals and limits of waiting. Default: the usual ones.
    """

    def __init__(
        self,
        job: LaunchRequest,
        environ: Mapping[str, str],
        channel: CallChannel,
        hear: Hear,
        *,
        timings: CallTimings = DEFAULT_TIMINGS.call,
    ) -> None:
        self._channel, self._hear, self._timings = channel, hear, timings
        assert job.call is not None
        self._process = subprocess.Popen(
            agent.make_command(job, os.getpid()),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=job.call,
            # Ctrl-C on a terminal must reach the caller alone, which then ends the launcher.
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._out, self._err = (
            _LauncherPipe(self._process.stdout, "stdout"),
            _LauncherPipe(self._process.stderr, "stderr"),
        )

    @property
    def last_line(self) -> str:
        """Last line of the launcher's errors."""
        return (self._err.tail.strip().splitlines() or [""])[-1]

    def wait_for_end(self) -> int:
        """Wait until the job has ended. Returns its exit code.

        An exception during the wait ends the workers before it is raised.
        """
        try:
            self._watch_until(None)
            return self._process.wait()
        except BaseException:
            self._end_job()
            raise
        finally:
            for output in (self._out, self._err):
                output.close()

    def _watch_until(self, until: float | None) -> None:
        """Pass on output and messages until the launcher has ended.

        Stops earlier at `until`, a time of `time.monotonic()`.
        """
        while streams := [output for output in (self._out, self._err) if output.open]:
            if until is not None and time.monotonic() >= until:
                return
            # Outputs and messages are handled as they arrive. The limit of the poll lets `until`
            # be checked as well.
            poll = select.poll()
            for descriptor in (*(output.fileno() for output in streams), self._channel.fileno()):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * self._timings.look)}
            for output in streams:
                if output.fileno() in ready:
                    output.show_arrived()
            self._take_messages()
        # Messages may arrive between the last poll and the end of the output.
        self._take_messages()

    def _take_messages(self) -> None:
        while (message := self._channel.receive()) is not None:
            self._hear(message)

    def _end_job(self) -> None:
        """End the workers and the launcher; a second interrupt sends the signal again."""
        until = time.monotonic() + self._timings.end
        while self._process.poll() is None and time.monotonic() < until:
            self._process.send_signal(agent.END_SIGNAL)
            # A second interrupt, or an output that can't be written to any more.
            with contextlib.suppress(
                KeyboardInterrupt, OSError, ValueError, subprocess.TimeoutExpired
            ):
                self._watch_until(until)
                self._process.wait(max(0.1, until - time.monotonic()))
        # If it is still alive now, its janitor ends the workers after the kill.
        self._process.kill()
        self._process.wait()
