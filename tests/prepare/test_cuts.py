"""Cuts of a run: read as objects and as text, applied one after the other, and known by what
they have made of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import paceline as pl
from paceline.cluster.mesh import lay_out_mesh
from paceline.cluster.topology import HostRanks, Topology
from paceline.comm.agreement import Agreement
from paceline.comm.solo import SoloGroup
from paceline.errors import NotationError, UsageError
from paceline.parallel.cut import CutContext
from paceline.parallel.shard import shard
from paceline.prepare.cuts import ModelCuts, read_cuts
from paceline.prepare.initial import InitialValues
from paceline.session.run import Run
from paceline.sync.base import Slot
from paceline.sync.context import SyncContext
from paceline.sync.localsgd.strategy import LocalSGD
from paceline.workers.axes import RunAxes
from tests.harness.models import fill
from tests.harness.runs import alone, batches, distance, parameters, workers
from tests.harness.sharded import put_together

ALONE = Topology((HostRanks("here", (0,), "127.0.0.1"),))


class half:
    """Replaces a layer's weight by its first rows, or has optimizers step a piece of it while
    the whole stays.
    """

    travels = "nothing"

    def __init__(self, axis: str, *, piece: bool = False) -> None:
        self.axis, self.piece, self.ended = axis, piece, 0

    def apply(self, model: nn.Module, context: CutContext) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                old = module.weight
                rows = old.shape[0] // 2
                new = Parameter(old.detach()[:rows].clone())
                placement = context.placements.placement_of(old).cut_dim(0, [(0, rows)], self.axis)
                if self.piece:
                    context.replace_parameter(old, new, placement)
                else:
                    context.placements.replace_tensor(old, new, placement)
                    module.weight = new
        context.close_callbacks.append(self.end)

    def end(self) -> None:
        self.ended += 1


def cuts(override: str | None = None) -> ModelCuts:
    context = SyncContext(SoloGroup(), Agreement(SoloGroup()))
    mesh = lay_out_mesh({"data": 1, "shard": 1, "tensor": 1}, ALONE)
    return ModelCuts(RunAxes.from_mesh(mesh, context, ALONE), 3, override)


class Sparing(torch.optim.Adafactor):
    pass


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Sparing, torch.optim.Muon])
def test_optimizers_that_fail_on_what_other_stages_have_are_refused_on_all(
    kind: type[torch.optim.Optimizer],
) -> None:
    refusals = list[str]()

    def body(run: Run, late: bool) -> None:
        model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
        optimizer = kind(model.parameters())
        try:
            if late:
                run.prepare(model, cut=pl.pipeline("0, 1, 2, 3", split=[1, 3]))
                run.prepare(optimizer)
            else:
                run.prepare(model, optimizer, cut=pl.pipeline("0, 1, 2, 3", split=[1, 3]))
        except UsageError as error:
            refusals.append(str(error))
            raise

    for late in (False, True):
        with pytest.raises(
            UsageError,
            match=f"{kind.__name__} needs whole matrices, and fails on those that other stages",
        ):
            workers(2, lambda run, late=late: body(run, late), mesh="stage=2")  # type: ignore[misc]
    assert len(refusals) == 4
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    workers(2, lambda run: run.prepare(model, kind(model.parameters())))  # whole models have them


class Normalised(torch.optim.AdamW):
    """Brings each gradient to the norm 1 before it steps."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad = p.grad / p.grad.norm()
        return super().step(closure)


