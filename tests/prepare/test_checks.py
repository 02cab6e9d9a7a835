"""Layers that depend on the words of one worker are refused wherever samples or micro-batches
are dealt.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.runs import alone, workers

LAYOUTS: list[tuple[int, str | None, Any]] = [
    (2, None, None),
    (2, "shard=2", pl.shard(zero=1)),
    (2, "shard=2", pl.shard(zero=3)),
    (2, "stage=2", pl.pipeline("0, 1")),
]


def preparing(kind: Any, cut: Any, **options: Any) -> Any:
    def body(run: Run) -> int:
        model = nn.Sequential(kind(9, 4, **options), nn.Linear(4, 2))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), cut=cut)
        return run.size

    return body


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("size", "mesh", "cut"), LAYOUTS, ids=["data", "zero 1", "zero 3", "stage"]
)
def test_embeddings_that_depend_on_a_workers_words_are_refused(
    kind: Any, size: int, mesh: str | None, cut: Any
) -> None:
    for options, words in (
        ({"max_norm": 1.0}, "0 has max_norm=1"),
        ({"scale_grad_by_freq": True}, "0 has scale_grad_by_freq"),
    ):
        with pytest.raises(UsageError, match=words):
            workers(size, preparing(kind, cut, **options), mesh=mesh)
        assert alone(preparing(kind, None, **options)) == 1


def test_workers_that_have_the_same_samples_may_have_them() -> None:
    cut = pl.tensor({"1": pl.column(gather=True)})
    assert workers(
        2, preparing(nn.Embedding, cut, max_norm=1.0, scale_grad_by_freq=True), mesh="tensor=2"
    ) == [2, 2]
