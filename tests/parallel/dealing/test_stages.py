"""Who has which parameters under a split, and what is noted of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.parallel.pipeline import pipeline
from paceline.parallel.pipelining.model import StageSplit
from paceline.session.run import Run
from tests.harness.pipelines import LAYERS, Sentences, gpt
from tests.harness.runs import workers

pytestmark = pytest.mark.unit


def test_parameters_are_where_the_split_says() -> None:
    def body(run: Run) -> list[Any]:
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        cut = pipeline(LAYERS, micro_batches=2, split="auto", again=True)
        run.prepare(model, optimizer, DataLoader(Sentences(), batch_size=8), cut=cut)
        cuts = run._prepared.cuts
        repeated: Any = cuts.repeated[0]
        made, dealer, held, found = repeated.model, repeated.dealer, dict(model.named_parameters()), []
        for first in (3, 6, 1):
            holding, _ = dealer.move(made.split, StageSplit((0, first, 8), (0, 1)), [optimizer], repeated.pairs)
            made.hold(holding)
            for name, parameter in model.named_parameters():
                placement = cuts.placements.of(parameter)
                assert parameter is held[name] and (parameter.numel() > 0) == (name in holding.mine) == bool(placement.regions)
                assert (name in holding.mine) != (name in holding.elsewhere)
                assert placement.axes == ("stage",) and placement.shape == tuple(whole[name].shape)
                assert torch.Size(placement.local) == parameter.shape
                assert not parameter.numel() or torch.equal(parameter.detach(), whole[name])
            stand_ins = [dealer.stand_in(parameter) for parameter in model.parameters()]
            assert [one.shape for one in stand_ins] == [value.shape for value in whole.values()]
            copies = [name for name, parameter in held.items() if cuts.placements.of(parameter).copy]
            found.append((sum(name.endswith("qkv.weight") for name in holding.mine), copies, len(holding.ties)))
        return found

    first, second = workers(2, body, mesh="stage=2")  # the tied weight is on both, and the first counts
    assert first == [(1, [], 1), (4, [], 1), (0, [], 1)]
    assert second == [(3, ["tokens.weight"], 1), (0, ["tokens.weight"], 1), (4, ["tokens.weight"], 1)]
