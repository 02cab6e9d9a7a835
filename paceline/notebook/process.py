"""The launcher of a call as the caller sees it: starts it, shows what it writes, hears what workers
tell, and ends it.

The caller waits in `run` alone. What interrupts it there (Ctrl-C, a kernel's interrupt) ends all
workers before it goes on.
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
from paceline.timings import DEFAULTS, CallTimings

Hear = Callable[[CallMessage], object]


class _Output:
    """One output of the launcher on its way to the caller's own, which may be the cell of a
    notebook.
    """

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        self._pipe, self._name = pipe, name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.tail = ""
        self.open = True

    def fileno(self) -> int:
        return self._pipe.fileno()

    def read(self) -> None:
        """Show what has come; at the end of the output it is closed."""
        data = os.read(self._pipe.fileno(), 1 << 16)
        text = self._decoder.decode(data, final=not data)
        if not data:
            self.close()
        if text:
            self.tail = (self.tail + text)[-(1 << 12) :]
            stream = getattr(sys, self._name)  # as it is now: it may have been redirected
            stream.write(text)
            stream.flush()

    def close(self) -> None:
        self.open = False
        self._pipe.close()


class LauncherProcess:
    """The launcher of a call, with its workers.

    `job.call` has the descriptors that they inherit; `hear` is called with their messages.
    """

    def __init__(
        self,
        job: LaunchRequest,
        environ: Mapping[str, str],
        channel: CallChannel,
        hear: Hear,
        *,
        timings: CallTimings = DEFAULTS.call,
    ) -> None:
        self._channel, self._hear, self._timings = channel, hear, timings
        assert job.call is not None
        self._process = subprocess.Popen(
            agent.command(job, os.getpid()),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=job.call,
            # Ctrl-C on a terminal reaches the caller alone, which passes it on
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._out, self._err = (
            _Output(self._process.stdout, "stdout"),
            _Output(self._process.stderr, "stderr"),
        )

    @property
    def last_line(self) -> str:
        """The last line of its errors."""
        return (self._err.tail.strip().splitlines() or [""])[-1]

    def run(self) -> int:
        """Wait for its end, and give the exit code of the job.

        Whatever interrupts that ends the workers first.
        """
        try:
            self._watch(None)
            return self._process.wait()
        except BaseException:
            self._end()
            raise
        finally:
            for output in (self._out, self._err):
                output.close()

    def _watch(self, until: float | None) -> None:
        """Show and hear all that comes until the launcher has ended, or until that
        `time.monotonic()`.
        """
        while streams := [output for output in (self._out, self._err) if output.open]:
            if until is not None and time.monotonic() >= until:
                return
            poll = select.poll()
            for descriptor in (*(output.fileno() for output in streams), self._channel.fileno()):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * self._timings.look)}
            for output in streams:
                if output.fileno() in ready:
                    output.read()
            self._listen()
        self._listen()

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            self._hear(message)

    def _end(self) -> None:
        """End the workers, and the launcher: at once if this is interrupted again."""
        until = time.monotonic() + self._timings.end
        while self._process.poll() is None and time.monotonic() < until:
            self._process.send_signal(agent.END)
            # interrupted again, or what is shown goes nowhere any more
            with contextlib.suppress(
                KeyboardInterrupt, OSError, ValueError, subprocess.TimeoutExpired
            ):
                self._watch(until)
                self._process.wait(max(0.1, until - time.monotonic()))
        self._process.kill()  # its janitor ends the rest
        self._process.wait()
