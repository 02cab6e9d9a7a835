"""Sharded runs: what a script has from `run` is what one worker has, whatever is shared out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.models import fill, sgd
from tests.harness.runs import alone, batches, distance, workers
from tests.harness.sharded import put_together

STAGES = pytest.mark.parametrize("zero", [1, 2, 3])
Step = Callable[[Run, nn.Module, torch.optim.Optimizer, Tensor, Tensor], Any]


def net() -> nn.Module:
    return fill(
        nn.Sequential(
            nn.Linear(6, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 2)
        ).double()
    )


def normed() -> nn.Module:
    return fill(
        nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()
    )


def plain(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> None:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    run.log(loss=loss)


def whole(run: Run, model: nn.Module) -> Tensor:
    cuts = run._prepared.cuts
    return put_together(model, run._axes.groups.everyone, cuts.placements, cuts.trained_tensor)


def loop(
    cut: Any,
    step: Step = plain,
    build: Callable[[], nn.Module] = net,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.AdamW(
        ps, lr=0.02, weight_decay=0.1
    ),
    **options: Any,
) -> Callable[[Run], tuple[Tensor, list[float]]]:
    """Train two epochs with an uneven last batch; return parameters, and what evaluation has
    seen.
    """

    def body(run: Run) -> tuple[Tensor, list[float]]:
        model = build()
        opt = optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 4, gamma=0.5)
        model, opt, scheduler, loader = run.prepare(
            model, opt, scheduler, batches(), cut=cut if run.size > 1 else None, **options
        )
        evaluation = run.prepare(batches(), train=False)
        seen = []
        for _ in run.epochs(2):
            for x, y in loader:
                step(run, model, opt, x, y)
                scheduler.step()
            model.eval()
            with torch.no_grad():
                losses = sum(float(F.mse_loss(model(x), y, reduction="sum")) for x, y in evaluation)
                seen.append(float(run.mean(losses, weight=1.0)) * run._context.group.size)
            model.train()
        return whole(run, model), seen

    return body


def same(
    body: Callable[[Any], Callable[[Run], Any]],
    zero: Any,
    size: int,
    mesh: str,
    *,
    bound: float = 1e-10,
    **options: Any,
) -> None:
    wanted, losses = alone(body(None))
    for found, seen in workers(size, body(pl.shard("1", zero=zero)), mesh=mesh, **options):
        assert distance(found, wanted) < bound
        assert seen == pytest.approx(losses, rel=1e-9)


@pytest.mark.each_choice
@STAGES
@pytest.mark.parametrize(("size", "mesh"), [(2, "shard"), (3, "shard"), (4, "data=2, shard=2")])
def test_a_plain_loop(zero: Any, size: int, mesh: str) -> None:
    same(loop, zero, size, mesh)


@STAGES
def test_uneven_shares(zero: Any) -> None:
    same(
        lambda cut: loop(cut, **({} if cut is None else {"shares": [3, 0, 1, 2]})),
        zero,
        4,
        "data=2, shard=2",
    )


@STAGES
def test_clipping(zero: Any) -> None:
    def step(
        run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
    ) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        assert run.clip(model, 0.05) > 0.05  # type: ignore[operator]
        optimizer.step()

    same(
        lambda cut: loop(cut, step, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.5)),
        zero,
        4,
        "data=2, shard=2",
    )


@STAGES
def test_no_sync(zero: Any) -> None:
    def step(
        run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
    ) -> None:
        optimizer.zero_grad()
        with run.no_sync():
            (F.mse_loss(model(x), y) / 2).backward()
        (F.mse_loss(model(2 * x), y) / 2).backward()
        optimizer.step()

    same(lambda cut: loop(cut, step), zero, 2, "shard")


@STAGES
def test_batchnorm_over_the_global_batch(zero: Any) -> None:
    same(lambda cut: loop(cut, build=normed), zero, 2, "shard", bound=1e-9)


@pytest.mark.each_choice
@STAGES
@pytest.mark.parametrize("sync", [pl.LocalSGD(every=2), pl.AllReduce(codec=pl.int8())])
def test_strategies_between_replicas(zero: Any, sync: Any) -> None:
    found = workers(4, loop(pl.shard("1", zero=zero)), mesh="data=2, shard=2", strategy=sync)
    first, losses = found[0]
    assert all(torch.equal(values, first) and seen == losses for values, seen in found)
    assert losses[-1] < alone(loop(None))[1][0]


@pytest.mark.parametrize(
    "strategy", [pl.LocalSGD(2), pl.Sequence((pl.AllReduce(), "local"), (pl.LocalSGD(2), "host"))]
)
def test_a_replica_that_is_shared_out_counts_as_one_worker(strategy: Any) -> None:
    """Its gradients are means over the samples of all its workers, one of which has none, and it
    weighs in a round by them.
    """
    # which no factor of a gradient is lost on
    gentle: dict[str, Any] = {"optimizer": lambda ps: torch.optim.SGD(ps, lr=0.1)}
    wanted, _ = workers(2, loop(None, shares=[6, 2], **gentle), strategy=pl.LocalSGD(2))[0]
    found = workers(
        4,
        loop(pl.shard("1"), shares=[5, 1, 2, 0], **gentle),
        mesh="data=2, shard=2",
        strategy=strategy,
        hosts=(0, 0, 1, 1),
    )
    assert all(distance(values, wanted) < 1e-12 for values, _ in found)


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="Adafactor may look at whole parameters"):
        workers(2, loop(pl.shard(zero=2), optimizer=torch.optim.Adafactor), mesh="shard")
    with pytest.raises(UsageError, match=r"is cut by shard\(\) already; cut each model once"):
        workers(2, loop([pl.shard(zero=2), pl.shard(zero=1)]), mesh="shard")


def test_what_nothing_sums_is_refused() -> None:
    """Parameters beside the model that is cut, and those that come to be trained after it was."""

    def beside(run: Run) -> None:
        model, head = net(), nn.Linear(2, 2).double()
        run.prepare(model, cut=pl.shard())
        with pytest.raises(
            UsageError,
            match=(
                r"weight is trained, but its model isn't cut along `shard`.*run.prepare\(model, "
                r"..., cut="
            ),
        ):
            run.prepare(head, sgd(head))

    workers(2, beside, mesh="shard=2")

    def later(run: Run) -> None:
        model = net()
        model[0].requires_grad_(False)  # type: ignore[index]
        run.prepare(model, sgd(model), cut=pl.shard(zero=1))
        model[0].requires_grad_(True)  # type: ignore[index]
        with pytest.raises(
            UsageError,
            match=r"0.weight was frozen when the model was cut by shard\(\), and is trained now",
        ):
            model(torch.ones(1, 6, dtype=torch.float64))

    workers(2, later, mesh="shard=2")


@STAGES
@pytest.mark.parametrize(("size", "mesh"), [(2, "shard"), (3, "shard"), (4, "data=2, shard=2")])
def test_groups_that_an_optimizer_gets_while_it_trains(zero: Any, size: int, mesh: str) -> None:
    """Unfreezing by and by: what the model had from the start comes to the optimizer later, with
    a gradient already.
    """

    def body(cut: Any) -> Callable[[Run], tuple[Tensor, list[float]]]:
        turns = list[int]()

        def step(
            run: Run, model: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
        ) -> None:
            if run.steps in (2, 4):
                layer = model[0] if run.steps == 2 else model[1][1]
                optimizer.add_param_group({"params": layer.parameters(), "lr": 0.05})
            plain(run, model, optimizer, x, y)
            assert len(
                {id(p) for group in optimizer.param_groups for p in group["params"]}
            ) == 2 * len(optimizer.param_groups)
            turns.append(run.steps)

        return loop(
            cut, step, optimizer=lambda ps: torch.optim.SGD(list(ps)[-2:], lr=0.1, momentum=0.9)
        )

    same(body, zero, size, mesh)


@STAGES
def test_what_an_optimizer_may_not_get_while_it_trains(zero: Any) -> None:
    def body(run: Run) -> None:
        model, other = net(), nn.Linear(2, 2).double()
        model, optimizer, loader = run.prepare(
            model, sgd(model), batches(), cut=pl.shard("1", zero=zero)
        )
        for x, y in loader:
            plain(run, model, optimizer, x, y)
            with pytest.raises(ValueError, match="more than one parameter group"):
                optimizer.add_param_group({"params": model[0].weight})
            with pytest.raises(TypeError):
                optimizer.add_param_group({"params": set(other.parameters())})
            optimizer.add_param_group({"params": list(other.parameters())})
            plain(run, model, optimizer, x, y)

    with pytest.raises(
        UsageError,
        match=r"was added to the SGD after run.prepare \(add_param_group\); give the model and the optimizer to",  # noqa: E501
    ):
        workers(2, body, mesh="shard")


def test_an_optimizer_that_was_not_prepared_is_checked_again_when_it_gets_more() -> None:
    def body(run: Run) -> None:
        model, other = net(), nn.Linear(2, 2).double()
        model, optimizer, loader = run.prepare(
            model, sgd(model), batches(), cut=pl.shard("1", zero=1)
        )
        beside = sgd(other)
        for x, y in loader:
            plain(run, model, optimizer, x, y)
            beside.step()
            beside.param_groups[0]["params"] += list(model.parameters())
            beside.step()

    with pytest.raises(
        UsageError,
        match=r"SGD has the whole parameter 0.weight, and each worker steps a piece of it",
    ):
        workers(2, body, mesh="shard")
