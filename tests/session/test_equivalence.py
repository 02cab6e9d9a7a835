"""Invariant 1: the loss curve belongs to the script.

Same samples, steps and weights for any workers, shares and schedules.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import paceline as pl
from paceline.cluster.store import Store
from paceline.comm.schedule import SCHEDULES
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.solo import SoloGroup
from paceline.errors import ReplicasDiffer
from paceline.session.run import Run
from paceline.sync import routes
from paceline.sync.allreduce import AllReduce
from paceline.sync.autograd import GradientTracker
from tests.harness.processes import fork
from tests.harness.runs import alone, distance, make, parameters, workers

COUNT, BATCH, EPOCHS = 1003, 64, 2
WAYS = [(2, None), (3, None), (4, None), (8, None), (2, [1, 7]), (2, [0, 8]), (3, [3, 3, 2])]


class Points(Dataset[Any]):
    """Samples (number, features, class) that differ in scale, so that a wrong weight shows."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x = (
            torch.randn(COUNT, 8, generator=generator) * torch.linspace(0.2, 3, COUNT)[:, None]
        ).to(dtype)
        self.y = torch.randint(0, 4, (COUNT,), generator=generator)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index]


class Curve(NamedTuple):
    """What a run came to."""

    weights: Tensor
    losses: list[float]
    steps: int
    ids: list[Counter[int]]  # of each epoch, over all workers


def classifier(dtype: torch.dtype) -> nn.Module:
    return drawn(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype))