class LARS(torch.optim.Optimizer):
    """A step by the norm of each parameter, as scripts copy it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})


def replaced(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, 0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


PARTS = pytest.mark.parametrize(
    ("axis", "cut"),
    [
        ("tensor", pl.tensor({"0": pl.column(), "1": pl.row()})),
        *(("shard", shard(zero=zero)) for zero in (1, 2, 3)),
    ],
)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


@PARTS
@pytest.mark.parametrize(
    "kind", [torch.optim.Adafactor, torch.optim.Muon, Normalised, LARS, replaced]
)
def test_optimizers_that_may_look_at_whole_parameters_are_refused_where_workers_have_parts(
    axis: str, cut: Any, kind: Any
) -> None:
    def body(run: Run) -> None:
        model = two_layers()
        run.prepare(model, kind(model.parameters()), cut=cut)

    name = "SGD" if kind is replaced else kind.__name__
    with pytest.raises(
        UsageError,
        match=rf"{name} may look at whole parameters, .* a part of 0.weight.*pl.elementwise\({name}\)",  # noqa: E501
    ):
        workers(2, body, mesh=f"{axis}=2")


@PARTS
def test_one_that_steps_inside_of_another_or_got_a_parameter_later_is_refused_as_well(
    axis: str, cut: Any
) -> None:
    @pl.elementwise
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    class Inner(torch.optim.SGD):
        """May do anything."""

    def within(run: Run, kind: Any = Inner) -> None:
        model = two_layers()
        run.prepare(model, optimizer := Around(kind(model.parameters(), 0.1)), cut=cut)
        optimizer.step()

    def later(run: Run) -> None:
        model = nn.Sequential(*two_layers(), nn.Linear(4, 4))
        model, optimizer = run.prepare(model, Inner(model[2].parameters(), 0.1), cut=cut)
        optimizer.add_param_group({"params": model[0].weight})
        optimizer.step()

    workers(2, lambda run: within(run, torch.optim.SGD), mesh=f"{axis}=2")
    for body in (within, later):
        with pytest.raises(UsageError, match="Inner may look at whole parameters"):
            workers(2, body, mesh=f"{axis}=2")


@PARTS
def test_optimizers_that_are_vouched_for(axis: str, cut: Any) -> None:
    @pl.elementwise
    class Lion(torch.optim.Optimizer):
        """Steps by signs (Chen et al. 2023)."""

        def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None:
                    held = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.add_((0.9 * held + 0.1 * p.grad).sign(), alpha=-0.01)
                    held.lerp_(p.grad, 0.01)

    class Derived(Lion):
        """May do anything."""

    def body(run: Run, kind: Any = Lion) -> Tensor:
        model = fill(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)).double())
        model, optimizer, loader = run.prepare(
            model, kind(model.parameters()), batches(16, 8), cut=cut if run.size > 1 else None
        )
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        found = run._prepared.cuts
        return put_together(model, run.group, found.placements, found.trained_tensor)

    wanted = alone(body)
    assert all(distance(found, wanted) < 1e-12 for found in workers(2, body, mesh=f"{axis}=2"))
    with pytest.raises(UsageError, match="Derived may look at whole parameters"):
        workers(2, lambda run: body(run, Derived), mesh=f"{axis}=2")


class Plain(torch.optim.SGD):
    """Needs no learning rate."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, 0.1)


class SAM(Plain):
    """As other libraries have it: a step by the norm of all gradients."""


class Prodigy(Plain):
    """As other libraries have it: a step size from sums over all parameters."""


@pytest.mark.parametrize("kind", [SAM, Prodigy])
@pytest.mark.parametrize(
    ("axis", "cut"),
    [
        ("tensor", pl.tensor({"0": pl.column(), "1": pl.row()})),
        ("stage", pl.pipeline("0, 1")),
        *(("shard", shard(zero=zero)) for zero in (1, 2, 3)),
    ],
)
def test_optimizers_of_one_number_over_all_parameters_are_refused(
    axis: str, cut: Any, kind: type[Plain]
) -> None:
    def body(run: Run) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        run.prepare(model, kind(model.parameters()), cut=cut)

    with pytest.raises(
        UsageError,
        match=(
            f"{kind.__name__} computes one number .* over all parameters, and each worker along "
            f"`{axis}` would"
        ),
    ):
        workers(2, body, mesh=f"{axis}=2")


def test_cuts_are_read_as_objects_and_as_text() -> None:
    shard, tensor = (
        pl.shard("blocks.*", zero=2),
        pl.tensor({"a.*": pl.column(parts=3)}, divide=["a.heads"]),
    )
    assert read_cuts(shard) == (shard,) and read_cuts([tensor, shard]) == (tensor, shard)
    assert read_cuts(f"{tensor}, {shard}") == (tensor, shard) and read_cuts(repr(shard)) == (shard,)
    with pytest.raises(NotationError, match="AllReduce is not a word of the notation"):
        read_cuts("AllReduce()")
    with pytest.raises(
        UsageError, match=r"cut=column\(parts=1, gather=False\) is no cut|cut=column\(\) is no cut"
    ):
        read_cuts("column()")


def test_the_command_line_replaces_what_the_script_says() -> None:
    assert cuts('shard("0")').choose_cuts(pl.shard("1")) == (pl.shard("0"),)
    assert cuts().choose_cuts(pl.shard("1")) == (pl.shard("1"),) and cuts().choose_cuts(None) == ()


