"""Models that threads cut between them, and what is left of them: losses of some steps, and the
whole parameters put together again.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.apps.gpt import GPT, GPTShape
from paceline.cluster.mesh import Mesh
from paceline.comm.axis_groups import AxisGroups
from paceline.comm.group_protocol import Group
from paceline.parallel.cut import CutContext
from paceline.parallel.placement import Placements
from paceline.parallel.tensor.styles import Style, column, row, sequence, vocab
from paceline.parallel.tensor.tensor_cut import tensor
from tests.harness.jobs import PATIENCE
from tests.harness.thread_groups import spawn

Batch = tuple[Tensor, Tensor]
Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
SHAPE = GPTShape(d=32, layers=2, heads=4, context=16, vocab=40, tied=True)
GPT_LAYERS: dict[str, Style] = {
    "tokens": vocab(),
    "head": vocab(),
    "blocks.*.attention.qkv": column(parts=3),
    "blocks.*.attention.out": row(),
    "blocks.*.up": column(),
    "blocks.*.down": row(),
}
WHOLE = tensor(GPT_LAYERS, divide=["blocks.*.attention.heads"])
PIECES = tensor({**GPT_LAYERS, "blocks": sequence()}, divide=["blocks.*.attention.heads"])


def gpt(dtype: torch.dtype = torch.float32, shape: GPTShape = SHAPE) -> GPT:
    torch.manual_seed(3)
    model = GPT(shape).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


def batches(count: int, shape: GPTShape = SHAPE, size: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    texts = [
        torch.randint(shape.vocab, (size, shape.context + 1), generator=generator)
        for _ in range(count)
    ]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def context_of(group: Group, mesh: Mesh | None = None) -> CutContext:
    mesh = Mesh((("tensor", group.size),), tuple(range(group.size))) if mesh is None else mesh
    return CutContext(mesh, AxisGroups(mesh, group), Placements())


def train(
    model: nn.Module, data: Sequence[Batch], optimizer: Optimizer, loss: Any = loss_of
) -> tuple[list[float], list[Tensor]]:
    """Losses, and the gradients of the last step."""
    stepping = optimizer(list(model.parameters()))
    losses = []
    for x, y in data:
        stepping.zero_grad()
        found = loss(model, x, y)
        found.backward()
        losses.append(found.item())
        stepping.step()
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


def cut_training(
    size: int,
    model: nn.Module,
    cut: tensor,
    data: Sequence[Batch],
    optimizer: Optimizer,
    *,
    loss: Any = loss_of,
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses of each rank, and the parameters as one tensor each; `optimizer` is made before the
    cut.
    """

    def body(group: Group) -> Any:
        mine, context = copy.deepcopy(model), context_of(group)
        parameters = list(mine.parameters())
        cut.apply(mine, context)
        # optimizers keep them
        assert [id(p) for p in mine.parameters()] == [id(p) for p in parameters]
        losses, _ = train(mine, data, optimizer, loss)
        return losses, [
            (context.placements.placement_of(p, name), p.detach())
            for name, p in mine.named_parameters()
        ]

    found = spawn(size, body, deadline=PATIENCE)
    return [losses for losses, _ in found], whole([parts for _, parts in found])


def whole(parts: Sequence[Sequence[tuple[Any, Tensor]]]) -> dict[str, Tensor]:
    """Put the parts of all ranks together; what several have has to be equal to the last bit."""
    found: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for rank in parts:
        for placement, local in rank:
            assert local.shape == placement.local
            into = found.setdefault(
                placement.name, torch.full(placement.shape, torch.nan, dtype=local.dtype)
            )
            there = seen.setdefault(placement.name, torch.zeros(placement.shape, dtype=torch.bool))
            for region in placement.regions:
                part, known = region.view_logical(into), region.view_logical(there)
                assert torch.equal(part[known], region.view_local(local)[known]), (
                    f"{placement.name} differs between ranks"
                )
                part.copy_(region.view_local(local))
                known.fill_(True)
    assert all(bool(there.all()) for there in seen.values())
    return found


def distance(found: dict[str, Tensor], model: nn.Module) -> float:
    """The largest difference from a model's parameters, relative to the norm of each."""
    wanted = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    return max(
        float((found[name] - p.detach()).norm() / p.detach().norm()) for name, p in wanted.items()
    )


def features(steps: int, inputs: int, outputs: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    draw = [
        torch.randn(6, inputs + outputs, generator=generator, dtype=torch.float64)
        for _ in range(steps)
    ]
    return [(both[:, :inputs], both[:, inputs:]) for both in draw]


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.mse_loss(out, y.to(out.dtype))


def compare(
    model: nn.Module,
    cut: tensor,
    data: Sequence[Batch],
    *,
    size: int = 2,
    loss: Any = loss_of,
    limit: float = 1e-9,
) -> None:
    """Train in one process and cut between workers, in float64 by AdamW, and compare."""
    model = model.double()
    losses, parameters = cut_training(size, copy.deepcopy(model), cut, data, adamw, loss=loss)
    wanted, _ = train(model, data, adamw, loss)
    assert all(found == losses[0] for found in losses)
    assert losses[0] == pytest.approx(wanted, rel=1e-9)
    assert distance(parameters, model) < limit


class Unasked:
    """Two workers of which none is asked for anything: what is refused is refused before."""

    rank, size = 0, 2


class CountingGroup:
    """A group that notes the collectives called on it, by their method."""

    def __init__(self, group: Any) -> None:
        self._group, self.calls = group, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name not in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return found(*args, **kwargs)

        return counted
