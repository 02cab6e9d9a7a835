"""A script that trains on servers, with places for what else it does, and the weights that it
leaves.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.harness.jobs import Jobs

TRAIN = """
from paceline.servers.worker.strategy import ParameterServer

torch.manual_seed(1)
x = torch.randn(160, 8, dtype=torch.float64)
model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 100), nn.Linear(100, 3)).double()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
with pl.start({sync}, name="{name}", folder="runs") as run:
    loader = DataLoader(TensorDataset(x, x[:, :3].sin()), 8, shuffle=True, num_workers={readers})
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in run.epochs({epochs}):
        for a, b in loader:
            loss = ((model(a) - b) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            time.sleep({nap})
            {after}
    if run.is_first:
        torch.save(torch.nn.utils.parameters_to_vector(model.parameters()).detach(), "{name}.pt")
"""


def script(
    name: str, sync: str = "ParameterServer(servers=3, bucket_mb=0.05)", **parts: Any
) -> str:
    return TRAIN.format(
        **(
            {"name": name, "sync": sync, "readers": 0, "epochs": 1, "nap": 0, "after": "pass"}
            | parts
        )
    )


def weights(job: Jobs, name: str) -> torch.Tensor:
    return torch.load(job.folder / f"{name}.pt")
