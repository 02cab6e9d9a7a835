"""Where statuses are shown: above a bar all text stays whole, and the process gets its streams
back.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from paceline.cluster.discover import Place
from paceline.record.display import LauncherBar, PlainLines, TerminalBar, choose_display
from paceline.status.run_status import RunStatus
from tests.harness.jobs import wait_for
from tests.harness.terminal_screen import Terminal
from tests.harness.terminals import OnTerminal


def standing_in(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal that is standard output and error; to be called in a test, as pytest's own
    streams come back when it begins.
    """
    found = Terminal(100)
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setattr(sys, "stderr", found)
    return found


def test_which_display() -> None:
    bar = choose_display(Place(bar=True), Terminal())
    bar.close()  # where these tests run on a terminal it has taken its streams
    assert isinstance(bar, TerminalBar)
    assert isinstance(choose_display(Place(bar=True), io.StringIO()), PlainLines)
    # dumb, or in a CI, or beside the workers of torchrun
    assert isinstance(choose_display(Place(), Terminal()), PlainLines)
    assert isinstance(
        choose_display(Place(report_fd=9, launcher="paceline"), Terminal()), PlainLines
    )
    assert isinstance(choose_display(Place(bar=True, report_fd=9), io.StringIO()), LauncherBar)


def test_plain_lines() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)
    for step in (1, 2):
        lines.show(RunStatus(step, 2))
    lines.say("step 2  val/loss 1")
    lines.close()
    assert stream.getvalue() == "step 1/2\nstep 2/2\nstep 2  val/loss 1\n"


def test_what_is_printed_comes_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = standing_in(monkeypatch)
    bar = TerminalBar(terminal)
    for step in range(1, 4):
        bar.show(RunStatus(step, 9))
        print("line", step, end="\n" if step != 2 else "")
        sys.stderr.writelines([f"error {step}\n"])
    assert terminal.screen.text()[:5] == ["line 1", "error 1", "line 2error 2", "line 3", "error 3"]
    assert "step 3/9" in terminal.screen.text()[5]
    bar.say("step 3  val/loss 1")
    assert (
        terminal.screen.text()[5] == "step 3  val/loss 1"
        and "step 3/9" in terminal.screen.text()[6]
    )
    bar.close()
    bar.close()
    assert sys.stdout is terminal and sys.stderr is terminal
    print("after")
    assert [text[:7] for text in terminal.screen.text()[6:]] == [
        terminal.screen.text()[6][:7],
        "after",
        "",
    ]


def test_an_interrupt_behind_a_text_leaves_its_line_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = standing_in(monkeypatch)

    def interrupted(text: str) -> int:
        terminal.screen.feed(text)
        raise KeyboardInterrupt

    bar = TerminalBar(terminal)
    bar.show(RunStatus(1, 9))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bar, "_write_text", terminal.screen.feed)  # the bar itself is drawn as ever
        patch.setattr(terminal, "write", interrupted)
        print("loading", end="")
    bar.close()
    assert terminal.screen.text()[0] == "loading" and "step 1/9" in terminal.screen.text()[1]


def test_a_log_that_was_begun_before_comes_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = standing_in(monkeypatch)
    handler = logging.StreamHandler(terminal)
    logging.getLogger().addHandler(handler)
    try:
        bar = TerminalBar(terminal)
        bar.show(RunStatus(1, 9))
        logging.getLogger().warning("logged")
        assert terminal.screen.text()[0] == "logged" and "step 1/9" in terminal.screen.text()[1]
        bar.close()
        assert handler.stream is terminal
    finally:
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("mine", [None, object()])
def test_a_script_may_have_any_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch, mine: object
) -> None:
    terminal = standing_in(monkeypatch)
    monkeypatch.setattr(sys, "stdout", mine)
    bar = TerminalBar(terminal)
    bar.show(RunStatus(1, 9))
    bar.close()
    assert sys.stdout is mine and "step 1/9" in terminal.screen.text()[0]
    monkeypatch.setattr(sys, "stderr", mine)
    assert isinstance(choose_display(Place(bar=True)), PlainLines)


