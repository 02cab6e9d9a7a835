"""An error of ours that nobody catches shows the lines of the user's script that led to it, and
its message; nothing in between.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline import callsite
from paceline.errors import Mismatch, PacelineError, UsageError
from paceline.session.excepthook import format_briefly, show_exception
from paceline.session.run import Run
from paceline.session.start import ExitHooks
from tests.harness.jobs import Jobs
from tests.harness.runs import alone, batches, workers


def shown(body: Callable[[Run], Any], size: int = 1) -> str:
    with pytest.raises(PacelineError) as caught:
        workers(size, body) if size > 1 else alone(body)
    return format_briefly(caught.value, caught.value.__traceback__)


def prepare(run: Run) -> None:
    run.prepare(7)


def step(run: Run) -> None:
    model = nn.Linear(6, 2).double()
    model, opt, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), batches())
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        opt.step()


def backward(run: Run) -> None:
    model = nn.Linear(6, 2).double()
    model, loader = run.prepare(model, batches())
    for x, y in loader:
        F.mse_loss(model(x), y).backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("body", "line"),
    [(prepare, "run.prepare(7)"), (step, "opt.step()"), (backward, ".backward(create_graph=True)")],
)
def test_the_users_lines_and_one_message(body: Callable[[Run], Any], line: str) -> None:
    text = shown(body, 2)
    assert text.startswith("Traceback (most recent call last):\n")
    files = [row.split('"')[1] for row in text.splitlines() if row.startswith("  File ")]
    package = (str(Path(paceline.__file__).parent), str(Path(torch.__file__).parent))
    assert files and files[-1] == __file__ and not any(file.startswith(package) for file in files)
    last = [row.strip() for row in text.splitlines() if not set(row.strip()) <= set("^~ ")]
    assert last[-2].endswith(line) and last[-1].startswith("paceline.errors.UsageError: ")


def test_what_the_script_itself_raised_first_is_shown() -> None:
    def body(run: Run) -> None:
        try:
            raise KeyError("the script's own")
        except KeyError as error:
            raise UsageError("because of it") from error

    assert "the script's own" in shown(body)


def test_what_we_raised_it_for_is_not() -> None:
    with pytest.raises(UsageError) as caught:
        paceline.start(device="nonsense")
    caught.value.__cause__ = _raised("int('no number')", callsite.__file__)
    text = format_briefly(caught.value, caught.value.__traceback__)
    assert "nonsense" in text and "no number" not in text
    caught.value.__cause__ = _raised("int('no number')", __file__)
    assert "no number" in format_briefly(caught.value, caught.value.__traceback__)


def _raised(code: str, file: str) -> Exception:
    """The error of this code, which lies in that file."""
    try:
        eval(compile(code, file, "eval"))
    except ValueError as error:
        # without this function
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return error
    raise AssertionError(code)


def test_an_interrupt_shows_where_the_script_was(capsys: pytest.CaptureFixture[str]) -> None:
    # as in the middle of an exchange
    code = compile("def wait(seconds):\n    raise KeyboardInterrupt", callsite.__file__, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with pytest.raises(KeyboardInterrupt) as caught:
        names["wait"](1)
    show_exception(caught.type, caught.value, caught.tb)
    said = capsys.readouterr().err
    assert (
        "Traceback" in said
        and 'names["wait"](1)' in said
        and said.endswith("KeyboardInterrupt\n")
        and callsite.__file__ not in said
    )


def test_where_a_script_stands() -> None:
    def here() -> str:
        return callsite.find_user_line()

    line = here.__code__.co_firstlineno + 1
    assert here().endswith(f"test_excepthook.py:{line})") and here().startswith(" (")


FAILING = """
def misuse(run):
    run.prepare(7)

if rank < 2:
    with pl.start(folder="runs") as run:
        misuse(run)
"""


@pytest.mark.slow
def test_a_job_says_it_in_few_lines(job: Jobs) -> None:
    ended = job.run(FAILING, 2).end()
    assert ended.code == 1 and ended.said.startswith(
        "paceline.errors.UsageError: run.prepare got a builtins.int"
    ), ended.err
    mine = [line for line in ended.err.splitlines() if line.startswith("[")]
    assert len(mine) <= 3 * 9 and "paceline/session" not in ended.err, ended.err


def test_an_error_of_ours_at_exit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run without `with`, which is closed when the script has ended."""
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def close() -> None:
        raise Mismatch("workers have come apart")

    run: Any = SimpleNamespace(
        close=close, _parts=SimpleNamespace(ending=SimpleNamespace(on_close=lambda ending: None))
    )
    ExitHooks(run).install_hooks()
    registered[0]()
    assert capsys.readouterr().err == "paceline.errors.Mismatch: workers have come apart\n"


INTERRUPTED = """
import os, signal
with pl.start(folder="runs") as run:
    if rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    while True:
        run.mean(1.0)
"""


@pytest.mark.slow
def test_ctrl_c_shows_no_insides(job: Jobs) -> None:
    ended = job.run(INTERRUPTED, 2).end()
    assert (
        ended.code == 130
        and "paceline/comm" not in ended.err
        and "KeyboardInterrupt" not in ended.err
    ), ended.err


@pytest.mark.slow
def test_a_strategy_that_does_not_exist(job: Jobs) -> None:
    ended = job.run('pl.start(sync="AlReduce()")', 1).end()
    assert ended.code == 1 and "paceline.errors.NotationError: AlReduce" in ended.err, ended.err
    assert "paceline/session" not in ended.err and "paceline/notation" not in ended.err
