"""A small training whose result is known: by a plain torch loop, and by the same loop with paceline
in it.

As a script of many workers it runs the cases of a JSON file, one run for each, and leaves what came
out beside it.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, EPOCHS = 251, 64, 2  # two epochs of four batches, the last one of 59


class Case(NamedTuple):
    """One training: the strategy, the shares (None: equal), the optimizer ("sgd" in float32,
    "adam" in float64), batch norm, a mutant.
    """

    via: str = "auto"
    shares: list[float] | None = None
    optimizer: str = "sgd"
    norm: bool = False
    mutant: str | None = None


class Curve(NamedTuple):
    """What came out: the weights as one vector, and the losses."""

    weights: Tensor
    losses: list[float]


def make(case: Case) -> tuple[nn.Module, Optimizer, DataLoader[Any]]:
    """The model, its optimizer and the loader, the same wherever this is called."""
    dtype = torch.float64 if case.optimizer == "adam" else torch.float32
    numbers = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 8, generator=numbers, dtype=torch.float64)
    data = TensorDataset(x.to(dtype), (x[:, :3].sin() + x[:, 3:6]).to(dtype), torch.arange(SAMPLES))
    torch.manual_seed(11)
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if case.norm else []
    model = nn.Sequential(nn.Linear(8, 16), *middle, nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if case.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return (
        model,
        optimizer,
        DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)),
    )


def vector(model: nn.Module) -> Tensor:
    """All parameters and float buffers as one vector."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return torch.cat([x.detach().reshape(-1).to(torch.float64) for x in tensors])


def plain(case: Case) -> Curve:
    """The loop as it is without paceline."""
    return _plain(case.optimizer, case.norm)


@cache
def _plain(optimizing: str, norm: bool) -> Curve:
    model, optimizer, loader = make(Case(optimizer=optimizing, norm=norm))
    losses = []
    for _ in range(EPOCHS):
        for x, y, _ids in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return Curve(vector(model), losses)


def together(case: Case, name: str, folder: Path) -> None:
    """The loop with paceline in it; each worker leaves its weights and the samples that it has
    seen in `folder`.
    """
    import paceline as pl

    if case.mutant is not None:
        MUTANTS[case.mutant]()
    # or the comparison of replicas would find it first
    compare = "auto" if case.mutant is None else None
    with pl.start(
        sync=pl.AllReduce(via=case.via), name=name, folder=str(folder / "runs"), compare=compare
    ) as run:
        model, optimizer, loader = run.prepare(*make(case), shares=case.shares)
        seen: list[list[int]] = []
        for _ in run.epochs(EPOCHS):
            seen.append([])
            for x, y, ids in loader:
                seen[-1] += ids.tolist() if run.weight else []
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
        torch.save({"weights": vector(model), "seen": seen}, folder / f"{name}.{run.rank}.pt")


def _silent() -> None:
    from paceline.comm.group_protocol import FinishedWork
    from paceline.sync.routes import GroupReducer

    GroupReducer.all_reduce = lambda self, flat, name, **_: FinishedWork(flat)  # type: ignore[method-assign, assignment]


def _unweighted() -> None:
    from paceline.data.loader import ShareLoader

    turn = ShareLoader._make_turn

    def equal(self: ShareLoader, *args: Any) -> Any:
        now, held = turn(self, *args)
        now.scale = 1.0 / self.terms.agreement.group.size
        return now, held

    ShareLoader._make_turn = equal  # type: ignore[method-assign]


MUTANTS = {"doesn't communicate": _silent, "averages without weights": _unweighted}


def check(case: Case, name: str, folder: Path, size: int) -> float:
    """Check samples, losses and that all workers have the same bits; gives the distance of the
    weights from the plain loop's.
    """
    want = plain(case)
    found = [torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in range(size)]
    for epoch in range(EPOCHS):
        seen = sorted(number for each in found for number in each["seen"][epoch])
        assert seen == list(range(SAMPLES)), f"{name}: samples of epoch {epoch}"
    if case.mutant is None:
        assert all(torch.equal(each["weights"], found[0]["weights"]) for each in found), (
            f"{name}: workers have different weights"
        )
        lines = [
            json.loads(line)
            for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        ]
        losses = [line["loss"] for line in lines]
        assert len(losses) == len(want.losses)
        assert max(abs(a - b) for a, b in zip(losses, want.losses, strict=True)) < 1e-3, (
            f"{name}: another loss curve"
        )
    return float((found[0]["weights"] - want.weights).norm() / want.weights.norm())


def main() -> None:
    """Run the cases of the file that is named first on the command line."""
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    for name, values in json.loads(path.read_text()).items():
        together(Case(*values), name, path.parent)


if __name__ == "__main__":
    main()
