"""Workers of jobs under test that have torch from the start: they are forked, and not programs.

Importing torch takes most of the processor time of a job under test. A launcher that comes from
`tests.harness.nursery` has it, and all its workers, also those that come in the place of others,
begin with a copy. To everybody else they are what they always are: processes of a group of their
own, with their own environment and arguments (also as others see them), descriptors and output. How
programs start is for the tests of the launcher itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn

# a variable that makes the environment of the nursery larger than that of what it forks
ROOM = "PACELINE_TEST_ROOM"
_ARGUMENTS, _ENVIRONMENT = 45, 47  # where /proc/PID/stat says where they lie
# those to which a launcher listens
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD


class Forked:
    """What a launcher needs of `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        preexec_fn: Callable[[], None] | None,
        **rest: Any,
    ) -> None:
        assert rest == {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "process_group": 0,
        }, rest
        out, err = os.pipe(), os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                keep((os.open(os.devnull, os.O_RDONLY), out[1], err[1]), pass_fds)
                reset(before, preexec_fn)
                become(command, {name: value for name, value in env.items() if name != ROOM})
            finally:
                abandon()
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


def reset(mask: Any, prepare: Callable[[], None] | None = None) -> None:
    """Signals are answered as in a program that begins; `mask`: those that are blocked."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    if prepare is not None:
        prepare()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def abandon() -> NoReturn:
    """The end of a forked process that could not become what it was meant to be; it must never
    go on as what it was forked from.
    """
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def keep(three: Sequence[int], given: Sequence[int]) -> None:
    """These descriptors alone, the first three as input, output and errors."""
    # garbage of the process this was forked from is never looked for here: it would close
    # descriptors that are others' by then
    gc.freeze()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        # as for its temporary folders, which are there until it ends itself
        finalizer.atexit = False
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 3) for descriptor in three]
    for place, descriptor in enumerate(above):
        os.dup2(descriptor, place)
    for descriptor in given:
        os.set_inheritable(descriptor, True)
    kept = {0, 1, 2, *given}
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor not in kept:
            with contextlib.suppress(OSError):  # it was that of the folder
                os.close(descriptor)
    sys.stdin, sys.stdout = (
        os.fdopen(0, closefd=False),
        os.fdopen(1, "w", buffering=1, closefd=False),
    )
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Run a script to its end, or a module (`-m`), as an interpreter of its own would."""
    if command[1] == "-m":
        live(
            environ,
            command[1:],
            lambda: runpy.run_module(command[2], run_name="__main__", alter_sys=True),
        )
    script = command[1]
    sys.path[0] = str(Path(script).parent)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    live(
        environ,
        command,
        lambda: exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__),
    )


def live(environ: Mapping[str, str], command: Sequence[str], act: Callable[[], object]) -> NoReturn:
    """Be another program to its end."""
    os.environ.clear()
    os.environ.update(environ)
    sys.excepthook = sys.__excepthook__  # the command line that the launcher is has one of its own
    _show(_ENVIRONMENT, [f"{name}={value}" for name, value in environ.items()])
    _show(_ARGUMENTS, command)
    tempfile.tempdir = None
    sys.argv = list(command[1:])
    code = 1
    try:
        act()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  it is shown
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        assert error.__traceback__ is not None
        # from the script on
        error.__traceback__ = error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


def _show(field: int, words: Sequence[str]) -> None:
    """Others see this environment, or these arguments, in /proc: they are written where this
    program was given its own.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[field]), int(fields[field + 1])
    block = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert len(block) < end - start, f"{ROOM} has to be {len(block) - (end - start)} longer"
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def load(*names: str) -> None:
    """Have torch, all that workers need, and these modules."""
    gc.disable()  # it would go through all of torch several times
    importlib.import_module("torch._dynamo")  # optimizers ask for it
    _ = importlib.import_module("paceline").start
    for name in names:
        importlib.import_module(name)
    gc.enable()
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, (
        "a process with threads can't be forked"
    )


def fork_workers(servers: Callable[..., Any]) -> None:
    """Launchers fork their workers here; and workers start their servers so."""
    _instead("paceline.cluster.launcher.worker", Forked)
    _instead("paceline.servers.server_starter", servers)


def _instead(module: str, popen: Callable[..., Any]) -> None:
    """What this module starts is started by that."""
    importlib.import_module(module).subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    )
