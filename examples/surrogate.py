"""A U-Net learns to replace a solver.

Run it with `paceline run --workers 2 --cut 'shard(("down.*", "up.*"))' examples/surrogate.py`.

The solver computes a dye in a flow on a periodic square, du/dt + v . grad u = kappa * laplace u.
Samples are solved when a worker reads them: there are no files, and no sample comes twice.
`python -m paceline.apps.surrogate` is the whole program. With its defaults (200 steps of 32
samples, a grid of 32 x 32) the relative error is 0.173. It is 1.042 for the guess that nothing
changes, and 0.101 for the solver on half the grid with half the number of steps.
"""

import torch

import paceline as pl
from paceline.apps.advection import Advection, SolvedSamples, compute_relative_errors
from paceline.apps.unet import UNet, UNetShape

torch.manual_seed(0)
# The modules are enter, down.*, middle, up.*, leave. Skips lead from down.* to up.*.
model = UNet(UNetShape(width=8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# Samples are solved when they are read.
loader = SolvedSamples(Advection(grid=32, time=0.25), seed=0, first=0, count=60 * 16).make_loader(
    16
)

with pl.start() as run:
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    # `given` is a dye, a flow and a diffusivity. `after` is the dye some time later.
    for given, after in loader:
        errors = compute_relative_errors(model(given), after)
        loss = errors.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss, error=errors.mean())  # about 1.0 for the guess that nothing changes
