"""Blocks of the pages about bridges, and their examples, with the libraries that they need."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import documents as pages
from tests.harness.jobs import PRELOADED, ROOT, Jobs

pytestmark = pytest.mark.bridges
HERE = "needs a library of the bridges, which tests/bridges runs"
PATIENT = 240.0  # seconds: each worker imports a large library


@pytest.fixture(autouse=True)
def no_backend_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the choice to the scripts: the tests of Keras have set a backend for themselves."""
    monkeypatch.delenv("KERAS_BACKEND", raising=False)


def list_blocks() -> list[Any]:
    """Pages with blocks that only these tests run."""
    return [
        pytest.param(page, id=pages.name(page))
        for page in pages.PAGES
        if any(block.marked == ("not run", HERE) for block in pages.blocks(page))
    ]


@pytest.mark.parametrize("page", list_blocks())
def test_blocks_run(job: Jobs, page: Path) -> None:
    for block in pages.blocks(page):
        if block.marked != ("not run", HERE):
            continue
        if block.language == "python":
            assert block.name, f"{block.body}\nsay as what it is saved"
            (job.folder / block.name).write_text(block.body)
        for line in block.commands:
            words = shlex.split(line)
            if words[0] == "pip":
                continue  # tests/test_packaging.py looks at the extras
            assert words[0] == "paceline", line
            ended = job.start([sys.executable, *PRELOADED, *words[1:]]).end(PATIENT)
            assert ended.code == 0, ended


def test_the_example_of_keras_goes_on_with_another_number_of_workers(job: Jobs) -> None:
    """Two epochs in one process, or one with two workers and another with three."""
    whole = read_losses(job, 1, epochs=2, folder="whole")
    begun = read_losses(job, 2, epochs=1, folder="parts")
    rest = read_losses(job, 3, epochs=2, folder="parts")
    assert len(whole) == 2 and [*begun, *rest] == pytest.approx(whole, abs=1e-4)


def read_losses(job: Jobs, workers: int, *, epochs: int, folder: str) -> list[float]:
    """Run the example in a folder, and read the losses that it prints."""
    (job.folder / folder).mkdir(exist_ok=True)
    command = f"cd {folder} && exec {sys.executable} -m paceline run --workers {workers}"
    path = ROOT / "examples" / "bridges" / "keras_fit.py"
    line = f"{command} {path} --samples 500 --epochs {epochs}"
    ended = job.start(["bash", "-c", line]).end(PATIENT)
    assert ended.code == 0, ended
    return [float(loss) for loss in re.findall(r"\d\.\d{5}\b", ended.out)]


def test_the_example_of_tensorflow_has_the_same_losses(job: Jobs) -> None:
    path = ROOT / "examples" / "bridges" / "tensorflow_tape.py"
    losses = []
    for workers in (1, 2, 3):
        ended = job.program(path, workers).end(PATIENT)
        assert ended.code == 0, ended
        losses.append([float(loss) for loss in re.findall(r"loss (\d\.\d{5})\b", ended.out)])
    assert len(losses[0]) == 3 and losses[0][0] > losses[0][2] + 0.1
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[2] == pytest.approx(losses[0], abs=1e-4)
