"""The caller's side of a launcher: all that it writes is shown where the caller's output goes
now, whatever the bytes are.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.cluster.control.calls import make_channel
from paceline.cluster.discover import copy_environment
from paceline.cluster.launcher import agent
from paceline.cluster.launcher.request import LaunchRequest
from paceline.notebook.process import LauncherProcess
from paceline.timings import CallTimings

pytestmark = pytest.mark.jobs
BODY = (
    "import os, sys\nos.write(1, 'ä'.encode()[:1]); os.write(2, b'err\\n'); "
    "os.write(1, 'ä'.encode()[1:] + b'\\xff' * 3)\nsys.exit(7)"
)
DEAF = (
    "import signal, sys, time\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\nprint('ready', "
    "flush=True)\ntime.sleep(600)"
)


def started(monkeypatch: pytest.MonkeyPatch, body: str, seconds: float = 10.0) -> LauncherProcess:
    """A process in place of the launcher."""

    def command(job: LaunchRequest, parent: int) -> Sequence[str]:
        return [sys.executable, "-c", body]

    monkeypatch.setattr(agent, "make_command", command)
    mine, theirs = make_channel()
    with theirs, open(Path("/dev/null")) as file:
        job = LaunchRequest("none", call=(file.fileno(), theirs.fileno()))
        return LauncherProcess(
            job, copy_environment(), mine, print, timings=CallTimings(end=seconds)
        )


def test_output_goes_where_it_goes_now(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = started(monkeypatch, BODY)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert launcher.wait_for_end() == 7
    assert out.getvalue() == "ä\ufffd\ufffd\ufffd" and err.getvalue() == "err\n"
    assert launcher.last_line == "err"


class Interrupted(io.StringIO):
    """An output that the user interrupts as something comes."""

    def write(self, text: str) -> int:
        raise KeyboardInterrupt


def test_a_launcher_that_doesn_t_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = started(monkeypatch, DEAF, seconds=0.3)
    with contextlib.redirect_stdout(Interrupted()), pytest.raises(KeyboardInterrupt):
        launcher.wait_for_end()
    assert launcher._process.returncode == -9