def drawn(model: nn.Module) -> Any:
    """The model with values from a generator of its own: threads share torch's."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


Making = Callable[..., torch.optim.Optimizer]


def train(
    dtype: torch.dtype, optimizer: Making, *, batches: int | None = None, **options: Any
) -> Callable[[Run], Any]:
    """A plain script: two epochs, or some batches."""

    def body(run: Run) -> Any:
        model = classifier(dtype)
        data = DataLoader(
            Points(dtype),
            batch_size=BATCH,
            shuffle=True,
            generator=torch.Generator().manual_seed(2),
        )
        model, opt, loader = run.prepare(model, optimizer(model.parameters()), data, **options)
        losses, ids = [], []
        for _ in run.epochs(EPOCHS):
            seen: Counter[int] = Counter()
            for n, (index, x, y) in enumerate(loader):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(run.mean(loss))
                if run._loop.turn is not None and not run._loop.turn.ghost:
                    seen.update(index.tolist())
                if n + 1 == batches:
                    break
            ids.append(seen)
        return parameters(model), losses, run.steps, ids

    return body


def sgd(ps: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(ps, lr=0.1, momentum=0.9)


def adam(ps: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(ps, lr=1e-2)


def curve(size: int, body: Callable[[Run], Any], **options: Any) -> Curve:
    """The run of all workers, whose weights have to be bit-equal."""
    found = workers(size, body, **options)
    for weights, losses, steps, _ in found[1:]:
        assert torch.equal(weights, found[0][0]) and losses == found[0][1] and steps == found[0][2]
    ids = [sum(parts, Counter()) for parts in zip(*(ids for *_, ids in found), strict=True)]
    return Curve(found[0][0], [float(loss) for loss in found[0][1]], found[0][2], ids)


@cache
def single(dtype: torch.dtype, optimizer: Making, batches: int | None = None) -> Curve:
    """The run of one worker."""
    return curve(1, train(dtype, optimizer, batches=batches))


def check(
    size: int, shares: Any, *, via: str = "auto", bound: float = 1e-5, **options: Any
) -> None:
    """Two epochs on several workers are those of one, sample by sample.

    What a mutant has to fail.
    """
    wanted = single(torch.float32, sgd)
    found = curve(
        size,
        train(torch.float32, sgd, shares=shares),
        strategy=AllReduce(via=via, bucket_mb=0.0005),
        **options,
    )
    assert found.steps == wanted.steps == EPOCHS * -(-COUNT // BATCH)
    assert all(ids == Counter(range(COUNT)) for ids in found.ids)
    assert distance(found.weights, wanted.weights) < bound
    assert found.losses == pytest.approx(wanted.losses, rel=1e-4)


@pytest.mark.each_choice
@pytest.mark.parametrize(("size", "shares"), WAYS)
def test_sgd_in_float32(size: int, shares: Any) -> None:
    check(size, shares)


@pytest.mark.parametrize(("size", "shares"), [(2, None), (2, [1, 7]), (3, [3, 3, 2])])
def test_adam_in_float64_after_20_steps(size: int, shares: Any) -> None:
    wanted = single(torch.float64, adam, 10)
    found = curve(size, train(torch.float64, adam, batches=10, shares=shares))
    assert found.steps == wanted.steps == 20
    assert distance(found.weights, wanted.weights) < 1e-9


@pytest.mark.parametrize(("size", "shares"), [(3, None), (2, [0, 8])])
def test_adam_in_float32_has_the_same_losses(size: int, shares: Any) -> None:
    wanted, found = (
        single(torch.float32, adam),
        curve(size, train(torch.float32, adam, shares=shares)),
    )
    assert found.losses == pytest.approx(wanted.losses, abs=1e-3)


class Sentences(Dataset[Any]):
    """Sentences of 2 to 9 words, and one of none, padded with what losses ignore; 13 of them, so
    that the last batch is small.
    """

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(1, 7, (9,), generator=torch.Generator().manual_seed(index))
        padding = torch.arange(9) >= (0 if index == 4 else 2 + index * 5 % 8)
        return {
            "input_ids": words.masked_fill(padding, 0),
            "labels": words.masked_fill(padding, -100),
        }


@pytest.mark.parametrize(("size", "shares"), [(2, None), (3, None), (4, [3, 1, 2, 0])])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_padded_language_model_weighed_by_tokens(size: int, shares: Any, shifted: bool) -> None:
    """The loss shifts labels by itself, as those of transformers do, or the model sees both ways
    and fills in.
    """

    def body(run: Run) -> Any:
        model = drawn(
            nn.Sequential(
                nn.Embedding(7, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 7)
            ).double()
        )
        weigh = pl.tokens("labels") if shifted else pl.tokens("labels", shift=False)
        data = DataLoader(
            Sentences(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2)
        )
        model, opt, loader = run.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            data,
            weigh=weigh,
            shares=shares if run.size > 1 else None,
        )
        losses = []
        for _ in range(2):
            for batch in loader:
                logits = model[2](model[1](model[0](batch["input_ids"]))[0])
                outputs, labels = (
                    (logits[:, :-1], batch["labels"][:, 1:])
                    if shifted
                    else (logits, batch["labels"])
                )
                loss = F.cross_entropy(outputs.flatten(0, 1), labels.flatten())
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(run.mean(loss))
        return parameters(model), losses, run.steps, []

    wanted, found = curve(1, body), curve(size, body)
    assert found.steps == wanted.steps == 8 and found.losses == pytest.approx(
        wanted.losses, rel=1e-12
    )
    assert distance(found.weights, wanted.weights) < 1e-9


def uneven(sample: Any) -> float:
    """A cost that differs by a factor of 16 between samples."""
    return 32 + int(sample[0]) * 7919 % 480


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, {}),
        (2, {"shares": [1, 7]}),
        (4, {"shares": [0, 2, 1, 1]}),
        (3, {"weigh": lambda batch: float(len(batch[0]))}),
    ],
)
def test_dealt_by_cost(size: int, options: dict[str, Any]) -> None:
    wanted = single(torch.float64, adam, 3)
    found = curve(size, train(torch.float64, adam, batches=3, cost=uneven, **options))
    assert found.steps == wanted.steps == 6 and found.ids == wanted.ids
    assert distance(found.weights, wanted.weights) < 1e-9


@pytest.mark.alike(3)
@pytest.mark.parametrize("via", sorted(SCHEDULES))
@pytest.mark.parametrize(
    ("size", "shares"), [(3, [3, 3, 2]), pytest.param(4, None, marks=pytest.mark.soak)]
)
def test_every_schedule(via: str, size: int, shares: Any) -> None:
    check(size, shares, via=via)


@pytest.mark.slow
def test_a_sum_divided_by_the_global_batch_is_the_mean() -> None:

    def body(shares: Any, **options: Any) -> Callable[[Run], Tensor]:
        def work(run: Run) -> Tensor:
            model = classifier(torch.float64)
            few = Subset(Points(torch.float64), range(COUNT % (4 * BATCH)))
            data = DataLoader(
                few, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(2)
            )
            model, opt, loader = run.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), data, shares=shares, **options
            )
            for _, x, y in loader:
                loss = F.cross_entropy(model(x), y, reduction=options.get("loss", "mean"))
                if "loss" in options and run._loop.turn is not None:
                    loss = loss / run._loop.turn.global_batch
                loss.backward()
                opt.step()
                opt.zero_grad()
            assert run.steps == 4 and len(few) % BATCH == COUNT % BATCH != 0
            return parameters(model)

        return work

    wanted = alone(body(None))
    ways: list[tuple[int, Any]] = [(1, None), (2, [1, 7]), (3, [3, 3, 2]), (2, [0, 8])]
    for size, shares in ways:
        for found in workers(size, body(shares, loss="sum")):
            assert distance(found, wanted) < 1e-11


def test_with_random_delays_repeatedly() -> None:
    draw = random.Random(0)

    def nap(rank: int) -> None:
        if draw.random() < 0.05:
            time.sleep(draw.random() * 0.002)

    wanted = single(torch.float64, sgd, 4)
    for _ in range(3):
        found = curve(
            3,
            train(torch.float64, sgd, batches=4, shares=[3, 3, 2]),
            strategy=AllReduce(bucket_mb=0.0005),
            delay=nap,
        )
        assert distance(found.weights, wanted.weights) < 1e-12


def silent(self: Any, flat: Tensor, name: str, **_: bool) -> Any:
    """A mean of my own gradients alone."""
    return SoloGroup().all_reduce(flat.mul_(2), out=flat)


def test_a_mutant_that_does_not_communicate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes.GroupReducer, "all_reduce", silent)
    with pytest.raises((AssertionError, ReplicasDiffer)):
        check(2, None)


def test_a_mutant_that_ignores_weights_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = GradientTracker._begin_pass

    def unweighted(self: GradientTracker) -> None:
        begin(self)
        self._scale = 1 / self.context.group.size

    monkeypatch.setattr(GradientTracker, "_begin_pass", unweighted)
    with pytest.raises(AssertionError):
        check(2, [1, 7])
    with pytest.raises(AssertionError):
        check(2, None)  # the last batch has 43 samples: 22 and 21


def dropping(run: Run, seed: int, *, save: int = 0, stop: int = 0) -> list[list[int]]:
    """The numbers of the samples of each step: three epochs of a model with dropout, an
    evaluation after each.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4))
    data = DataLoader(Subset(Points(torch.float32), range(29)), batch_size=6, shuffle=True)
    model, opt, loader = run.prepare(model, sgd(model.parameters()), data)
    test = run.prepare(
        DataLoader(Subset(Points(torch.float32), range(7)), batch_size=6), train=False
    )
    run.resume()
    steps = []
    for _ in run.epochs(3):
        for index, x, y in loader:
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            steps.append(run.gather(index).tolist())
            if run.steps + 1 == save:
                run.save()
            if run.steps + 1 == stop:
                return steps
        for _, x, _ in test:
            model(x)
    return steps


