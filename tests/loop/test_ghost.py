"""What is left of a ghost's forward: nothing, and what the others have made of buffers
meanwhile.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as hooked
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, IterableDataset

from paceline.loop.ghost import copy_buffers, share_buffers
from paceline.session.run import Run
from tests.harness.runs import Numbered, parameters, workers


class Counting(nn.Module):
    """Counts its forwards, in place and by a new tensor each time, and remembers what it saw
    last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inplace", torch.zeros((), dtype=torch.int64))
        self.register_buffer("anew", torch.zeros(()))
        self.register_buffer("latest", None)

    def forward(self, x: Tensor) -> Tensor:
        self.inplace += 1
        self.anew = self.anew + 1
        self.latest = self.anew * 2 if self.latest is None else self.latest + 1
        return x


class Passing(IterableDataset[Any]):
    """The samples of `Numbered`, as a stream."""

    def __iter__(self) -> Any:
        data = Numbered(19)
        return (data[index] for index in range(19))


def train(run: Run, first: nn.Module, stream: bool, shares: Any) -> Tensor:
    model = copy.deepcopy(first)
    data: Any = Passing() if stream else Numbered(19)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # the last batch of 19 samples has one, too few for all
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(data, 6), shares=shares if run.size > 1 else None
    )
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return torch.cat(
        [parameters(model), *(buffer.reshape(-1).double() for buffer in model.buffers())]
    )


@pytest.mark.each_choice
@pytest.mark.parametrize("norm", [spectral_norm, hooked])
@pytest.mark.parametrize(
    ("size", "stream", "shares"),
    [(2, False, None), (3, False, None), (2, False, [0, 1]), (3, True, [1, 0, 4]), (2, True, None)],
)
def test_buffers_that_depend_on_weights_alone_stay_equal(
    norm: Any, size: int, stream: bool, shares: Any
) -> None:
    torch.manual_seed(1)
    first = nn.Sequential(
        norm(nn.Linear(6, 5)), nn.Tanh(), Counting(), norm(nn.Linear(5, 2))
    ).double()
    (wanted,) = workers(1, lambda run: train(run, first, stream, shares))
    for found in workers(size, lambda run: train(run, first, stream, shares)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_models_without_such_buffers_meet_no_more_often() -> None:
    def body(run: Run) -> int:
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
        model, loader = run.prepare(model, DataLoader(Numbered(19), 6), batchnorm="local")
        met: list[str] = []
        meet = run._agreement.meet
        run._agreement.meet = lambda what, *rest, **more: (
            met.append(what),
            meet(what, *rest, **more),
        )[1]  # type: ignore[method-assign,func-returns-value]
        for x, y in loader:
            model.train(len(x) > 1)
            F.mse_loss(model(x), y).backward()
        return met.count("buffers")

    assert workers(2, body) == [0, 0]


def told(model: nn.Module, kept: Any) -> bytes:
    """What a worker with samples tells of its buffers after a turn."""
    bodies: list[bytes] = []
    agreement: Any = SimpleNamespace(meet=lambda what, body: bodies.append(body) or bodies)
    share_buffers(kept, agreement, ghost=False)
    return bodies[0]


def hear(kept: Any, bodies: list[bytes]) -> None:
    """A ghost hears what those with samples tell who are left."""
    agreement: Any = SimpleNamespace(meet=lambda what, body: [body, *bodies])
    share_buffers(kept, agreement, ghost=True)


def test_a_ghost_takes_what_all_with_samples_have_alike() -> None:
    """What they have made of their samples differs, and so does a bit that has flipped on one of
    them.
    """
    models = [Counting(), Counting(), Counting()]
    kept = [copy_buffers([model]) for model in models]
    for model in models[1:]:
        model(torch.ones(1))
    models[2].anew += 1.0
    hear(kept[0], [told(models[1], kept[1]), told(models[2], kept[2])])
    assert models[0].inplace == 1 and models[0].anew == 0 and models[0].latest == 2


def test_one_worker_with_samples_is_enough_and_none_changes_nothing() -> None:
    models = [Counting(), Counting()]
    kept = [copy_buffers([model]) for model in models]
    models[1](torch.ones(1))
    hear(kept[0], [])  # they were lost in the call in which they would have told
    assert models[0].inplace == 0 and models[0].latest is None
    hear(kept[0], [told(models[1], kept[1])])
    assert models[0].inplace == 1 and models[0].anew == 1 and models[0].latest == 2
