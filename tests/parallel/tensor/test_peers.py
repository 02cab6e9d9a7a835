"""What workers should have alike is compared: outputs in the first pass, parameters that stay
whole now and then.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.cluster.store import Store
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import ReplicasDiffer, UsageError
from paceline.parallel.tensor.styles import column, row, summed
from paceline.parallel.tensor.tensor_cut import tensor
from tests.harness.processes import fork
from tests.harness.tensor_cuts import WHOLE, batches, context_of, gpt
from tests.harness.thread_groups import ThreadGroup, spawn

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            {"0": column()},
            (
                r"what Sequential returns differs between workers .*; 0 is the last one cut by "
                r"column\(\): row\(\) has to follow"
            ),
        ),
        (
            {"0": row()},
            (
                r"0 is cut by rows and takes 2 features of each worker, not 4; "
                r"cut the layer before it by column\(\)"
            ),
        ),
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


class Normed(nn.Module):
    """A norm of halves of the features between two layers, of which each worker has one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2))
        return out


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_module_between_two_layers_that_should_be_summed_is_named(is_summed: bool) -> None:
    alone, x = Normed(), torch.randn(3, 4)

    def body(rank: int, size: int, store: Store) -> str:
        group, model = SharedGroup.from_store(store, rank, size), copy.deepcopy(alone)
        plan = {"up": column(), "down": row(), **({"norm": summed()} if is_summed else {})}
        tensor(plan).apply(model, context_of(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return told(
            group,
            lambda: [train(model, optimizer, lambda: model(x).square().sum()) for _ in range(2)],
        )

    expected = (
        r"^$"
        if is_summed
        else r"norm\.weight and 1 more, .*: if norm works on features .*pl\.summed\(\)"
    )
    for words in fork(2, body):
        assert re.search(expected, words), words


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], Tensor],
    clip: float = 0.0,
) -> None:
    loss().backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def told(group: SharedGroup, act: Callable[[], Any]) -> str:
    """What is said of replicas that differ.

    Workers are processes: threads share one generator of random numbers.
    """
    try:
        act()
    except ReplicasDiffer as error:
        return str(error)
    finally:
        group.close()
    return ""


@pytest.mark.parametrize("apart", [False, True])
def test_random_numbers_that_differ_are_told_from_a_wrong_plan(apart: bool) -> None:
    """Workers are processes, as threads share one generator."""

    def body(rank: int, size: int, store: Store) -> str:
        group = SharedGroup.from_store(store, rank, size)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8), *([nn.Linear(8, 4)] if apart else []), nn.Dropout(0.5)
        )
        tensor({"0": column(), **({"1": row()} if apart else {})}).apply(model, context_of(group))
        torch.manual_seed(rank if apart else 0)
        with pytest.raises(ReplicasDiffer if apart else UsageError) as caught:
            model(torch.ones(3, 4))
        group.close()
        return str(caught.value)

    for words in fork(2, body):
        assert ("random numbers" in words and "seed" in words) == apart


def test_gradients_that_each_worker_clips_for_itself_are_noticed_in_the_second_step() -> None:
    alone = gpt()

    def body(rank: int, size: int, store: Store) -> str:
        group, model = SharedGroup.from_store(store, rank, size), copy.deepcopy(alone)
        WHOLE.apply(model, context_of(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [
            lambda x=x, y=y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            for x, y in batches(2)
        ]
        return told(group, lambda: [train(model, optimizer, loss, clip=0.1) for loss in losses])

    for words in fork(2, body):
        assert re.search(
            (
                r"positions.weight and \d+ more, which .* differs between ranks 0 and 1: "
                r"clip gradients by run.clip"
            ),
            words,
        ), words