def forked(size: int, folder: Path, body: Callable[[Run], Any]) -> list[Any]:
    """What a run gives on each of `size` processes, which have generators of their own."""

    def work(rank: int, size: int, store: Store) -> Any:
        group = SharedGroup.from_store(store, rank, size) if size > 1 else SoloGroup()
        with make(group, AllReduce(), str(folder), lambda text: None) as run:
            return body(run)

    return fork(size, work)


@pytest.mark.parametrize("apart", [0, 1])
def test_the_order_of_samples_is_the_same_whatever_dropout_draws(
    apart: int, tmp_path: Path
) -> None:
    """Workers have the same seed, or each its own."""
    found = [
        forked(size, tmp_path / str(size), lambda run: dropping(run, 3 + apart * run.rank))
        for size in (1, 2, 3)
    ]
    for steps in (steps for crew in found for steps in crew):
        assert steps == found[0][0] and len(steps) == 15
    epochs = [[one for step in steps[at : at + 5] for one in step] for at in (0, 5, 10)]
    assert (
        all(sorted(epoch) == list(range(29)) for epoch in epochs)
        and epochs[0] != epochs[1] != epochs[2]
    )


@pytest.mark.parametrize(("before", "after", "save"), [(2, 1, 3), (1, 3, 10), (3, 2, 12)])
def test_the_order_of_samples_goes_on_after_a_resume(
    before: int, after: int, save: int, tmp_path: Path
) -> None:
    (whole,) = forked(1, tmp_path / "whole", lambda run: dropping(run, 3))
    first = forked(
        before, tmp_path / "test", lambda run: dropping(run, 3, save=save, stop=save + 1)
    )
    assert first[0] == whole[: save + 1]
    for steps in forked(after, tmp_path / "test", lambda run: dropping(run, 9)):
        assert steps == whole[save:]


@pytest.mark.parametrize("stream", [False, True])
def test_workers_that_are_seeded_apart_stay_apart(stream: bool, tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(12))

    def body(run: Run, apart: int) -> list[float]:
        torch.manual_seed(3 + apart * run.rank)
        data = Stream() if stream else Subset(range(12), range(12))  # type: ignore[arg-type]
        loader = run.prepare(
            DataLoader(data, batch_size=4, shuffle=None if stream else True), train=False
        )
        return [float(torch.rand(())) for _ in range(2) for _ in [*loader][:1]]

    one, two = forked(2, tmp_path, lambda run: body(run, 0))
    assert one == two
    one, two = forked(2, tmp_path, lambda run: body(run, 1))
    assert not set(one) & set(two)
