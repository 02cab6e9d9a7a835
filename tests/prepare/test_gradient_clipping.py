"""Torch's own clipping between backward and step: of gradients that are whole, whatever they are
exchanged by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.errors import UsageError
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness.models import fill, net, sgd
from tests.harness.runs import alone, batches, distance, parameters, workers

Clip = Callable[[nn.Module], Any]


def by_norm(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def by_given_norm(model: nn.Module) -> None:
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)


def train(run: Run, clip: Clip, *, first_alone: bool = False) -> Tensor:
    model = net()
    model, optimizer, loader = run.prepare(model, sgd(model), batches(24))
    for x, y in loader:
        if run.is_first or not first_alone:
            F.mse_loss(model(x), y).backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


def test_who_has_made_no_backward_clips_what_the_others_have() -> None:
    one, other = workers(2, lambda run: train(run, by_norm, first_alone=True))
    assert distance(one, other) == 0


def test_servers_clip_the_gradient_of_all() -> None:
    wanted = alone(lambda run: train(run, by_norm))
    found = workers(2, lambda run: train(run, by_norm), strategy=ParameterServer())
    assert distance(found[0], wanted) < 1e-12


@pytest.mark.parametrize("clip", [by_value, by_given_norm])
def test_servers_do_not_clip_each_gradient(clip: Clip) -> None:
    with pytest.raises(
        UsageError,
        match=(
            "_ would clip this worker's own gradients, but with ParameterServer only servers have"
        ),
    ):
        workers(2, lambda run: train(run, clip), strategy=ParameterServer())


CUTS = pytest.mark.parametrize(
    ("mesh", "cut"),
    [
        ("tensor=2", [pl.tensor({"0": pl.column(), "2": pl.row()})]),
        ("data=2, tensor=2", [pl.tensor({"0": pl.column(), "2": pl.row()})]),
        ("stage=2", [pl.pipeline("0, 1, 2", micro_batches=2)]),
        *(("shard=2", [pl.shard("0", zero=zero)]) for zero in (1, 2, 3)),
    ],
    ids=["tensor", "replicas of tensor", "stage", "zero=1", "zero=2", "zero=3"],
)


@CUTS
def test_where_a_model_is_cut_the_norm_is_that_of_all_parts(mesh: str, cut: Any) -> None:
    def body(run: Run, cut: Any) -> tuple[list[float], Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        fill(model)
        model, optimizer, loader = run.prepare(model, sgd(model), batches(24), cut=cut)
        norms = []
        for x, y in loader:
            run.step(model, x, y, loss=F.mse_loss)
            norms.append(float(by_norm(model)))
            optimizer.step()
            optimizer.zero_grad()
        return norms, run.forward(model, torch.ones(1, 6, dtype=torch.float64))

    norms, answer = alone(lambda run: body(run, None))
    for found, said in workers(4 if "," in mesh else 2, lambda run: body(run, cut), mesh=mesh):
        assert found == pytest.approx(norms, rel=1e-9)
        assert torch.allclose(said, answer, rtol=1e-9, atol=0)


@CUTS
def test_a_norm_that_has_to_be_finite_and_is_not_raises_on_all_workers(mesh: str, cut: Any) -> None:
    """One worker along the axis has such a gradient, in a part of the first layer."""

    def body(run: Run, cut: Any) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        fill(model)
        model, optimizer, loader = run.prepare(model, sgd(model), batches(24), cut=cut)
        raised = 0
        for number, (x, y) in enumerate(loader):
            run.step(model, x, y, loss=F.mse_loss)
            first = optimizer.param_groups[0]["params"][0]
            if (
                number == 1
                and first.grad is not None
                and run.rank in (0, run.size // 2 if "data" in mesh else 0)
            ):
                first.grad[..., :1] = torch.inf
            try:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05, error_if_nonfinite=True)
                optimizer.step()
            except RuntimeError as error:
                assert "is non-finite, so it cannot be clipped" in str(error)
                raised += 1
            optimizer.zero_grad()
        return raised, run.forward(model, torch.ones(1, 6, dtype=torch.float64))

    raised, answer = alone(lambda run: body(run, None))
    assert raised == 1
    for found, said in workers(4 if "," in mesh else 2, lambda run: body(run, cut), mesh=mesh):
        assert found == 1 and torch.allclose(said, answer, rtol=1e-9, atol=0)


@CUTS
def test_where_a_model_is_cut_no_worker_takes_the_norm_of_its_own_parts(
    mesh: str, cut: Any
) -> None:
    def body(run: Run, measure: Callable[[nn.Module], Tensor]) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        fill(model)
        model, optimizer, loader = run.prepare(
            model, sgd(model), batches(24), cut=cut if run.size > 1 else None
        )
        for x, y in loader:
            run.step(model, x, y, loss=F.mse_loss)
            if run.size > 1:
                with pytest.raises(
                    UsageError,
                    match=r"call nn\.utils\.clip_grad_norm_\(model.parameters\(\), max_norm\) or run",  # noqa: E501
                ):
                    by_given_norm(model)
            norm = measure(model)
            nn.utils.clip_grads_with_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], 0.05, norm
            )
            optimizer.step()
            optimizer.zero_grad()
        found: Tensor = run.forward(model, torch.ones(1, 6, dtype=torch.float64))
        return found

    def measured(model: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), math.inf)

    answer = alone(lambda run: body(run, measured))
    for said in workers(4 if "," in mesh else 2, lambda run: body(run, measured), mesh=mesh):
        assert torch.allclose(said, answer, rtol=1e-9, atol=0)


def test_gradients_that_workers_have_whole_have_their_norm() -> None:
    def body(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        run.prepare(model, sgd(model), cut=pl.tensor({"0": pl.column(), "2": pl.row()}))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert float(nn.utils.get_total_norm(model[2].bias.grad)) == pytest.approx(2**0.5)  # type: ignore[arg-type]
        with pytest.raises(
            UsageError,
            match=(
                r"get_total_norm of the gradient of 0.weight .* this worker's part alone, .* along "
                r"`tensor`"
            ),
        ):
            nn.utils.get_total_norm(model[0].weight.grad)  # type: ignore[arg-type]

    workers(2, body, mesh="tensor=2")


@pytest.mark.parametrize(("zero", "mesh"), [(1, "shard"), (2, "shard"), (2, "data=2, shard=2")])
def test_clipping_that_finds_no_gradients_while_pieces_have_them_is_refused(
    zero: Any, mesh: str
) -> None:
    def acts(model: nn.Module) -> dict[str, Callable[[], Any]]:
        found = [p for p in model.parameters() if p.grad is not None]
        return {
            "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(found, 0.05),
            "get_total_norm": lambda: nn.utils.get_total_norm(found),
            "clip_grads_with_norm_": lambda: nn.utils.clip_grads_with_norm_(
                model.parameters(), 0.05, torch.tensor(9.0)
            ),
        }

    def body(run: Run) -> None:
        model = net()
        model, optimizer, loader = run.prepare(
            model, sgd(model), batches(8), cut=pl.shard(zero=zero)
        )
        acts(model)["clip_grads_with_norm_"]()  # there are none anywhere
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            for name, act in acts(model).items():
                with pytest.raises(
                    UsageError,
                    match=(
                        rf"{name} was given no gradient and would do nothing: "
                        r"a model is cut by shard"
                    ),
                ):
                    act()
            plain = nn.Linear(2, 2)
            plain(torch.ones(1, 2)).sum().backward()
            assert float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1)) == pytest.approx(6**0.5)
            optimizer.step()
            optimizer.zero_grad()

    workers(4 if "," in mesh else 2, body, mesh=mesh)


def test_servers_have_a_norm_that_has_to_be_finite() -> None:
    def body(run: Run) -> None:
        model = net()
        model, _, loader = run.prepare(model, sgd(model), batches(24))
        for x, y in loader:
            (F.mse_loss(model(x), y) * torch.inf).backward()
            with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.05, error_if_nonfinite=True)
            return

    workers(2, body, strategy=ParameterServer())


def test_inside_of_no_sync_gradients_are_not_there_yet() -> None:
    def body(run: Run) -> None:
        model = net()
        model, _, loader = run.prepare(model, sgd(model), batches(8))
        for x, y in loader:
            with run.no_sync():
                F.mse_loss(model(x), y).backward()
                by_norm(model)

    with pytest.raises(
        UsageError,
        match=r"clip_grad_norm_ inside run.no_sync\(\) would use gradients before their exchange",
    ):
        workers(2, body)
