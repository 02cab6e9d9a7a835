"""The memory of units: what each worker holds, to the byte, and in which precision."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.cluster.mesh import lay_out_mesh
from paceline.comm.axis_groups import AxisGroups
from paceline.errors import UsageError
from paceline.parallel.cut import CutContext
from paceline.parallel.initialise import Blueprint
from paceline.parallel.meta import meta
from paceline.parallel.placement import Placements
from paceline.parallel.shard import shard
from tests.harness.models import fill
from tests.harness.runs import distance
from tests.harness.sharded import (
    Kept,
    Trainee,
    alone_with,
    fitting,
    one_host,
    put_together,
    refused,
    same,
    train,
)
from tests.harness.sharded_models import OddNet, odd_net, vectors
from tests.harness.thread_groups import ThreadGroup, spawn


def held(tensors: Iterable[Tensor]) -> int:
    """The bytes of the memory in which tensors lie."""
    return sum(
        {
            storage.data_ptr(): storage.nbytes()
            for storage in map(Tensor.untyped_storage, tensors)
            if storage.nbytes()
        }.values()
    )


STAGES = pytest.mark.parametrize("zero", [1, 2, 3])


@STAGES
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_the_formula(zero: Any, size: int) -> None:
    def body(group: ThreadGroup) -> None:
        model, made = alone_with(group, odd_net, shard("blocks.*", zero=zero))
        made.gradients.deliver_to(Kept())
        pieces = [piece for _, piece, _ in made.iterate_pieces()]
        optimizer = torch.optim.AdamW(pieces, fused=True)
        x, y = vectors(group.rank)
        F.mse_loss(model(x), y).backward()
        made.gradients.end_pass()  # as a tracker does
        optimizer.step()
        flats = [
            sum(p.numel() for p in part.parameters())
            for part in [*model.blocks, nn.ModuleList([model.inward, model.head])]
        ]  # type: ignore[union-attr, list-item, misc, arg-type]
        if zero == 3:  # the model has pieces by now
            flats = [
                sum(p.numel() for p in part.parameters())
                for part in [*whole.blocks, nn.ModuleList([whole.inward, whole.head])]
            ]
        parts = [-(-flat // size) for flat in flats]
        padded, part = 8 * size * sum(parts), 8 * sum(parts)
        mine = 8 * sum(piece.numel() for piece in pieces)  # a piece has no padding
        assert part - 8 * len(flats) * (size - 1) <= mine <= part
        assert held(p for memory in made.memories for p in (*memory.wholes, *memory.pieces)) == (
            part if zero == 3 else padded
        )
        assert held(piece.grad for piece in pieces if piece.grad is not None) == part
        assert made.gradients.nbytes == (padded if zero == 1 else 0)
        moments = [
            value
            for state in optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ]
        assert sum(value.numel() * 8 for value in moments) == 2 * mine

    whole = OddNet()
    spawn(size, body)


@pytest.mark.parametrize("reduce", [None, "float32"])
def test_mixed_precision(reduce: Any) -> None:
    """Parameters are gathered in bfloat16 and stepped in float32: close to one process in
    float32, and not equal to it.
    """

    def step(one: Trainee, number: int) -> None:
        x, y = (t.float() for t in one.batch(*vectors(number)))
        one.optimizer.zero_grad()
        out = one.model(x)
        assert out.dtype == (torch.float32 if one.size == 1 else torch.bfloat16)
        F.mse_loss(out.float(), y).backward()
        assert all(
            p.grad is not None and p.grad.dtype == torch.float32
            for group in one.optimizer.param_groups
            for p in group["params"]
        )
        one.optimizer.step()

    wanted = train(1, lambda: fill(OddNet()).float(), step, None)[0][0]
    for values, _ in train(
        2, lambda: fill(OddNet()).float(), step, shard("blocks.*", params="bfloat16", reduce=reduce)
    ):
        assert 1e-5 < distance(values, wanted) < 0.03


def test_what_changes_after_the_cut_is_refused() -> None:
    def step(one: Trainee, number: int) -> None:
        next(one.model.parameters()).requires_grad_(False)
        one.model(vectors(0)[0])

    refused(
        shard("blocks.*"),
        "inward.weight was trained when the model was cut by shard.., and is frozen now",
        step=step,
    )


@STAGES
def test_models_that_were_built_without_memory(zero: Any) -> None:
    def build() -> nn.Module:
        with meta():
            return OddNet()

    plain = build()
    Blueprint(plain).make_parameters(plain, Placements(), 7)
    wanted = torch.cat([p.detach().double().reshape(-1) for p in plain.parameters()])
    models, alone = [build() for _ in range(3)], threading.Lock()  # threads share torch's generator

    def body(group: ThreadGroup) -> Tensor:
        axes = AxisGroups(lay_out_mesh({"shard": None}, one_host(3)), group)
        model, around = models[group.rank], CutContext(axes.mesh, axes, Placements())
        with alone:
            blueprint = Blueprint(model)
        shard("blocks.*", zero=zero).apply(model, around)
        with alone:
            blueprint.make_parameters(model, around.placements, 7)
        group.barrier().wait()
        return put_together(
            model, group, around.placements, lambda p: around.replacements.get(p, p)
        )

    assert all(torch.equal(found, wanted) for found in spawn(3, body))


def give_another(model: nn.Module) -> None:
    weight = model.get_parameter("blocks.1.0.weight")
    weight.data = weight.data + 1


def give_a_vector(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()) * 2, model.parameters()
    )


@STAGES
@pytest.mark.parametrize("change", [give_another, give_a_vector, nn.Module.float, nn.Module.half])
@pytest.mark.parametrize("before", ["forward", "step"])
def test_memory_that_a_script_puts_in_its_place_is_refused(
    zero: Any, change: Any, before: str
) -> None:
    def step(one: Trainee, number: int) -> None:
        x, y = one.batch(*vectors(number))
        if number == 1 and before == "forward":
            change(one.model)
        loss = F.mse_loss(one.model(x), y)
        loss.backward()
        if number == 1:
            change(one.model)
        one.optimizer.step()

    name = "blocks.1.0.weight" if change is give_another else "inward.weight"
    with pytest.raises(
        UsageError,
        match=rf"{name} was moved out of .* \(it is torch.float(64|32|16), and was torch.float64\)",
    ):
        train(2, odd_net, step, shard("blocks.*", zero=zero), steps=2)


@STAGES
def test_values_that_a_script_writes_in_place_are_trained_from(zero: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        if number == 2:
            one.model.double().to("cpu").requires_grad_()
            for parameter in one.model.parameters():
                parameter.data.copy_(parameter.data * 0.5)
        fitting(vectors)(one, number)

    same(odd_net, step, shard("blocks.*", zero=zero), 2)
