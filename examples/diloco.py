"""Trains on machines that are far apart (DiLoCo, Douillard et al. 2023).

Run it with `paceline lab run wan-100m examples/diloco.py`.

Each worker takes 8 steps by itself. Then the changes of all workers are averaged, in 8 bits, and an
outer optimizer with momentum steps by their mean. The slow link carries a small part of the bytes
that plain data parallelism would send, and the loop stays the same.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline import int8, nesterov

torch.manual_seed(0)
# A fixed network, whose answers the model learns.
teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).requires_grad_(False)
questions = torch.randn(8192, 16)
loader = DataLoader(TensorDataset(questions, 3 * teacher(questions)), batch_size=128, shuffle=True)
model = nn.Sequential(
    nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with pl.start(sync=pl.LocalSGD(every=8, outer=nesterov(0.7, 0.9), codec=int8())) as run:
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(3):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()  # a step of this worker's own model
            optimizer.zero_grad()
            run.log(loss=loss)
    # All workers have the same model after the last round.
    error = F.mse_loss(run.forward(model, questions).cpu(), 3 * teacher(questions)).item()
    run.results["error"] = error
    run.print(
        f"error {error:.3f}, variance {(9 * teacher(questions).var()).item():.3f}; "
        "`paceline report` shows how many bytes went over the link"
    )
