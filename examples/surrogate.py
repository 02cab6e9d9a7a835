"""A U-Net learns to do what a solver does: `paceline run --workers 2 --cut 'shard(("down.*",
"up.*"))' examples/surrogate.py`.

The solver computes a dye in a flow on a periodic square, du/dt + v . grad u = kappa * laplace u.
Samples are solved when a worker reads them: there are no files, and no sample comes twice. `python
-m paceline.apps.surrogate` is the whole program. With its defaults (200 steps of 32 samples, a grid
of 32 x 32) the relative error is 0.173, of a guess that nothing changes 1.042, and of the solver on
half the grid with half the steps 0.101.
"""

import torch

import paceline as pl
from paceline.apps.advection import Advection, SolvedSamples, compute_relative_errors
from paceline.apps.unet import UNet, UNetShape

torch.manual_seed(0)
# enter, down.*, middle, up.*, leave; skips lead from each level down to its other side
model = UNet(UNetShape(width=8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# solved as they are read
loader = SolvedSamples(Advection(grid=32, time=0.25), seed=0, first=0, count=60 * 16).make_loader(
    16
)

with pl.start() as run:
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    # a dye, a flow and a diffusivity; and where the dye is after the time
    for given, after in loader:
        errors = compute_relative_errors(model(given), after)
        loss = errors.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss, error=errors.mean())  # 1.0 if it says that nothing changes
