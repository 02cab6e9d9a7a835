"""The script of the README: `python examples/train.py` alone, `paceline run --workers 2
examples/train.py` with two workers.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

torch.manual_seed(0)
points = torch.rand(4096, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()  # is a point inside the circle?
# 64 samples in a step, of all workers together
loader = DataLoader(TensorDataset(points, inside), batch_size=64, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with pl.start() as run:  # joins whatever started this process; started alone, it is one worker
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(3):
        for x, y in loader:  # my share of each global batch
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # gradients leave while backward runs, and are final when it returns
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)  # never waits; the mean over workers, weighted by samples
