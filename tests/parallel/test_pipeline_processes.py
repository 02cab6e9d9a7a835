"""Pipelines of real processes: they end where one process does, say in one line what is wrong, and leave nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.jobs import Jobs
from tests.harness.pipelines import trained
from tests.harness.runs import alone

TRAINING = """
from tests.harness.pipelines import LAYERS, trained
from paceline.parallel.pipeline import pipeline

with pl.start() as run:
    cut = pipeline(LAYERS, schedule=sys.argv[1], micro_batches=4)
    losses, parameters, _ = trained(cut)(run)
    torch.save((losses, parameters), f"rank{run.rank}.pt")
"""


@pytest.mark.preloaded
@pytest.mark.parametrize(
    ("workers", "mesh", "schedule"),
    [(2, "stage=2", "1f1b"), (2, "stage=2", "zero-bubble"), (4, "data=2, stage=2", "1f1b"), (1, "stage=1", "1f1b")],
)
def test_processes_end_where_one_does(job: Jobs, tmp_path: Path, workers: int, mesh: str, schedule: str) -> None:
    ended = job.run(TRAINING, workers, "--mesh", mesh, args=(schedule,)).end()
    assert ended.code == 0, ended.err
    losses, wanted, _ = alone(trained(None))
    for rank in range(workers):
        mine, parameters = torch.load(tmp_path / f"rank{rank}.pt")
        assert mine == pytest.approx(losses, rel=1e-9)
        assert float((parameters - wanted).abs().max()) < 1e-9
