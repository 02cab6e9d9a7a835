"""Whole parameters of cut models: read, changed, and given gradients as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.models import fill
from tests.harness.runs import alone, batches, distance, workers
from tests.harness.sharded import put_together

LAYERS = pl.tensor({"0": pl.column(), "2": pl.row()})
CUTS = pytest.mark.parametrize(
    ("mesh", "cut"),
    [
        ("tensor=2", LAYERS),
        *(
            (mesh, pl.shard(zero=zero))
            for zero in (1, 2, 3)
            for mesh in ("shard=2", "data=2, shard=2")
        ),  # type: ignore[arg-type]
        *(("shard=2, tensor=2", [LAYERS, pl.shard("2", zero=zero)]) for zero in (2, 3)),  # type: ignore[arg-type]
        ("data=2", None),
    ],
)
Act = Callable[[Run, Any], None]


def size_of(mesh: str) -> int:
    size = 1
    for part in mesh.split(", "):
        size *= int(part.partition("=")[2])
    return size


def trained(cut: Any, act: Act, *, after: bool = False) -> Callable[[Run], Tensor]:
    def body(run: Run) -> Tensor:
        model: Any = fill(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        cut_here = cut if run.size > 1 else None
        model, optimizer, loader = run.prepare(model, optimizer, batches(24, 8), cut=cut_here)
        for _ in run.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                if not after:
                    act(run, model)
                optimizer.step()
                if after:
                    act(run, model)
        found = run._prepared.cuts
        return put_together(
            model, run._axes.groups.everyone, found.placements, found.trained_tensor
        )

    return body


def same(mesh: str, cut: Any, act: Act, *, after: bool = False) -> None:
    wanted = alone(trained(cut, act, after=after))
    plain = alone(trained(cut, lambda run, model: None))
    assert distance(plain, wanted) > 1e-3
    for found in workers(size_of(mesh), trained(cut, act, after=after), mesh=mesh):
        assert distance(found, wanted) < 1e-10


@CUTS
@pytest.mark.parametrize("after", [True, False])
def test_rows_that_are_changed(mesh: str, cut: Any, after: bool) -> None:
    def act(run: Run, model: Any) -> None:
        for layer in (model[0], model[2]):
            with run.whole(layer.weight) as weight, torch.no_grad():
                assert weight.shape == (layer.out_features, layer.in_features) or run.size > 1
                weight.div_(weight.norm(dim=-1, keepdim=True))

    same(mesh, cut, act, after=after)


@CUTS
def test_penalties_on_whole_weights(mesh: str, cut: Any) -> None:
    def act(run: Run, model: Any) -> None:
        with run.whole(model) as wholes:
            assert list(wholes) == ["0.weight", "0.bias", "2.weight", "2.bias"]
            for name in ("0.weight", "2.weight"):
                w = wholes[name]
                (0.05 * (w @ w.T - torch.eye(len(w))).square().sum()).backward()

    same(mesh, cut, act)


@CUTS
def test_gradients_that_are_clipped_one_by_one(mesh: str, cut: Any) -> None:
    def act(run: Run, model: Any) -> None:
        with run.whole(model) as wholes:
            for whole in wholes.values():
                assert whole.grad is not None
                whole.grad.mul_(0.1 / whole.grad.norm())

    same(mesh, cut, act)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_an_optimizer_steps_and_gradients_that_are_taken_off(zero: Any) -> None:
    def act(run: Run, model: Any) -> None:
        optimizer = run._prepared.optimizers[0]
        with run.whole(optimizer.param_groups[0]["params"][0]) as weight, torch.no_grad():
            weight.mul_(0.5)
        with run.whole(model[2].bias) as bias:
            bias.grad = None

    same("shard=2", pl.shard(zero=zero), act)


@pytest.mark.parametrize("mesh", ["stage=2", "stage=2, tensor=2"])
def test_layers_of_other_stages(mesh: str) -> None:
    def body(run: Run) -> list[Tensor]:
        model: Any = fill(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 2)).double()
        )
        cut = (
            [pl.pipeline("0, 1, 2, 3", split=[3, 1]), *([LAYERS] if "tensor" in mesh else [])]
            if run.size > 1
            else None
        )
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batches(24, 8), cut=cut
        )
        for x, y in loader:
            run.step(model, x, y, loss=nn.functional.mse_loss)
            with run.whole(model) as wholes:
                for name in ("0.weight", "2.weight", "3.weight"):
                    (0.05 * (wholes[name] @ wholes[name].T).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with run.whole(model) as wholes:
            return [whole.detach().clone() for whole in wholes.values()]

    wanted = alone(body)
    for found in workers(size_of(mesh), body, mesh=mesh):
        assert all(
            distance(mine, theirs) < 1e-10 for mine, theirs in zip(found, wanted, strict=True)
        )


def test_before_the_first_step_and_after_an_error() -> None:
    def body(run: Run) -> Tensor:
        model: Any = fill(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double())
        run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), cut=LAYERS if run.size > 1 else None
        )
        with run.whole(model[0].weight) as weight:
            nn.init.orthogonal_(weight, generator=torch.Generator().manual_seed(run.seed))
        with pytest.raises(ZeroDivisionError), run.whole(model[0].weight) as weight:
            weight.data.zero_()
            raise ZeroDivisionError
        with run.whole(model[0].weight) as weight:
            return weight.detach().clone()

    wanted = alone(body)
    assert distance(wanted.T @ wanted, torch.eye(6, dtype=torch.float64)) < 1e-12
    assert all(torch.equal(found, wanted) for found in workers(2, body, mesh="tensor"))


def test_what_is_refused() -> None:
    def body(run: Run, strategy: Any = None) -> None:
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            cut=LAYERS if strategy is None else None,
        )
        with pytest.raises(UsageError, match=r"run.whole got a Tensor"), run.whole(torch.ones(2)):  # type: ignore[call-overload]
            pass
        with run.whole(model[0].weight) as weight, torch.no_grad():
            weight.add_(run.rank)

    with pytest.raises(
        UsageError, match=r"run.whole: workers have left different values or gradients of 0.weight"
    ):
        workers(2, body, mesh="tensor")
    with pytest.raises(UsageError, match="with ParameterServer they are on servers"):
        workers(2, lambda run: body(run, "server"), strategy=pl.ParameterServer(servers=1))


@pytest.mark.parametrize("zero", [1, 2])
def test_penalties_in_the_loss_where_parameters_stay_whole(zero: Any) -> None:
    def body(run: Run) -> Tensor:
        model: Any = fill(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(
            model, optimizer, batches(24, 8), cut=pl.shard(zero=zero) if run.size > 1 else None
        )
        for x, y in loader:
            optimizer.zero_grad()
            w = model[0].weight
            (nn.functional.mse_loss(model(x), y) + 0.05 * (w @ w.T).square().sum()).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    wanted = alone(body)
    assert all(distance(found, wanted) < 1e-12 for found in workers(3, body, mesh="shard"))
