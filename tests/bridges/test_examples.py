"""The examples of bridges run as their first lines say, and learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.jobs import Ended, Jobs
from tests.harness.sources import code_lines

EXAMPLES = Path(__file__).parents[2] / "examples" / "bridges"
LINES = 80


def run(job: Jobs, name: str, workers: int, *arguments: str) -> Ended:
    ended = job.program(EXAMPLES / name, workers, args=arguments).end()
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.parametrize("workers", [1, 3])
def test_accelerate_loop(workers: int, job: Jobs) -> None:
    ended = run(job, "accelerate_loop.py", workers, "AllReduce(codec=bfloat16())")
    right = re.findall(r"epoch (\d): (\S+) of 200", ended.out)
    assert [number for number, _ in right] == [str(number) for number in range(10)]
    assert float(right[-1][1]) > 0.7  # half of them by chance
    assert (job.folder / "state" / "model.safetensors").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_transformers_trainer(workers: int, job: Jobs) -> None:
    ended = run(job, "transformers_trainer.py", workers)
    ((steps, loss),) = re.findall(r"(\d+) steps, loss (\S+)", ended.out)
    assert int(steps) == (57, 30)[workers - 1] and float(loss) < 0.5


@pytest.mark.parametrize("name", ["accelerate_loop.py", "transformers_trainer.py"])
def test_examples_are_short(name: str) -> None:
    assert len(code_lines((EXAMPLES / name).read_text())) < LINES
