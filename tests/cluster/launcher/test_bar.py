"""The bar of `paceline run` on a real terminal, below what workers write; without torch, as a
worker tells of its steps.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.launcher.output import Screen
from paceline.status.live_bar import LiveBar
from paceline.status.run_status import RunStatus
from tests.harness.jobs import wait_for
from tests.harness.launchers import JOINED, PROGRAM
from tests.harness.terminal_screen import TerminalScreen
from tests.harness.terminals import OnTerminal


class Sink:
    """A screen with a bar on a pipe, and what a terminal makes of it."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._terminal = TerminalScreen(100)
        self.screen = Screen(self._writer, bar=LiveBar(self._terminal.size))

    def text(self) -> list[str]:
        while self.screen.has_pending:
            self.screen.write_pending()
            self._terminal.feed(os.read(self._reader, 1 << 16).decode())
        return self._terminal.text()

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def sink() -> Iterator[Sink]:
    found = Sink()
    yield found
    found.close()


def test_lines_come_above_it(sink: Sink) -> None:
    for step in (1, 2):
        sink.screen.put_line(0, b"a\n")
        sink.screen.put_line(1, b"b\n")
        sink.screen.show_status(RunStatus(step, 9))
        sink.screen.redraw_bar()
    assert sink.text()[:4] == ["[0] a", "[1] b"] * 2 and "step 2/9" in sink.text()[4]
    sink.screen.put_line(1, b"c\n")
    assert sink.text()[4:] == ["[1] c", ""]  # until the launcher has read what there is
    sink.screen.redraw_bar()
    assert "step 2/9" in sink.text()[5]
    sink.screen.show_status(None)
    sink.screen.show_line("paceline: over")
    assert "step 2/9" in sink.text()[5] and sink.text()[6:] == ["paceline: over", ""]


def test_a_line_under_way_is_ended_and_its_rest_has_its_rank(sink: Sink) -> None:
    sink.screen.put_line(0, b"loading")
    sink.screen.redraw_bar()
    assert sink.text() == ["[0] loading"]
    sink.screen.show_status(RunStatus(1, 9))
    sink.screen.put_line(0, b"done\n")
    sink.screen.redraw_bar()
    assert sink.text()[:2] == ["[0] loading", "[0] done"] and "step 1/9" in sink.text()[2]


def test_a_bar_of_the_script_has_the_last_line(sink: Sink) -> None:
    for percent in (b"1%", b"2%"):
        sink.screen.put_line(0, b"\r")
        sink.screen.put_line(0, percent)
        sink.screen.show_status(RunStatus(1, 9))
        sink.screen.redraw_bar()
    assert sink.text() == ["[0] 2%"]


def test_a_terminal_that_is_behind_is_not_flooded(sink: Sink) -> None:
    for step in range(2000):
        sink.screen.show_status(RunStatus(step, 2000))
    assert sink.screen._pending_bytes < 10_000


TELLING = """
from paceline.record.display import choose_display
from paceline.status.run_status import RunStatus
shown = choose_display(place) if rank == 0 else None
print("hello", rank, flush=True)
for step in range(1, 4):
    if shown is not None:
        shown.show(RunStatus(step, 3, 1, 1, {"loss": 1.5}))
    print("line", step, rank, flush=True)
"""
ENDING = """
if shown is not None:
    shown.close()
events.report_closed(place)
"""
WAITING = """
time.sleep(1000)
"""


def on_terminal(folder: Path, body: str, **options: Any) -> OnTerminal:
    """`paceline run` with two workers, on a terminal."""
    (folder / "script.py").write_text(
        "import os, time\nrank = int(os.environ['RANK'])\n" + JOINED + body
    )
    return OnTerminal(
        [sys.executable, PROGRAM, json.dumps({"script": str(folder / "script.py"), "workers": 2})],
        folder,
        **options,
    )


def ordered(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if line.startswith("["))


PRINTED = sorted(
    f"[{rank}] {text} {rank}"
    for rank in range(2)
    for text in ("hello", "line 1", "line 2", "line 3")
)


@pytest.mark.parametrize("columns", [80, 40])
def test_on_a_terminal(tmp_path: Path, columns: int) -> None:
    with on_terminal(tmp_path, TELLING + ENDING, columns=columns) as job:
        found = job.end()
    assert ordered(found) == PRINTED and all(
        len(line) < columns or "paceline" in line for line in found
    )
    bars = [line for line in found if "step" in line]
    assert (
        len(bars) == 1
        and "step 3/3" in bars[0]
        and "━━━━" in bars[0]
        and "loss 1.5" in " ".join(found)
    )


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"CI": "true"}])
def test_terminals_without_one(tmp_path: Path, environ: dict[str, str]) -> None:
    with on_terminal(tmp_path, TELLING + ENDING, **environ) as job:
        assert [line for line in job.end() if "step" in line] == [
            f"[0] epoch 1/1  step {step}/3  loss 1.5" for step in (1, 2, 3)
        ]
    assert b"\x1b" not in job.said


def test_without_colours(tmp_path: Path) -> None:
    with on_terminal(tmp_path, TELLING + ENDING, NO_COLOR="1") as job:
        assert sum("step 3/3" in line for line in job.end()) == 1
    assert not re.search(rb"\x1b\[[\d;]*[34]\d[\d;]*m", job.said)


def test_ctrl_c_leaves_the_terminal_clean(tmp_path: Path) -> None:
    with on_terminal(tmp_path, TELLING + WAITING) as job:
        wait_for(lambda: all(text in job.said for text in (b"step 3/3", b"line 3 0", b"line 3 1")))
        job.process.send_signal(signal.SIGINT)
        found = job.end(128 + signal.SIGINT)
    assert sum("step 3/3" in line for line in found) == 1 and found[-1] == ""
    # the cursor was never hidden, nor the screen left
    assert not any(command in job.said for command in (b"\x1b[?25l", b"\x1b[?1049h"))
    assert [line for line in ordered(found) if line in PRINTED] == PRINTED
