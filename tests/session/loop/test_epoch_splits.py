"""When splits are found again, and when not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import paceline as pl
from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.models import net, sgd
from tests.harness.runs import batches, distance, parameters, workers


class Improving:
    """Counts how often it is asked, and by how many optimizers the model is stepped; it says that something has changed."""

    def __init__(self, run: Run) -> None:
        self._run, self.asked = run, list[tuple[int, int]]()

    def improve(self, optimizers: Sequence[Optimizer], copies: Any) -> str | None:
        self.asked.append((self._run.steps, len(optimizers)))
        return "layers have moved" if len(self.asked) == 1 else None


def trained(run: Run, *, repeated: bool, evaluate: bool = False) -> tuple[torch.Tensor, list[tuple[int, int]], list[str]]:
    model = net()
    improving = Improving(run)
    if repeated:
        run._prepared.cuts.repeated.append(improving)
    model, optimizer, loader, held_out = run.prepare(model, sgd(model), batches(24), batches(8))
    for epoch in run.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            run.step(model, x, y, loss=torch.nn.functional.mse_loss)
            optimizer.step()
            if evaluate and epoch:
                with torch.no_grad():
                    for _ in held_out:
                        break
    return parameters(model), improving.asked, [event["what"] for event in run.events]


@pytest.mark.parametrize("evaluate", [False, True])
def test_splits_are_found_before_each_epoch_but_the_first(evaluate: bool) -> None:
    wanted = workers(2, lambda run: trained(run, repeated=False))
    for (values, _, _), (found, asked, events) in zip(
        wanted, workers(2, lambda run: trained(run, repeated=True, evaluate=evaluate)), strict=True
    ):
        assert distance(found, values) == 0.0  # strategies begin anew, and the numbers stay
        steps = asked[0][0]
        assert steps > 0 and asked == [(steps, 1), (2 * steps, 1)]
        assert events.count("layers have moved") == 1


def test_an_epoch_inside_of_another_changes_nothing() -> None:
    def body(run: Run) -> list[tuple[int, int]]:
        model, improving = net(), Improving(run)
        run._prepared.cuts.repeated.append(improving)
        model, optimizer, outer, inner = run.prepare(model, sgd(model), batches(16), batches(8))
        for _ in range(2):
            for x, y in outer:
                next(iter(inner))
                optimizer.zero_grad()
                run.step(model, x, y, loss=torch.nn.functional.mse_loss)
                optimizer.step()
        return improving.asked

    found = workers(2, body)
    assert found[0] == found[1] and len(found[0]) == 1


def test_strategies_that_keep_copies_are_refused_before_the_first_step() -> None:
    def body(run: Run) -> int:
        run._prepared.cuts.repeated.append(Improving(run))
        model = net()
        _, _, loader = run.prepare(model, sgd(model), batches(16))
        with pytest.raises(UsageError, match="this strategy keeps copies of them: use AllReduce"):
            iter(loader).__next__()
        return run.steps

    for strategy in (pl.LocalSGD(2), pl.Gossip()):
        assert workers(2, body, strategy=strategy) == [0, 0]
