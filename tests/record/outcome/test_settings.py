"""Settings are plain data of what was asked for, without what is secret."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.record.outcome.settings import hide_secrets, read_hyperparameters
from paceline.session.run import Run
from tests.harness.runs import batches, workers


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--lr", "0.1", "data"], ["--lr", "0.1", "data"]),
        (["--api-key", "abc", "--lr=1"], ["--api-key", "...", "--lr=1"]),
        (["--hf_token=abc", "-v"], ["--hf_token=...", "-v"]),
        (["--password", "--lr", "1"], ["--password", "--lr", "1"]),
    ],
)
def test_secrets_stay_out(arguments: list[str], found: list[str]) -> None:
    assert hide_secrets(arguments) == found


def test_optimizers() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    found = read_hyperparameters(
        torch.optim.AdamW(parameters, lr=torch.tensor(0.5), betas=(0.8, 0.9))
    )
    assert found == {
        "name": "AdamW",
        "lr": 0.5,
        "betas": [0.8, 0.9],
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    assert read_hyperparameters(torch.optim.SGD(parameters, lr=1))["lr"] == 1.0


def test_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/train.py", "--lr", "0.01"])

    def body(run: Run) -> None:
        model = nn.Linear(6, 2).double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), batches())

    workers(2, body, folder=tmp_path)
    found = json.loads((tmp_path / "test" / "summary.json").read_text())["settings"]
    assert {
        name: found[name]
        for name in ("script", "arguments", "parameters", "dtypes", "device", "batch")
    } == {
        "script": "train.py",
        "arguments": ["--lr", "0.01"],
        "parameters": 14,
        "dtypes": ["float64"],
        "device": "cpu",
        "batch": batches().batch_size,
    }
    assert found["optimizers"][0]["lr"] == 0.01
    assert found["torch"] == torch.__version__
    assert "straggler" not in found and "cut" not in found
