"""Standard input, output and error of what a user starts, where some of them are closed, as
under cron.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from paceline.cluster.launcher.output import OutputStream, Screen
from paceline.lab import kernel

CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]
WORKER = """
import os, socket, sys
rank, listening = os.environ["RANK"], os.environ.get("PACELINE_STORE_FD")
if listening is not None:
    socket.socket(fileno=os.dup(int(listening))).getsockname()  # what it inherits is what it should be
open(f"rank{rank}", "w").write(" ".join(str(os.path.exists(f"/proc/self/fd/{number}")) for number in range(3)))
print("said", rank)
"""  # noqa: E501


def shell(closed: str, *words: str) -> list[str]:
    """A command whose streams are closed like that."""
    return ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, *words]


def left_open(closed: str) -> bool:
    return ">&-" not in closed.replace("2>&-", "")


class TestClosed:
    @pytest.mark.parametrize("closed", CLOSED)
    def test_run(self, job, closed):
        (job.folder / "script.py").write_text(WORKER)
        ended = job.start(
            shell(closed, "-m", "paceline", "run", "--workers", "2", "script.py")
        ).end()
        assert ended.code == 0, ended.err
        assert [(job.folder / f"rank{rank}").read_text() for rank in range(2)] == [
            "True True True"
        ] * 2
        assert sorted(ended.out.splitlines()) == (
            ["[0] said 0", "[1] said 1"] if left_open(closed) else []
        )

    @pytest.mark.parametrize("closed", CLOSED[1:3])
    def test_report(self, job, closed):
        (job.folder / "runs" / "empty").mkdir(parents=True)
        ended = job.start(shell(closed, "-m", "paceline", "report", "runs/empty")).end()
        assert ended.code == 0 and ("No step was finished" in ended.out) == left_open(closed), (
            ended.err
        )

    @pytest.mark.jobs
    @pytest.mark.parametrize("closed", CLOSED)
    def test_a_process_of_its_own(self, closed):
        """Whatever it opens next is none of the three, and it may read and write them all."""
        body = """
import os, sys
from paceline.cluster.launcher.output import open_missing_streams
open_missing_streams()
other = os.open(os.devnull, os.O_RDONLY)
print("out", file=sys.stdout, flush=True)
print("err", file=sys.stderr, flush=True)
sys.stdin.read()
os._exit(other)
"""
        command = shell(closed, "-P", "-c", body)
        assert (
            subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False
            ).returncode
            > 2
        )

    @pytest.mark.parametrize("closed", CLOSED[2:])
    def test_demo(self, job, closed):
        ended = job.start(shell(closed, "-m", "paceline", "demo", "--workers", "1")).end()
        assert ended.code == 2 and ended.err.startswith("paceline: --workers 1") == (
            "2>&-" not in closed
        ), ended.err


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.skipif(bool(kernel.find_missing()), reason=kernel.find_missing())
def test_run_in_a_lab(job):
    (job.folder / "script.py").write_text(WORKER)
    (job.folder / "c.toml").write_text("[[host]]\n[[host]]\n")
    ended = job.start(
        shell("<&- 2>&-", "-m", "paceline", "lab", "run", "c.toml", "script.py")
    ).end()
    assert ended.code == 0, ended.err
    assert [(job.folder / f"rank{rank}").read_text() for rank in range(2)] == ["True True True"] * 2
    assert sorted(ended.out.splitlines()) == ["[host0 0] said 0", "[host1 1] said 1"]


@pytest.mark.slow
def test_a_training_without_any(job):
    """Workers that inherit sockets, pipes and a secret, and go on when one is lost."""
    script = job.write("""
with pl.start(name="run") as run:
    model, optimizer, loader = parts(run)
    for epoch in run.epochs(2):
        for x, y in loader:
            step(run, model, optimizer, x, y)
""")
    words = ("-m", "paceline", "run", "--workers", "2", "--min-workers", "2", script)
    assert job.start(shell("<&- >&- 2>&-", *words)).end().code == 0
    assert json.loads((job.folder / "runs" / "run" / "summary.json").read_text())["steps"] == 16


PLACE = '  File "script.py", line 1, in <module>\n    wait()\n'
INTERRUPT = f"Traceback (most recent call last):\n{PLACE}KeyboardInterrupt\n"
FAILURE = f"Traceback (most recent call last):\n{PLACE}ValueError: half\nwritten\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (INTERRUPT, ""),
        (f"a\n{INTERRUPT}b\n", "a\nb\n"),
        (f"step 3{INTERRUPT}", "step 3\n"),
        (INTERRUPT + DURING + INTERRUPT, ""),
        (INTERRUPT + INTERRUPT, ""),
        (f"Exception ignored in: <module 'threading'>\n{INTERRUPT}", ""),
        *(
            (text, text)
            for text in (
                "a\n\nb",
                FAILURE,
                INTERRUPT + DURING + FAILURE,
                FAILURE + DURING + INTERRUPT,
            )
        ),
        *(
            (text, text)
            for text in (
                "Exception ignored in: <f>\nb\n",
                INTERRUPT[:60],
                f"Exception ignored in: <f>\n{FAILURE}",
            )
        ),
        (FAILURE + INTERRUPT, FAILURE),
    ],
)
def test_tracebacks_of_an_interrupt_are_left_out(written: str, shown: str) -> None:
    """In whatever parts they come: in one, and in lines."""
    for parts in ([written], written.splitlines(keepends=True)):
        copied = bytearray()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        stream = OutputStream(0, reader, Screen(2, lambda rank: b"", copied.extend))
        stream.hush_interrupts()
        for part in parts:
            os.write(writer, part.encode())
            stream.read_output()
        os.close(writer)
        stream.close()
        assert copied.decode() == shown
