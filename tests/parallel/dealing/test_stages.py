"""Which worker has which parameters under a split, and what is noted of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.parallel.pipeline import pipeline
from paceline.session.run import Run
from tests.harness.pipelines import LAYERS, Sentences, gpt
from tests.harness.runs import workers

pytestmark = pytest.mark.unit


def held(split: list[int]) -> list[Any]:
    """Prepare a model under a split; return how many qkv weights each worker has, its copies,
    and its ties.
    """

    def body(run: Run) -> Any:
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        cut = pipeline(LAYERS, micro_batches=2, split=split)
        model, optimizer, _ = run.prepare(
            model, optimizer, DataLoader(Sentences(), batch_size=8), cut=cut
        )
        cuts = run._prepared.cuts
        mine = {
            name: parameter for name, parameter in model.named_parameters() if parameter.numel()
        }
        for name, parameter in model.named_parameters():
            placement = cuts.placements.placement_of(parameter)
            assert (name in mine) == bool(placement.regions)
            assert placement.axes == ("stage",) and placement.shape == tuple(whole[name].shape)
            assert torch.Size(placement.local) == parameter.shape
            assert name not in mine or torch.equal(parameter.detach(), whole[name])
        copies = [
            name for name, parameter in mine.items() if cuts.placements.placement_of(parameter).copy
        ]
        return (
            sum(name.endswith("qkv.weight") for name in mine),
            copies,
            len(cuts.pipeline_of(model).ties),
        )

    return workers(2, body, mesh="stage=2")


@pytest.mark.parametrize(("first", "blocks"), [(3, (1, 3)), (6, (4, 0)), (1, (0, 4))])
def test_parameters_are_where_the_split_says(first: int, blocks: tuple[int, int]) -> None:
    # the tied weight is on both workers, and the first one's counts
    assert held([first, 8 - first]) == [(blocks[0], [], 1), (blocks[1], ["tokens.weight"], 1)]
