"""What workers should have alike is compared: outputs in the first pass, parameters that stay whole now and then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ReplicasDiffer, UsageError
from paceline.parallel.tensor.cut import tensor
from paceline.parallel.tensor.styles import column, row
from tests.harness.tensor_cuts import WHOLE, batches, context_of, gpt
from tests.harness.thread_groups import ThreadGroup, spawn

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            {"0": column()},
            r"what Sequential returns differs between workers .*; 0 is the last one cut by column\(\): row\(\) has to follow",
        ),
        ({"0": row()}, r"0 is cut by rows and takes 2 features of each worker, not 4; cut the layer before it by column\(\)"),
    ],
)
def test_a_plan_that_leaves_parts_is_noticed_in_the_first_pass(layers: Any, message: str) -> None:
    def body(group: ThreadGroup) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4))
        tensor(layers).apply(model, context_of(group))
        model(torch.ones(2, 4))

    with pytest.raises(UsageError, match=message):
        spawn(2, body)


def test_gradients_that_each_worker_clips_for_itself_are_noticed_in_the_second_step() -> None:
    def body(group: ThreadGroup) -> None:
        model = gpt()
        WHOLE.apply(model, context_of(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for steps, (x, y) in enumerate(batches(2)):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            assert steps == 0
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    with pytest.raises(
        ReplicasDiffer, match=r"positions.weight and \d+ more, which .* differs between ranks 0 and 1: clip gradients by run.clip"
    ):
        spawn(2, body)
