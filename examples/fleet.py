"""Vehicles that learn together: `paceline run --workers 3 examples/fleet.py`.

Each vehicle drives in a region of its own, and keeps what it sees there. Only the changes of the
model travel. A round closes when two of three vehicles have answered and the grace window is over,
or at once when all have. A late vehicle's work is in the next round. `--slow 1` slows vehicle 1
down; `--rounds diloco` gives the rounds momentum.
"""

import argparse
import math
import time

import torch
from torch.nn import functional as F

import paceline as pl

BATCH, STEPS = 96, 600  # samples of all vehicles together, and batches of them

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", choices=["fedavg", "diloco"], default="fedavg")
parser.add_argument("--slow", type=int, default=-1, help="rank of a slow vehicle")
options = parser.parse_args()

rounds = {
    "fedavg": pl.LocalSGD(8, quorum=0.6, grace_seconds=0.05),
    "diloco": pl.LocalSGD(8, outer=pl.nesterov(0.7, 0.5), quorum=0.6, grace_seconds=0.05),
}


def look_around(count, generator, regions, region):
    """Points in one region of the map, a sector, and whether they are inside of a flower."""
    angle = (torch.rand(count, generator=generator) + region) * 2 * math.pi / regions
    radius = torch.rand(count, generator=generator)
    inside = radius < 0.5 + 0.25 * torch.sin(3 * angle)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), inside.long()


torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()
).append(torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with pl.start(sync=rounds[options.rounds]) as run:
    generator = torch.Generator().manual_seed(run.rank)
    points, inside = look_around(2000, generator, run.size, run.rank)  # what this vehicle has seen
    turns = pl.own_batches(BATCH, steps=STEPS)
    model, optimizer, turns = run.prepare(model, optimizer, turns)
    for share in turns:  # the next turn of this vehicle, when it is ready
        rows = torch.randint(len(points), (len(share),), generator=run.generator)
        loss = F.cross_entropy(model(points[rows]), inside[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        if run.rank == options.slow:
            time.sleep(0.1)
    # After the loop all vehicles have the same model. Each tries it on the whole map.
    points, inside = look_around(3000, torch.Generator().manual_seed(99), 1, 0)
    with torch.no_grad():
        accuracy = run.mean((model(points).argmax(1) == inside).double().mean().item())
    run.results["accuracy"] = accuracy
    run.print(f"accuracy on the whole map: {accuracy:.3f}")
