"""The script of the README, for one worker or several.

Run it with `python examples/train.py`, or with `paceline run --workers 2 examples/train.py`. It
learns whether a point is inside of a circle.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

torch.manual_seed(0)
points = torch.rand(4096, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()  # is the point inside of the circle?
# A step has 64 samples, of all workers together.
loader = DataLoader(TensorDataset(points, inside), batch_size=64, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with pl.start() as run:  # joins the other workers; without a launcher it is one worker
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(3):
        for x, y in loader:  # this worker's share of each global batch
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # gradients are exchanged meanwhile, and are final when it returns
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)  # never waits; logs the mean over workers, weighted by samples
