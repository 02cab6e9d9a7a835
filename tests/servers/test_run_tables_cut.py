"""Sparse tables beside dense layers that are cut: the numbers of one process with
nn.EmbeddingBag.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.parallel.shard import shard
from paceline.parallel.tensor.styles import column
from paceline.parallel.tensor.tensor_cut import tensor
from paceline.servers.tables.embedding import SparseEmbedding
from paceline.session.run import Run
from tests.harness.runs import alone, distance, workers
from tests.harness.tables import OPTIMIZERS, ROWS, Make, Net, data, loader, plain, served, step


def body(
    run: Run, make: Make, kind: str, *, until: int = 0, folder: Path | None = None, **options: Any
) -> Tensor:
    """Train two tables and a layer; return all rows, and what the model gives for all samples."""
    model = Net(make, torch.float64, "mean")
    optimizers = OPTIMIZERS[kind](model)
    model, *optimizers, batches = run.prepare(model, *optimizers, loader(), **options)
    if folder is not None:
        assert run.resume(folder / "test")
    for _ in run.epochs(2):
        for batch in batches:
            step(model, optimizers, batch)
            if run.steps + 1 == until:
                run.save()
                return torch.zeros(())
    with torch.no_grad():
        answers = model(*data().tensors[:2])
    rows = [
        t.lookup(torch.arange(ROWS)) if isinstance(t, SparseEmbedding) else t.weight.detach()
        for t in (model.first, model.second)
    ]
    return torch.cat([each.flatten() for each in (*rows, answers)])


def wanted(kind: str) -> Tensor:
    return alone(lambda run: body(run, plain(sparse=kind == "adam"), kind))


@pytest.mark.parametrize(
    ("kind", "zero", "size", "mesh"),
    [
        ("sgd", 1, 2, "shard=2"),
        ("adagrad", 2, 3, "shard=3"),
        ("adagrad", 3, 4, "data=2, shard=2"),
        ("adam", 3, 2, "shard=2"),
    ],
)
def test_tables_go_beside_layers_that_are_shared_out(
    kind: str, zero: Any, size: int, mesh: str
) -> None:
    found = workers(
        size, lambda run: body(run, served(2), kind, cut=shard("dense", zero=zero)), mesh=mesh
    )
    assert max(distance(each, wanted(kind)) for each in found) < 1e-9


def test_a_checkpoint_goes_from_one_layout_to_another(tmp_path: Path) -> None:
    """Saved by four workers that share the layer out, resumed by two that don't, and by three
    that do.
    """
    workers(
        4,
        lambda run: body(run, served(2), "adagrad", until=7, cut=shard(zero=3)),
        mesh="data=2, shard=2",
        folder=tmp_path,
    )
    for size, mesh, options in ((2, None, {}), (3, "shard=3", {"cut": shard(zero=1)})):
        found = workers(
            size,
            lambda run, given=options: body(run, served(1), "adagrad", folder=tmp_path, **given),
            mesh=mesh,
        )
        assert distance(found[0], wanted("adagrad")) < 1e-9


def test_workers_with_the_same_samples_are_refused() -> None:
    """They would give each row its gradient twice."""
    with pytest.raises(
        UsageError,
        match=r"sparse table first can't be used yet if the mesh \(tensor=2\) has tensor: use shard",  # noqa: E501
    ):
        workers(
            2,
            lambda run: body(run, served(), "sgd", cut=tensor({"dense": column()})),
            mesh="tensor=2",
        )


def test_a_step_counts_the_whole_batch() -> None:
    """The mean of rows is over all workers of the mesh, as that of layers is, with unequal
    shares too.
    """

    def once(run: Run, make: Make, **options: Any) -> Tensor:
        model = Net(make, torch.float64, "sum")
        model, optimizer, batches = run.prepare(
            model, torch.optim.SGD(model.parameters(), 0.5), loader(), **options
        )
        a, b, y = next(iter(batches))
        F.mse_loss(model(a, b), y).backward()
        optimizer.step()
        table = model.first
        return (
            table.lookup(torch.arange(ROWS))
            if isinstance(table, SparseEmbedding)
            else table.weight.detach()
        )

    found = workers(
        2, lambda run: once(run, served(), cut=shard(zero=3), shares=[3, 1]), mesh="shard=2"
    )
    assert distance(found[1], alone(lambda run: once(run, plain()))) < 1e-9
