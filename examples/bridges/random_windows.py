"""A script without a DataLoader: `paceline run --workers 2 examples/bridges/random_windows.py`.

As in nanoGPT, each batch is drawn at random from one long text. The losses are the same with any
number of workers.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl

CONTEXT, BATCH, STEPS = 16, 32, 200

text = Path(argparse.__file__).read_text()  # replace it by your own text
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
train_data, val_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def get_batch(data, share):
    # Every worker draws the numbers of the whole batch, and keeps those of its own rows.
    ix = share.draw(
        lambda generator: torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
    )
    return torch.stack([data[i : i + CONTEXT] for i in ix]), data[ix + CONTEXT]


torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(len(letters), 16), nn.Flatten(), nn.Linear(16 * CONTEXT, len(letters))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with pl.start() as run:
    batches, val_batches = pl.own_batches(BATCH, steps=STEPS), pl.own_batches(BATCH, steps=10)
    model, optimizer, batches, val_batches = run.prepare(model, optimizer, batches, val_batches)
    for share in batches:  # this worker's share of each global batch
        x, y = get_batch(train_data, share)
        loss = F.cross_entropy(model(x.to(run.device)), y.to(run.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    with torch.no_grad():
        losses = []
        for share in val_batches:
            x, y = get_batch(val_data, share)
            losses.append(run.mean(F.cross_entropy(model(x.to(run.device)), y.to(run.device))))
    run.results["validation"] = sum(losses).item() / len(losses)
    run.print(f"validation: {run.results['validation']:.4f}")
