"""Pipelines of real processes: they end where one process does, say in one line what is wrong,
and leave nothing.
"""

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


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    ("workers", "mesh", "schedule"),
    [
        (2, "stage=2", "zero-bubble"),
        (4, "data=2, stage=2", "1f1b"),
        (1, "stage=1", "1f1b"),
        (2, "stage=2", "1f1b"),
    ],
)
def test_processes_end_where_one_does(
    job: Jobs, tmp_path: Path, workers: int, mesh: str, schedule: str
) -> None:
    ended = job.run(TRAINING, workers, "--mesh", mesh, args=(schedule,)).end()
    assert ended.code == 0, ended.err
    losses, wanted, _ = alone(trained(None))
    for rank in range(workers):
        mine, parameters = torch.load(tmp_path / f"rank{rank}.pt")
        assert mine == pytest.approx(losses, rel=1e-9)
        assert float((parameters - wanted).abs().max()) < 1e-9


DROPOUT = """
import signal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

class Halved(nn.Module):  # no attribute says that it draws
    def __init__(self):
        super().__init__()
        self.masks = []

    def forward(self, x):
        return checkpoint(self.drop, x, use_reentrant=False)

    def drop(self, x):
        self.masks.append(F.dropout(torch.ones_like(x), 0.5))
        return torch.tanh(x * self.masks[-1])

halved = Halved()
model = nn.Sequential(nn.Linear(4, 8), halved, nn.Linear(8, 4)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
x = torch.arange(160, dtype=torch.float64).view(40, 4).sin()
with pl.start(name=sys.argv[1]) as run:
    cut = pl.pipeline("0, 1, 2", schedule="zero-bubble", micro_batches=2, split=[1, 2])
    loader = DataLoader(TensorDataset(x, x.cos()), batch_size=8, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader, cut=cut)
    run.resume()
    for _ in run.epochs(2):
        for a, b in loader:
            optimizer.zero_grad()
            loss = run.step(model, a, b, loss=F.mse_loss)
            optimizer.step()
            kinds = {tuple(mask.flatten().tolist()) for mask in halved.masks}  # of two micro-batches, which are run again in backward
            assert (len(kinds), len(halved.masks) >= 4) == ((2, True) if rank == 1 else (0, False)), (len(kinds), len(halved.masks))
            halved.masks.clear()
            print(rank, run.steps, float(loss).hex(), float(torch.rand(())).hex(), flush=True)
            if run.steps == 5:
                run.save()
            if run.steps == 7 and rank == 1 and sys.argv[2] == "dies" and not os.path.exists("again"):
                open("again", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
"""  # noqa: E501


def test_a_pipeline_that_starts_again_draws_and_loses_what_one_does_that_did_not(job: Jobs) -> None:
    # the last stage alone has dropout, in layers that are run again for both halves of a backward;
    # scripts draw equal numbers everywhere
    whole = job.run(DROPOUT, 2, "--mesh", "stage=2", args=("whole", "lives")).end()
    assert whole.code == 0, whole.err
    killed = job.run(
        DROPOUT, 2, "--mesh", "stage=2", "--restarts", "1", args=("killed", "dies")
    ).end()
    assert killed.code == 0, killed.err
    wanted, again = (
        [line.partition("] ")[2] for line in ended.out.splitlines() if line.startswith("[")]
        for ended in (whole, killed)
    )
    first, second = (
        [line.partition(" ")[2] for line in sorted(wanted) if line.startswith(rank)]
        for rank in "01"
    )
    assert first == second and len(set(first)) == 10
    assert set(again) == set(wanted) and len(again) > len(wanted)
