"""Train under Ray Train, which changes the number of workers while training goes on.

Run it with `python examples/bridges/ray_train.py --workers 2 4`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from paceline.bridges.ray import PacelineConfig


def train(options: dict[str, Any]) -> None:
    """Train a model that tells points inside a circle from points outside of it."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl

    torch.manual_seed(0)  # all workers, and all groups of workers, make the same data
    points = torch.rand(4096, 2) * 2 - 1
    inside = (points.norm(dim=1) < 0.8).long()
    loader = DataLoader(TensorDataset(points, inside), batch_size=64, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with pl.start() as run:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for _ in run.epochs(options["epochs"]):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
            run.save(background=True)  # for workers that die; before Ray resizes, it saves anyway


def main() -> None:
    """Read the options, and let Ray train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2), help="least and most")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", type=Path, default=Path("ray-runs"))
    args = parser.parse_args()
    least, most = args.workers
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        torch_config=PacelineConfig(sync="AllReduce(codec=bfloat16())"),
        scaling_config=ScalingConfig(num_workers=(least, most) if least < most else least),
        run_config=RunConfig(name="circle", storage_path=str(args.storage.absolute())),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
