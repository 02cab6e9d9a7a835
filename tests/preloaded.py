"""`python preloaded.py run ...` is `paceline run ...`, but its workers have torch from the start: they are forked, and not programs.

Importing torch takes most of the processor time of a job under test. Here the launcher imports it once, and all its workers, also those
that come in the place of others, begin with a copy. To everybody else they are what they always are: processes of a group of their own,
with their own environment (also as others see it), descriptors and output. How programs start is for the tests of the launcher itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

ROOM = "PACELINE_TEST_ROOM"  # a variable that makes the launcher's environment larger than that of its workers
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD  # those to which a launcher listens


class Forked:
    """What a launcher needs of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], preexec_fn: Callable[[], None] | None, **rest: Any
    ) -> None:
        assert rest == {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "process_group": 0}, rest
        out, err = os.pipe(), os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            _keep(out[1], err[1], pass_fds)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            if preexec_fn is not None:
                preexec_fn()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _become(command, {name: value for name, value in env.items() if name != ROOM})
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.pid, self.pid)  # whoever comes first
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(out[1])
        os.close(err[1])
        self.stdout: IO[bytes] = os.fdopen(out[0], "rb", buffering=0)
        self.stderr: IO[bytes] = os.fdopen(err[0], "rb", buffering=0)

    def wait(self) -> int:
        """Its exit code; below 0 the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _keep(out: int, err: int, given: Sequence[int]) -> None:
    """These descriptors alone, the first two as the output."""
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, out, err)):
        os.dup2(descriptor, number)
    for descriptor in given:
        os.set_inheritable(descriptor, True)
    kept = {0, 1, 2, *given}
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor not in kept:
            with contextlib.suppress(OSError):  # it was that of the folder
                os.close(descriptor)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Run a script to its end, as an interpreter of its own would."""
    os.environ.clear()
    os.environ.update(environ)
    _show(environ)
    script = command[1]
    sys.argv, sys.path[0] = list(command[1:]), str(Path(script).parent)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    code = 1
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  it is shown
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next  # from the script on
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


def _show(environ: Mapping[str, str]) -> None:
    """Others see this environment in /proc: it is written where the launcher was given its own."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    assert len(block) < end - start, f"{ROOM} has to be {len(block) - (end - start)} longer"
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def main() -> None:
    sys.path[0] = str(Path(__file__).parents[1])
    importlib.import_module("tests.brisk")
    worker = importlib.import_module("paceline.cluster.worker")
    _ = importlib.import_module("paceline").start  # and all that it needs
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "a process with threads can't be forked"
    worker.subprocess = ModuleType("subprocess")
    worker.subprocess.Popen, worker.subprocess.PIPE, worker.subprocess.DEVNULL = Forked, subprocess.PIPE, subprocess.DEVNULL
    importlib.import_module("paceline.cli").main()


if __name__ == "__main__":
    main()
