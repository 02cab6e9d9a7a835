"""The bar of `paceline run` on a real terminal, below what workers write; without torch, as a worker tells of its steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.launcher.output import Screen
from paceline.status.live_bar import LiveBar
from paceline.status.run_status import RunStatus
from tests.harness.jobs import PATIENCE, wait_for
from tests.harness.launchers import JOINED, PROGRAM, ROOT
from tests.harness.terminal_screen import TerminalScreen


class Sink:
    """A screen with a bar on a pipe, and what a terminal makes of it."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        self._terminal = TerminalScreen(100)
        self.screen = Screen(writer, bar=LiveBar(self._terminal.size))

    def text(self) -> list[str]:
        while self.screen.pending:
            self.screen.write()
            self._terminal.feed(os.read(self._reader, 1 << 16).decode())
        return self._terminal.text()


def test_lines_come_above_it() -> None:
    sink = Sink()
    for step in (1, 2):
        sink.screen.put(0, b"a\n")
        sink.screen.put(1, b"b\n")
        sink.screen.follow(RunStatus(step, 9))
        sink.screen.settle()
    assert sink.text()[:4] == ["[0] a", "[1] b"] * 2 and "step 2/9" in sink.text()[4]
    sink.screen.put(1, b"c\n")
    assert sink.text()[4:] == ["[1] c", ""]  # until the launcher has read what there is
    sink.screen.settle()
    assert "step 2/9" in sink.text()[5]
    sink.screen.follow(None)
    sink.screen.say("paceline: over")
    assert "step 2/9" in sink.text()[5] and sink.text()[6:] == ["paceline: over", ""]


def test_a_line_under_way_is_ended_and_its_rest_has_its_rank() -> None:
    sink = Sink()
    sink.screen.put(0, b"loading")
    sink.screen.settle()
    assert sink.text() == ["[0] loading"]
    sink.screen.follow(RunStatus(1, 9))
    sink.screen.put(0, b"done\n")
    sink.screen.settle()
    assert sink.text()[:2] == ["[0] loading", "[0] done"] and "step 1/9" in sink.text()[2]


def test_a_bar_of_the_script_has_the_last_line() -> None:
    sink = Sink()
    for percent in (b"1%", b"2%"):
        sink.screen.put(0, b"\r")
        sink.screen.put(0, percent)
        sink.screen.follow(RunStatus(1, 9))
        sink.screen.settle()
    assert sink.text() == ["[0] 2%"]


def test_a_terminal_that_is_behind_is_not_flooded() -> None:
    sink = Sink()
    for step in range(2000):
        sink.screen.follow(RunStatus(step, 2000))
    assert sink.screen._size < 10_000


TELLING = """
from paceline.session.display import choose
from paceline.status.run_status import RunStatus
shown = choose(place) if rank == 0 else None
print("hello", rank, flush=True)
for step in range(1, 4):
    if shown is not None:
        shown.show(RunStatus(step, 3, 1, 1, {"loss": 1.5}))
    print("line", step, rank, flush=True)
"""
ENDING = """
if shown is not None:
    shown.close()
events.closed(place)
"""
WAITING = """
time.sleep(1000)
"""


class OnTerminal:
    """`paceline run` on a terminal of its own."""

    def __init__(self, folder: Path, body: str, **environ: str) -> None:
        (folder / "script.py").write_text("import os, time\nrank = int(os.environ['RANK'])\n" + JOINED + body)
        self._master, slave = os.openpty()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PACELINE_")) and name != "CI"}
        job: dict[str, Any] = {"script": str(folder / "script.py"), "workers": 2}
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, json.dumps(job)],
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env={**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm", **environ},
        )
        os.close(slave)
        self.terminal = TerminalScreen(80, 24)
        self.said = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # as Linux ends a terminal
                return
            if not data:
                return
            self.said += data

    def end(self) -> list[str]:
        """What is on the terminal at its end."""
        assert self.process.wait(PATIENCE) in (0, 128 + signal.SIGINT), self.said
        self._thread.join(PATIENCE)
        os.close(self._master)
        self.terminal.feed(self.said.decode())
        return self.terminal.text()


def ordered(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if line.startswith("["))


PRINTED = sorted(f"[{rank}] {text} {rank}" for rank in range(2) for text in ("hello", "line 1", "line 2", "line 3"))


def test_on_a_terminal(tmp_path: Path) -> None:
    found = OnTerminal(tmp_path, TELLING + ENDING).end()
    assert ordered(found) == PRINTED
    bars = [line for line in found if "step" in line]
    assert len(bars) == 1 and "step 3/3" in bars[0] and "━━━━" in bars[0] and "loss 1.5" in bars[0]


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"CI": "true"}])
def test_terminals_without_one(tmp_path: Path, environ: dict[str, str]) -> None:
    job = OnTerminal(tmp_path, TELLING + ENDING, **environ)
    assert [line for line in job.end() if "step" in line] == [f"[0] epoch 1/1  step {step}/3  loss 1.5" for step in (1, 2, 3)]
    assert b"\x1b" not in job.said


def test_ctrl_c_leaves_the_terminal_clean(tmp_path: Path) -> None:
    job = OnTerminal(tmp_path, TELLING + WAITING)
    wait_for(lambda: all(text in job.said for text in (b"step 3/3", b"line 3 0", b"line 3 1")))
    job.process.send_signal(signal.SIGINT)
    found = job.end()
    assert sum("step 3/3" in line for line in found) == 1 and found[-1] == ""
    assert not any(command in job.said for command in (b"\x1b[?25l", b"\x1b[?1049h"))  # the cursor was never hidden, nor the screen left
    assert [line for line in ordered(found) if line in PRINTED] == PRINTED
