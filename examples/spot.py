"""Trains on machines that may be taken away.

Run it with `paceline run --workers 3 --min-workers 1 --restarts 3 examples/spot.py --interrupt 20`.

Training goes on while one worker is alive. A worker that is started again enters between two steps,
and so does another host that runs the same line with --join. The script has no code for that:
samples, steps and weights are the same as in a run without losses. Checkpoints help if all workers
end at once. `--interrupt 20` kills one worker after 20 steps, as a provider would do it.
"""

import argparse
import os
import signal

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument(
    "--interrupt", type=int, default=None, help="kill one worker after this number of steps, once"
)
options = parser.parse_args()

torch.manual_seed(0)
points = torch.rand(4096, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()
loader = DataLoader(TensorDataset(points, inside), batch_size=64, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

# The next run finds the checkpoints of this one by its name.
with pl.start(name="spot") as run:
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    run.resume()  # if an earlier run has left a checkpoint
    for _ in run.epochs(2):
        for x, y in loader:
            if run.steps == options.interrupt and run.size == 3 and run.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            if (run.steps + 1) % 50 == 0:
                run.save(background=True)
    run.save()
