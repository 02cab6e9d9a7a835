"""A pipeline whose stages are on two hosts: what goes between them is activations and their
gradients, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.lab.hosts import Cluster

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl

def sent():
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(words[9]) for words in lines if words[0] != "lo:")

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 500), nn.Linear(500, 8)
    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

torch.manual_seed(0)
x = torch.randn(8000, 8)
model = Deep()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, x.sin()), batch_size=2000)
with pl.start(seed=1, folder=sys.argv[1], name="test") as run:
    model, opt, loader = run.prepare(model, opt, loader, cut=pl.pipeline("first, second", micro_batches=4))
    marks = []
    for _ in run.epochs(1):
        for a, b in loader:
            marks.append(sent())
            opt.zero_grad()
            loss = run.step(model, a, b, loss=F.mse_loss)
            opt.step()
            run.log(loss=loss)
        marks.append(sent())
    print(json.dumps([run.rank, marks]), flush=True)
"""  # noqa: E501


def test_activations_and_their_gradients_are_all_that_goes_between_hosts(
    build: Callable[..., Cluster], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    outcome = build(hosts=2, workers=1, bandwidth="1gbit").run(
        tmp_path / "train.py", str(tmp_path), deadline=200, mesh="stage=2"
    )
    assert outcome.code == 0, outcome.output
    assert "mesh stage=2 (stage between hosts)" in outcome.output
    said = [
        json.loads(line.partition("] ")[2])
        for line in outcome.output.splitlines()
        if line.partition("] ")[2].startswith("[")
    ]
    assert sorted(rank for rank, _ in said) == [0, 1]
    # one sends what the first layer makes of a batch, the other as many gradients
    for _, marks in said:
        assert [
            (end - start) / (2000 * 500 * 4) for start, end in pairwise(marks)
        ] == pytest.approx([1.01] * 4, abs=0.01)
