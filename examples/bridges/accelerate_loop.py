"""An Accelerate script on paceline: the batch size is that of one process.

Run it with `paceline run --workers 2 examples/bridges/accelerate_loop.py`.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.bridges.accelerate import PacelineAccelerator

sync = sys.argv[1] if len(sys.argv) > 1 else "AllReduce()"
accelerator = PacelineAccelerator(gradient_accumulation_steps=2, sync=sync)

torch.manual_seed(0)
x = torch.randn(1000, 16)
data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
train, test = torch.utils.data.random_split(data, [800, 200])
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
# Accelerate steps a schedule once for each process.
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10 * 800 // (2 * 24))
model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
    model,
    optimizer,
    DataLoader(train, batch_size=24, shuffle=True),
    DataLoader(test, batch_size=64),
    scheduler,
)

for epoch in range(10):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = []
    for x, y in test_loader:
        with torch.no_grad():
            guesses, labels = accelerator.gather_for_metrics((model(x).argmax(1), y))
        right.append(guesses == labels)
    accelerator.print(f"epoch {epoch}: {torch.cat(right).float().mean():.3f} of 200 are right")
    accelerator.save_state("state")

accelerator.end_training()
