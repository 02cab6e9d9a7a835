"""The script that `planner_memory.py` plans and runs: a GPT or a U-Net that steps by `run.step`.

paceline plan benchmarks/planned_cuts.py --workers 2 -- --model gpt --batch 16
"""

from __future__ import annotations

import argparse
import fnmatch
import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.apps.gpt import GPT, MEDIUM, SMALL, next_token_loss
from paceline.apps.unet import UNet, UNetShape
from paceline.parallel.pipelining.batches import Loss

SAMPLES = 512


def make_task(name: str) -> tuple[nn.Module, Loss, TensorDataset]:
    """Make a model, its loss and its data."""
    torch.manual_seed(0)
    if name == "unet":
        data = TensorDataset(torch.randn(SAMPLES, 4, 32, 32), torch.randn(SAMPLES, 1, 32, 32))
        return UNet(UNetShape(width=32, levels=2)), F.mse_loss, data
    shape = MEDIUM if name == "gpt" else SMALL
    tokens = torch.randint(0, shape.vocab, (SAMPLES, shape.context + 1))
    return GPT(shape), next_token_loss, TensorDataset(tokens[:, :-1], tokens[:, 1:])


def checkpoint_layers(model: nn.Module, patterns: list[str]) -> None:
    """Put the layers that patterns name into activation checkpoints."""
    for name, module in model.named_modules():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt", choices=["gpt", "gpt-small", "unet"])
    parser.add_argument("--batch", type=int, default=16, help="samples of a step of all workers")
    parser.add_argument("--checkpoint", nargs="*", default=[], help="layers, as patterns")
    options = parser.parse_args()
    with pl.start(trace="off") as run:
        model, loss, data = make_task(options.model)
        checkpoint_layers(model, options.checkpoint)
        loader = DataLoader(data, batch_size=options.batch)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for _ in run.epochs(1000):
            for x, y in loader:
                run.step(model, x, y, loss=loss)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
