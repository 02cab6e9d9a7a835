"""The script that `planner_lab.py` plans and runs: a model of the benchmarks in a plain loop.

paceline plan benchmarks/planned_script.py --workers 2 -- --model gpt-0.9m --batch 24
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import build

import paceline as pl

SAMPLES = 4096


def make_mlp() -> tuple[nn.Module, nn.Module, TensorDataset]:
    """Make a multilayer perceptron of 25 M parameters, its loss and its data."""
    torch.manual_seed(0)
    sizes = (1024, 3072, 4096, 2048, 10)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    data = TensorDataset(torch.randn(SAMPLES, sizes[0]), torch.randint(0, 10, (SAMPLES,)))
    return nn.Sequential(*layers[:-1]), nn.CrossEntropyLoss(), data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-0.9m", help="gpt-19m, gpt-0.9m, cnn, tiny or mlp")
    parser.add_argument("--batch", type=int, default=24, help="samples of a step of all workers")
    options = parser.parse_args()
    with pl.start(trace="off") as run:
        model, loss, data = make_mlp() if options.model == "mlp" else build(options.model)
        loader = DataLoader(data, batch_size=options.batch)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for _ in run.epochs(1000):
            for x, y in loader:
                loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
