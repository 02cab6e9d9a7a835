"""What a run says when it has ended: where its folder is, and what came of it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.record.folder import RunTotals
from paceline.record.summary import describe_result


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(steps: int, **options: str) -> None:
    with pl.start(name="mine", device="cpu", **options) as run:  # type: ignore[arg-type]
        model = nn.Linear(2, 1)
        data = TensorDataset(torch.ones(4 * max(steps, 1), 2))
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_size=4)
        )
        for _ in run.epochs(min(steps, 1)):
            for (x,) in loader:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)


def test_where_its_folder_is(capsys: pytest.CaptureFixture[str]) -> None:
    train(3)
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"paceline: runs/mine: 3 steps, loss \d\S*, \d+\.\d s; paceline report runs/mine", said[-1]
    ), said
    assert len([line for line in said if "paceline report" in line]) == 1


def test_nothing_of_a_run_without_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    train(0)
    assert "paceline report" not in capsys.readouterr().err


def test_nothing_of_a_folder_that_goes_with_who_made_it(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(1, folder=folder)
    assert "paceline report" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "steps", "loss", "seconds", "line"),
    [
        ("runs/a", 1, None, 0.04, "runs/a: 1 step, 0.0 s; paceline report runs/a"),
        (
            "runs/a",
            96,
            1.23456,
            4.52,
            "runs/a: 96 steps, loss 1.235, 4.5 s; paceline report runs/a",
        ),
        (
            "runs/a b",
            12_000,
            float("nan"),
            3723.0,
            "runs/a b: 12,000 steps, loss nan, 1:02:03; paceline report 'runs/a b'",
        ),
    ],
)
def test_in_words(name: str, steps: int, loss: float | None, seconds: float, line: str) -> None:
    assert describe_result(Path(name), RunTotals(steps, steps, seconds, None, loss, {}, [])) == line
