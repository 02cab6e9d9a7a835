"""Copies of cut models, such as averages, are saved and resumed as the models are: in parts,
under any layout.
"""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline as pl
from paceline.errors import UsageError
from paceline.parallel.pipeline import pipeline
from paceline.session.run import Run
from tests.harness.pipelines import LAYERS, TENSOR, gpt, next_tokens
from tests.harness.runs import alone, workers
from tests.harness.sharded import put_together

X = torch.arange(20).view(4, 5) % 11


def averaged(run: Run, cut: Any, *, tied: bool, steps: int) -> Tensor:
    """Train so many steps from the newest checkpoint on, save, and return the average as a
    whole.
    """
    model = gpt(tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run.prepare(model, optimizer, cut=cut)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))  # type: ignore[no-untyped-call]
    run.keep("average", average)
    run.resume()
    for _ in range(steps):
        optimizer.zero_grad()
        run.step(model, X, X, loss=next_tokens)
        optimizer.step()
        average.update_parameters(model)
    run.save()
    return put_together(
        average.module, run.group, run._prepared.cuts.placements, lambda parameter: parameter
    )


@pytest.mark.parametrize(
    ("mesh", "cut", "tied"),
    [
        ("stage=2", pipeline(LAYERS, micro_batches=2, split=[3, 5]), True),
        ("tensor=2", TENSOR, False),
        ("shard=2", pl.shard("blocks.*", zero=2), False),
        ("shard=2", pl.shard("blocks.*", zero=3), False),
    ],
)
def test_averages_go_on_in_the_same_layout_and_in_others(
    tmp_path: Path, mesh: str, cut: Any, tied: bool
) -> None:
    wanted = alone(lambda run: averaged(run, None, tied=tied, steps=4))
    assert (
        float(
            (wanted - torch.cat([p.detach().reshape(-1) for p in gpt(tied=tied).parameters()]))
            .abs()
            .max()
        )
        > 1e-3
    )
    workers(2, lambda run: averaged(run, cut, tied=tied, steps=2), mesh=mesh, folder=tmp_path)
    for found in workers(
        2, lambda run: averaged(run, cut, tied=tied, steps=1), mesh=mesh, folder=tmp_path
    ):
        assert found.shape == wanted.shape
    found = workers(1, lambda run: averaged(run, None, tied=tied, steps=1), folder=tmp_path)[0]
    assert float((found - wanted).abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("mesh", "cut"),
    [
        ("stage=2", pipeline(LAYERS, micro_batches=2)),
        ("tensor=2", TENSOR),
        ("shard=2", pl.shard("blocks.*", zero=3)),
    ],
)
def test_averages_of_the_whole_model_and_pickles_of_parts_are_refused(mesh: str, cut: Any) -> None:
    def body(run: Run) -> None:
        model = gpt(tied=False)
        average = AveragedModel(model)  # type: ignore[no-untyped-call]
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), cut=cut)
        with pytest.raises(UsageError, match=r"made before run.prepare cut the model"):
            average.update_parameters(model)
        for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(UsageError, match="can't be pickled as a whole"):
                save(model)
        copy.deepcopy(model)

    workers(2, body, mesh=mesh)


def test_what_is_no_copy_is_whole(tmp_path: Path) -> None:
    def body(run: Run) -> list[int]:
        model, teacher = gpt(), gpt()
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            cut=pipeline(LAYERS, micro_batches=2),
        )
        run.keep("teacher", teacher)
        run.keep("head", nn.Linear(2, 2))
        return [
            len(run._prepared.cuts.copies.copies_of(model)),
            len(run._prepared.cuts.copies.copies_of(teacher)),
        ]

    assert workers(2, body, mesh="stage=2", folder=tmp_path) == [[0, 0]] * 2
