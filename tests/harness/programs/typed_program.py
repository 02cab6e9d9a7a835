"""A program as somebody writes it who has types checked: mypy is to find that each thing is what
it was. Nobody runs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, assert_type

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline import lab


class Net(nn.Module):
    """A model of the program's own."""

    width = 3

    def forward(self, x: Tensor) -> Tensor:
        return x


Pair = tuple[Tensor, ...]


def count(batches: Iterable[Pair]) -> int:
    return sum(len(batch) for batch in batches)


def objects() -> tuple[Net, SGD, DataLoader[Pair]]:
    net = Net()
    return (
        net,
        SGD(net.parameters(), 0.1),
        DataLoader(TensorDataset(torch.zeros(4, 3), torch.zeros(4)), batch_size=2),
    )


def training() -> None:
    model, optimizer, loader = objects()
    with pl.start(
        sync=pl.AllReduce(via="ring"), trace="off", straggler="warn", compare=None, on_nan="stop"
    ) as run:
        assert_type(run, pl.Run)
        model, optimizer, loader = run.prepare(model, optimizer, loader, batchnorm="local")
        assert_type(model, Net)
        assert_type(optimizer, SGD)
        known: DataLoader[Pair] = loader
        for epoch in run.epochs(3):
            assert_type(epoch, int)
            for x, y in loader:
                assert_type(loader.peek(), Any)
                loss = run.step(model, x, y, loss=F.cross_entropy)
                assert_type(loss, Tensor)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
            assert_type(run.mean(loss), Tensor)
            assert_type(run.mean(0.5, weight=3.0), float)
            assert_type(run.gather(loss), Tensor)
            assert_type(run.clip(model, 1.0), Tensor | None)
            assert_type(run.save(metric=loss, best="min"), Path)
        assert_type(run.resume(), bool)
        assert_type(
            (run.rank, run.device, run.host, run.weight, run.is_first),
            tuple[int, torch.device, str, float, bool],
        )
        assert_type(count(known) + model.width, int)


def preparing(run: pl.Run) -> None:
    """From none to many objects, in any order."""
    net, sgd, loader = objects()
    adam, rate, plateau, scaler = (
        AdamW(net.parameters()),
        StepLR(sgd, 3),
        ReduceLROnPlateau(sgd),
        torch.amp.GradScaler(),
    )
    assert_type(run.prepare(net), Net)
    assert_type(run.prepare(net, cut=pl.shard("blocks.*", zero=3)), Net)
    assert_type(run.prepare(sgd, adam), tuple[SGD, AdamW])
    assert_type(run.prepare(loader).dataset, torch.utils.data.Dataset[Pair])
    assert_type(run.prepare(net, loader, train=False)[0], Net)
    assert_type(run.prepare(net, sgd, adam), tuple[Net, SGD, AdamW])
    _, _, train, test = run.prepare(net, sgd, loader, loader)
    assert_type((train.peek(), test.batch_size), tuple[Any, int | None])
    assert_type(run.prepare(loader, net, sgd, rate), tuple[DataLoader[Pair], Net, SGD, StepLR])
    assert_type(
        run.prepare(net, sgd, loader, plateau, scaler),
        tuple[Net, SGD, DataLoader[Pair], ReduceLROnPlateau, torch.amp.GradScaler],
    )
    assert_type(run.prepare(net, net, sgd, adam, loader, rate, plateau), tuple[Any, ...])
    assert_type(run.prepare(*[net, net], shares="auto"), tuple[Any, ...])
    assert_type(run.prepare(loss="sum"), tuple[()])


def scale(x: float, factor: int = 2) -> float:
    return x * factor


def answering() -> None:
    with pl.load("runs/circle", Net(), device="cpu") as loaded:
        assert_type(loaded.model, Net)
    assert_type(pl.load("runs/circle", Net, best=True).model, Net)
    assert_type(pl.load("runs/demo").model, nn.Module)
    assert_type(pl.launch(scale, 0.5, workers=3), list[float])
    assert_type(pl.launch(lambda name: name * 2, "a", straggler="evict", min_workers=1), list[str])
    with pl.start() as run:
        assert_type(pl.probe(run, dtypes=["float32"]).hosts[0].name, str)
    with lab.cluster(hosts=2, placement="round-robin") as cluster:
        assert_type(
            cluster.run("train.py", faults=[lab.storm(seed=1, kinds=("stop", "slow"))]).code, int
        )


def writing() -> list[object]:
    """Everything that is written by words."""
    sync = pl.LocalSGD(16, momentum="averaged", codec=pl.int8(rounding="stochastic"))
    return [
        *(
            sync,
            pl.Gossip(graph="ring"),
            pl.Gossip(graph=((0, 1),)),
            pl.ParameterServer(staleness=2),
            pl.topk(0.1, threshold="sampled"),
        ),
        *(
            pl.pipeline(schedule="zbv", split="auto"),
            pl.layers(split="even"),
            pl.shard(params="bfloat16", reduce="float32"),
        ),
        pl.SparseEmbedding(8, 2, mode="sum"),
    ]