def test_one_after_the_other_and_optimizers_follow() -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4))
    weights = [model[0].weight, model[1].weight]
    optimizer = torch.optim.SGD(
        [{"params": weights}, {"params": [model[0].bias, model[1].bias], "lr": 3.0}], lr=0.1
    )
    made, first, second = cuts(), half("tensor"), half("shard", piece=True)
    initial = InitialValues([("m.", model)], None, 3, torch.device("cpu"))
    assert made.apply_cuts([("m.", model)], [first, second], [optimizer], initial) == []
    made.repoint_optimizers([optimizer])
    pieces = optimizer.param_groups[0]["params"]
    assert [tuple(piece.shape) for piece in pieces] == [(2, 2), (1, 8)]
    assert [tuple(layer.weight.shape) for layer in model] == [(4, 2), (2, 8)]
    assert [(p.name, p.axes, p.local) for p in map(made.placements.placement_of, pieces)] == [
        ("m.0.weight", ("tensor", "shard"), (2, 2)),
        ("m.1.weight", ("tensor", "shard"), (1, 8)),
    ]
    assert (
        made.replacement_of(weights[0]) is pieces[0] is made.trained_tensor(model[0].weight)
        and made.replacement_of(model[0].bias) is None
    )
    assert optimizer.param_groups[1] == {
        **optimizer.param_groups[1],
        "lr": 3.0,
        "params": [model[0].bias, model[1].bias],
    }

    slots = list(
        made.replace_slots(
            [
                Slot("x", model[0].weight, None),
                Slot("y", pieces[0], None),
                Slot("m.0.bias", model[0].bias, None),
            ]
        )
    )
    assert [(slot.name, slot.parameter is pieces[0], slot.shard) for slot in slots] == [
        ("m.0.weight", True, ("tensor", "shard")),
        ("m.0.bias", False, ()),
    ]
    made.end_cuts()
    made.end_cuts()
    assert (first.ended, second.ended) == (1, 1)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_momentum_of_parts_is_averaged_between_replicas(zero: Literal[1, 2, 3]) -> None:
    """Strategies know the optimizer of a part, though no model has that parameter."""

    def body(run: Run) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, loader = run.prepare(
            model, optimizer, batches(16, 8), cut=shard(zero=zero)
        )
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return [state["momentum_buffer"].clone() for state in optimizer.state.values()]

    found = workers(4, body, mesh="data=2, shard=2", strategy=LocalSGD(2, momentum="averaged"))
    for one, other in ((0, 2), (1, 3)):
        pairs = list(zip(found[one], found[other], strict=True))
        assert pairs and all(torch.equal(mine, theirs) for mine, theirs in pairs)


def by_shape(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer as many scripts make it: what has one dimension doesn't decay."""
    groups = [[p for p in model.parameters() if (p.dim() > 1) == large] for large in (True, False)]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.5}, {"params": groups[1], "weight_decay": 0.0}],
        lr=0.1,
    )


@pytest.mark.parametrize("prepared", [False, True])
def test_an_optimizer_that_was_made_after_its_model_was_cut_is_refused(prepared: bool) -> None:
    """It has found flat pieces, of which none would decay."""

    def body(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        first = by_shape(model)
        model, first, loader = run.prepare(model, first, batches(16, 8), cut=shard(zero=3))
        assert [len(group["params"]) for group in first.param_groups] == [2, 2]
        for number, (x, y) in enumerate(loader):
            nn.functional.mse_loss(model(x), y).backward()
            first.step()
            run.prepare(first)
            if number:
                with pytest.raises(
                    UsageError,
                    match=(
                        r"AdamW steps 0.weight, .*: make the optimizer before run.prepare, and "
                        r"give it to the"
                    ),
                ):
                    run.prepare(by_shape(model)) if prepared else by_shape(model).step()

    workers(2, body, mesh="shard")


@pytest.mark.parametrize("zero", [1, 2])
def test_an_optimizer_that_was_made_of_whole_parameters_is_as_good_later(
    zero: Literal[1, 2],
) -> None:
    def body(run: Run) -> Tensor:
        model = fill(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double())
        model, loader = run.prepare(
            model, batches(16, 8), cut=shard(zero=zero) if run.size > 1 else None
        )
        optimizer = run.prepare(by_shape(model))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return parameters(model)

    wanted = alone(body)
    assert all(distance(found, wanted) < 1e-12 for found in workers(2, body, mesh="shard"))