def test_other_streams_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = standing_in(monkeypatch)
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    bar = TerminalBar(terminal)
    assert sys.stdout is file and sys.stderr is not terminal and sys.stderr.isatty()
    mine = io.StringIO()
    monkeypatch.setattr(sys, "stderr", mine)
    bar.close()
    assert sys.stderr is mine


def test_threads_may_print(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = standing_in(monkeypatch)
    bar = TerminalBar(terminal)

    def work(number: int) -> None:
        for line in range(20):
            sys.stdout.write(f"{number} {line}\n")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for step in range(1, 30):
        bar.show(RunStatus(step, 30))
    for thread in threads:
        thread.join()
    bar.close()
    found = terminal.screen.text()
    assert sorted(text for text in found if "step" not in text) == sorted(
        ["", *(f"{n} {line}" for n in range(3) for line in range(20))]
    )
    assert sum("step" in text for text in found) == 1


def test_a_forked_process_writes_as_if_there_were_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = standing_in(monkeypatch)
    bar = TerminalBar(terminal)
    bar.show(RunStatus(1, 9))
    with bar._lock:  # as a thread of the parent may hold it
        child = os.fork()
        if child == 0:
            code = 1
            try:
                # a copy of the stream, which knows that this isn't its process
                sys.stdout._process = -1  # type: ignore[attr-defined]
                sys.stdout.write("x\n")
                code = 0 if terminal.screen.text()[-2].endswith("x") else 1
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    bar.close()


ALONE = """
import sys, time
from paceline.cluster.discover import discover_place
from paceline.record.display import choose_display
from paceline.status.run_status import RunStatus
place = discover_place()
shown = choose_display(place)
try:
    for step in range(1, 4):
        shown.show(RunStatus(step, 3, 1, 1, {"loss": 1.5}))
        print("line", step)
    print("a line without an end", end="")
    shown.show(RunStatus(3, 3, 1, 1, {"loss": 1.25}))
    time.sleep(1000)
finally:
    shown.close()
"""


def test_ctrl_c_in_a_process_that_is_alone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ALONE)
    with OnTerminal([sys.executable, "script.py"], tmp_path, columns=40) as job:
        wait_for(lambda: b"1.25" in job.said)
        job.process.send_signal(signal.SIGINT)
        found = job.end(-signal.SIGINT)
    assert found[:4] == ["line 1", "line 2", "line 3", "a line without an end"] and found[-2:] == [
        "KeyboardInterrupt",
        "",
    ]
    assert sum("step 3/3" in line for line in found) == 1 and b"\x1b[?25l" not in job.said


def test_a_launcher_is_told_and_never_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    bar = LauncherBar(Place(report_fd=writer, bar=True))
    bar.say("step 2  val/loss 1")  # as all that workers print
    assert capsys.readouterr().err == "step 2  val/loss 1\n"
    bar.show(RunStatus(3, 9, values={"loss": 0.5}))
    bar.close()
    first, last = map(json.loads, os.read(reader, 1 << 16).splitlines())
    assert (
        RunStatus.from_fields(first["status"]) == RunStatus(3, 9, values={"loss": 0.5})
        and last["status"] is None
    )
    for step in range(2000):  # nobody reads
        bar.show(RunStatus(step, 9, values={"loss": 0.5}, curve=(0.123456789,) * 64))
    bar.show(RunStatus(1, values={"long " * 2000: 1.0}))
    os.close(writer)
    text = b""
    while data := os.read(reader, 1 << 16):
        text += data
    os.close(reader)
    records = [json.loads(line) for line in text.splitlines()]  # each whole
    assert records and all(
        len(record["status"]["values"]) == 1 and "loss" in record["status"]["values"]
        for record in records
    )
