"""`paceline bench training`: its model, its words, and that it runs alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from paceline.bench import training
from paceline.errors import UsageError
from tests.harness import nursery


def test_sizes() -> None:
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in training.Decoder(*shape).parameters())
            for name, shape in training.MODELS.items()
        }
    assert {name: round(size / 1e6, 1) for name, size in sizes.items()} == {
        "small": 0.9,
        "medium": 19.2,
    }


def test_the_model_looks_back_only() -> None:
    model = training.Decoder(16, 1, 2).eval()
    x = torch.zeros(1, training.CONTEXT, dtype=torch.int64)
    changed = x.clone()
    changed[0, 9] = 1
    before, after = model(x), model(changed)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6) and not torch.allclose(
        before[:, 9], after[:, 9]
    )


def test_words() -> None:
    said = training.format_measurements("small", [0.030, 0.020, 0.010], [0.016, 0.016, 0.016], 10)
    assert (
        "20.00 ms" in said and "16.00 ms" in said and "4.00 ms   (25.0%)" in said and " 500" in said
    )


@pytest.mark.slow
def test_the_script_alone(tmp_path: Path) -> None:
    answer = nursery.run_script(
        Path(training.__file__), tmp_path, "--folder", str(tmp_path), "--batch", "1", "--steps", "3"
    )
    assert answer.returncode == 0, answer.stderr
    assert "the exchange adds" in answer.stdout and "3 steps of 1 samples" in answer.stdout


@pytest.mark.parametrize("words", [("--model", "smal"), ("--steps", "1"), ("--batch", "0")])
def test_mistakes(monkeypatch: pytest.MonkeyPatch, words: tuple[str, str]) -> None:
    monkeypatch.setattr(sys, "argv", ["training.py", *words])
    with pytest.raises(UsageError, match=f"{words[0]} {words[1]}"):
        training.main()
