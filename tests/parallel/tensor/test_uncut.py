"""Plans that are wrong on all workers alike are found in the first pass, by a forward that isn't
cut; right ones go on as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.cluster.store import Store
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import UsageError
from paceline.parallel.pipelining.tracing import trace_operations
from paceline.parallel.tensor.random_zone import RandomZone
from paceline.parallel.tensor.styles import column, row, sequence, summed
from paceline.parallel.tensor.tensor_cut import tensor
from tests.harness.processes import fork
from tests.harness.tensor_cuts import (
    PIECES,
    WHOLE,
    adamw,
    batches,
    context_of,
    cut_training,
    distance,
    gpt,
    train,
)
from tests.harness.thread_groups import ThreadGroup, spawn

torch.set_num_threads(1)
PAIR = {"body.up": column(), "body.down": row()}


class Perceptron(nn.Module):
    """Two layers with a function of all features between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], up: int = 8, down: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.between, self.calls = (
            nn.Linear(4, up),
            nn.Linear(down, 4),
            between,
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.down(self.between(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        return h + self.body(h)


def halves(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def heads(x: Tensor, heads: int = 2) -> Tensor:
    q, k, v = (part.unflatten(-1, (-1, 2)).transpose(-2, -3) for part in x.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def first_passes(
    make: Callable[[], nn.Module], plan: tensor, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Run two passes of a model that is cut between two workers; return the model of each.

    The workers are threads, which share one random generator. One that enters or leaves a zone of
    its own random numbers would look to the other as if its module had drawn some. So there are no
    zones here.
    """
    torch.manual_seed(0)
    alone, x = make().to(dtype), torch.randn(2, 4, 4, dtype=dtype)

    def body(group: ThreadGroup) -> Any:
        model = copy.deepcopy(alone)
        plan.apply(model, context_of(group))
        for _ in range(2):
            model(x).sum().backward()
        return model

    with pytest.MonkeyPatch.context() as patched:
        for method in ("enter_zone", "leave_zone"):
            patched.setattr(RandomZone, method, lambda zone, device: None)
        return spawn(2, body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("body", "plan"),
    [
        (lambda: Perceptron(lambda x: F.layer_norm(x, x.shape[-1:])), PAIR),
        (lambda: Perceptron(lambda x: x.softmax(-1)), PAIR),
        (lambda: Perceptron(lambda x: x - x.mean(-1, keepdim=True)), PAIR),
        (lambda: Perceptron(halves, up=16), PAIR),
        (lambda: Perceptron(heads, up=24), PAIR),
        (lambda: Perceptron(halves, up=16), {**PAIR, "body": sequence()}),
    ],
    ids=["layer norm", "softmax", "mean", "fused gates", "fused heads", "in a region"],
)
def test_a_plan_that_is_wrong_on_all_workers_alike_is_found_and_its_module_named(
    body: Any, plan: Any, dtype: torch.dtype
) -> None:
    with pytest.raises(UsageError, match=r"tensor: body \(Perceptron\) .* column"):
        first_passes(lambda: Model(body()), tensor(plan), dtype)


@pytest.mark.parametrize(
    ("body", "plan"),
    [
        (lambda: Perceptron(F.gelu), PAIR),
        (lambda: Perceptron(halves, up=16), {**PAIR, "body.up": column(parts=2)}),
        (lambda: Perceptron(heads, up=24), {**PAIR, "body.up": column(parts=3)}),
        (
            lambda: Perceptron(lambda x: x.softmax(-1)),
            {"body.up": column(gather=True), "body.down": row(split=True)},
        ),
        (
            lambda: Perceptron(
                nn.Sequential(
                    nn.Dropout(0.5), nn.Unflatten(-1, (-1, 4)), nn.LayerNorm(4), nn.Flatten(-2)
                )
            ),
            PAIR,
        ),
        (lambda: Perceptron(Noisy()), PAIR),
        (lambda: Perceptron(F.relu), {**PAIR, "body": sequence()}),
    ],
    ids=[
        "gelu",
        "parts of gates",
        "parts of heads",
        "gathered",
        "norm of a head and dropout",
        "noise",
        "in a region",
    ],
)
def test_a_right_plan_passes(body: Any, plan: Any) -> None:
    plan = (
        {**plan, "body.between.2": summed()} if isinstance(body().between, nn.Sequential) else plan
    )
    for model in first_passes(lambda: Model(body()), tensor(plan)):
        assert model.body.calls == 2  # what the comparison has done is undone


def test_it_is_compared_once_and_can_be_left_out() -> None:
    right: list[bool] = [True]

    def between(x: Tensor) -> Tensor:
        return x if right else x.softmax(-1)

    class Turning(Model):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if out.requires_grad:
                right.clear()
            return out

    # what the second pass does isn't looked at
    first_passes(lambda: Turning(Perceptron(between)), tensor(PAIR))
    with pytest.raises(UsageError, match="body"):
        first_passes(lambda: Turning(Perceptron(between)), tensor(PAIR))
    first_passes(lambda: Turning(Perceptron(between)), tensor(PAIR, compare=False))


class Apart(nn.Module):
    """Features that are cut go from one module to the next, and each has a pair of its own
    besides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8))
        self.two = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 4))
        self.norm = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        out: Tensor = self.two(F.layer_norm(h, h.shape[-1:]) if self.norm else h)
        return out


@pytest.mark.parametrize("wrong", [False, True])
def test_modules_that_hand_on_parts_are_compared_with_those_around_them(wrong: bool) -> None:
    def make() -> nn.Module:
        model = Apart()
        model.norm = wrong
        return model

    columns = dict.fromkeys(("one.0", "one.2", "two.1"), column())
    plan = {**columns, **dict.fromkeys(("one.1", "two.0", "two.2"), row())}
    if not wrong:
        first_passes(make, tensor(plan))
        return
    with pytest.raises(UsageError, match=r"tensor: the model \(Apart\)"):
        first_passes(make, tensor(plan))


def test_a_column_that_no_row_follows_is_named_with_its_module() -> None:
    message = (
        r"tensor: body \(Perceptron\) works undivided, and fails when it is cut \(mat1 .* cut it "
        r"by row\(\)"
    )
    with pytest.raises(UsageError, match=message):
        first_passes(lambda: Model(Perceptron(F.relu)), tensor({"body.up": column()}))


class Remembers(nn.Module):
    """Attention-like: what it is called with is changed by it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        out: Tensor = self.down(self.up(x.mul_(2)) * len(seen))
        return out


def test_arguments_that_a_forward_changes_are_as_they_were() -> None:
    alone = Remembers()

    def body(group: ThreadGroup) -> Any:
        model, seen, x = copy.deepcopy(alone), list[Tensor](), torch.ones(2, 4)
        tensor({"up": column(), "down": row()}).apply(model, context_of(group))
        model(x, seen=seen)
        return len(seen), x

    for number, x in spawn(2, body):
        assert number == 1
        assert torch.equal(x, torch.full((2, 4), 2.0))


@pytest.mark.parametrize("cut", [WHOLE, PIECES], ids=["whole", "pieces"])
def test_training_with_dropout_goes_on_as_without_the_comparison(cut: tensor) -> None:
    model = gpt(torch.float64)
    for block in model.blocks:
        block.up = nn.Sequential(block.up, nn.Dropout(0.3))  # type: ignore[assignment]
    layers = {name.replace("up", "up.0"): style for name, style in cut.layers.items()}  # type: ignore[union-attr]

    # threads would share one generator
    def body(rank: int, size: int, store: Store) -> list[list[float]]:
        group = SharedGroup.from_store(store, rank, size)
        losses = []
        for compare in (True, False):
            torch.manual_seed(1)
            mine = copy.deepcopy(model)
            replace(cut, layers=layers, compare=compare).apply(mine, context_of(group))
            losses.append(train(mine, batches(3), adamw)[0])
        group.close()
        return losses

    for with_it, without in fork(2, body):
        assert with_it == without


def test_layers_of_a_pair_can_be_those_of_a_pipeline() -> None:
    def body(group: ThreadGroup) -> None:
        model = Model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
        tensor({"body.0": column(), "body.2": row()}).apply(model, context_of(group))
        names = [each.target for each in trace_operations(model, ["body.0", "body.2"], ["x"])]
        assert "body.2" in names

    spawn(2, body)


def test_gpt_is_the_same_with_it() -> None:
    model = gpt(torch.float64)
    losses, parameters = cut_training(2, copy.deepcopy(model), WHOLE, batches(2), adamw)
    wanted, _ = train(model, batches(2), adamw)
    assert losses[0] == pytest.approx(wanted, rel=1e-10)
    assert distance(parameters, model) < 1e-9
