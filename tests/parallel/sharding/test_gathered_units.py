"""Parameters of units are whole while they are used, whatever a script does between forward and
backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.parallel.shard import shard
from tests.harness.compiling import COMPILES
from tests.harness.models import fill
from tests.harness.runs import distance
from tests.harness.sharded import Kept, Trainee, alone_with, fitting, refused, same, train
from tests.harness.sharded_models import OddNet, odd_net, vectors
from tests.harness.thread_groups import ThreadGroup, spawn

STAGES = pytest.mark.parametrize("zero", [1, 2, 3])


@STAGES
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(zero: Any, reentrant: bool) -> None:
    class Checkpointed(OddNet):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inward(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            out: Tensor = self.head(x)
            return out

    same(lambda: fill(Checkpointed().double()), fitting(vectors), shard("blocks.*", zero=zero), 2)


@STAGES
def test_evaluation_between_forward_and_backward(zero: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        x, y = one.batch(*vectors(number))
        one.optimizer.zero_grad()
        loss = F.mse_loss(one.model(x), y)
        with torch.no_grad():
            one.model(x)
        loss.backward()
        one.model(x)  # with a graph, and without a backward
        one.optimizer.step()

    same(odd_net, step, shard("blocks.*", zero=zero), 2)


@STAGES
def test_a_model_that_is_called_twice(zero: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        x, y = one.batch(*vectors(number))
        one.optimizer.zero_grad()
        loss = F.mse_loss(one.model(x) + one.model(2 * x), y) / 8
        loss.backward(retain_graph=True)
        loss.backward()
        one.optimizer.step()

    same(odd_net, step, shard("blocks.*", zero=zero), 2)


@STAGES
def test_gradients_of_inputs_and_penalties(zero: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        x, y = one.batch(*vectors(number))
        x.requires_grad_()
        one.optimizer.zero_grad()
        out = one.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (F.mse_loss(out, y) + slope.square().mean()).backward()
        one.optimizer.step()

    same(odd_net, step, shard("blocks.*", zero=zero), 2)


def test_units_are_whole_while_they_are_used_and_no_longer() -> None:
    def body(group: ThreadGroup) -> None:
        model, made = alone_with(group, odd_net, shard("blocks.*"))
        made.gradients.deliver_to(Kept())
        seen = list[str]()

        def look(number: int, what: str) -> None:
            seen.append(
                f"{what} {number}: "
                f"{' '.join(memory.unit or 'root' for memory in made.memories if memory.is_whole)}"
            )

        for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
            block[1].register_forward_hook(lambda *_, number=number: look(number, "forward"))
            block[1].register_full_backward_hook(lambda *_, number=number: look(number, "backward"))
        x, y = vectors(group.rank)
        loss = F.mse_loss(model(x), y)
        assert seen == [f"forward {n}: root blocks.{n}" for n in range(3)]
        seen.clear()
        loss.backward()
        assert seen == [f"backward {n}: root blocks.{n}" for n in (2, 1, 0)]
        made.gradients.end_pass()
        assert not any(memory.is_whole for memory in made.memories)
        assert all(p.dim() == 1 for p in model.parameters())

    spawn(2, body)


def test_a_loss_of_what_a_layer_inside_of_a_unit_gave() -> None:
    """No gradient comes to an output of the unit, so it is the layer's own output that has it
    gathered.
    """

    class Keeping(OddNet):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = list[Tensor]()
            self.blocks[1][1].register_forward_hook(lambda _, args, out: self.seen.append(out))  # type: ignore[union-attr, index]
            return super().forward(x)

    def step(one: Trainee, number: int) -> None:
        x, _ = one.batch(*vectors(number))
        one.optimizer.zero_grad()
        one.model(x)
        one.model.seen[0].square().mean().backward()  # type: ignore[index, union-attr]
        one.optimizer.step()

    same(lambda: fill(Keeping().double()), step, shard("blocks.*", zero=3), 2, steps=2)


def test_a_loss_of_pieces_is_refused() -> None:
    def step(one: Trainee, number: int) -> None:
        penalty = sum(
            (parameter.square().sum() for parameter in one.model.parameters()), torch.zeros(())
        )
        (one.model(vectors(0)[0]).square().mean() + penalty).backward()  # type: ignore[no-untyped-call]

    refused(
        shard("blocks.*"),
        r"the loss uses \S+ itself, and each worker has a piece of it .*say zero=2",
        step=step,
    )


def test_a_copy_of_gathered_units_is_refused() -> None:
    def ended(one: Trainee) -> None:
        with pytest.raises(
            UsageError,
            match=r"copy of the model that shard\(zero=3\) has cut was called .its module at the root",  # noqa: E501
        ):
            copy.deepcopy(one.model)(vectors(0)[0])

    train(2, odd_net, fitting(vectors), shard("blocks.*"), steps=1, ended=ended)


@COMPILES
@STAGES
def test_compiled_units(zero: Any) -> None:
    def build() -> nn.Module:
        model = OddNet()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return fill(model.double())

    def whole() -> nn.Module:
        model = OddNet()
        model.compile(backend="aot_eager")
        return fill(model.double())

    same(build, fitting(vectors), shard("blocks.*", zero=zero), 2)
    if zero != 3:
        same(whole, fitting(vectors), shard("blocks.*", zero=zero), 2)


@STAGES
def test_modules_that_keep_their_parameters_elsewhere_too(zero: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward, self.cell, self.out = nn.Linear(7, 5), nn.LSTM(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.cell(self.inward(x).unsqueeze(0))[0][0])
            return out

    same(
        lambda: fill(Recurrent().double()),
        fitting(vectors),
        shard(("cell", "inward"), zero=zero),
        3,
    )


def test_hooks_that_would_not_be_called_are_refused() -> None:
    def build() -> nn.Module:
        model = odd_net()
        next(model.parameters()).register_hook(lambda grad: 2 * grad)
        return model

    same(build, fitting(vectors), shard("blocks.*", zero=2), 2)
    refused(shard("blocks.*"), "inward.weight has a gradient hook of the script", build)


@dataclass(frozen=True)
class State:
    x: Tensor
    depth: int = 0


class Answer(dict[str, Any]):
    """A container that torch's pytrees don't know."""


class StateBlock(nn.Module):
    """Uses its own weight last, so that no layer inside of it has it gathered in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(5, 5), nn.Parameter(torch.empty(5, 5))

    def forward(self, state: State) -> State:
        x = (state.x + torch.tanh(self.layer(state.x)) @ self.weight).view(-1, 5)
        return State(x, state.depth + 1)


def wrapping(
    wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]
) -> tuple[Callable[[], nn.Module], Any]:
    """A model of blocks that take and give dataclasses, whose answer is wrapped, and a step of
    it.
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward, self.weight = nn.Linear(7, 5), nn.Parameter(torch.empty(5, 3))
            self.blocks = nn.ModuleList([StateBlock() for _ in range(3)])

        def forward(self, x: Tensor) -> Any:
            state = State(self.inward(x))
            for block in self.blocks:
                state = block(state)
            assert state.depth == 3
            return wrap(state.x @ self.weight)

    def step(one: Trainee, number: int) -> None:
        x, y = one.batch(*vectors(number))
        one.optimizer.zero_grad()
        F.mse_loss(unwrap(one.model(x)), y).backward()
        one.optimizer.step()

    return lambda: fill(Net().double()), step


@STAGES
@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (State, lambda out: out.x),
        (lambda x: Answer(logits=[x]), lambda out: out["logits"][0]),
        (
            lambda x: torch.distributions.Independent(torch.distributions.Normal(x, 1.0), 1),
            lambda out: out.mean,
        ),
    ],
    ids=["dataclass", "kind of dict", "distribution"],
)
def test_tensors_in_containers_of_the_script(zero: Any, wrap: Any, unwrap: Any) -> None:
    same(*wrapping(wrap, unwrap), shard("blocks.*", zero=zero), 2)


def test_freed_memory_is_never_read() -> None:
    """An answer that can't be looked into, and a unit that gives away its own weight, which is
    used when it has been released.
    """
    build, step = wrapping(lambda x: lambda: x, lambda out: out())
    with pytest.raises(RuntimeError, match="version"):
        train(2, build, step, shard("blocks.*"), steps=1)

    class Leaking(OddNet):
        def forward(self, x: Tensor) -> Tensor:
            self.head.register_forward_hook(lambda module, args, out: (out, module.weight))
            out, weight = super().forward(x)
            return out @ weight

    with pytest.raises(RuntimeError, match=r"shape|size"):
        train(2, lambda: fill(Leaking().double()), fitting(vectors), shard("head"), steps=1)


def test_weights_that_a_function_uses_outside_of_their_unit_are_named() -> None:
    class Tied(OddNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ self.head.weight

    with pytest.raises(RuntimeError) as caught:
        train(
            2, lambda: fill(Tied().double()), fitting(vectors), shard(("blocks.*", "head")), steps=1
        )
    assert [
        note
        for note in caught.value.__notes__
        if "head.weight is a piece" in note and "leave head out" in note
    ]
    assert not [note for note in caught.value.__notes__ if "blocks" in note]


@pytest.mark.parametrize(
    "register", [nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook]
)
def test_hooks_that_come_later_are_refused_in_the_next_pass(register: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        if number == 1:
            register(one.model.get_parameter("blocks.1.0.weight"), list[Any]().append)
        fitting(vectors)(one, number)

    with pytest.raises(UsageError, match=r"blocks.1.0.weight has a gradient hook of the script"):
        train(2, odd_net, step, shard("blocks.*"), steps=3)


@STAGES
@pytest.mark.parametrize("name", ["blocks.1.0.weight", "inward.bias"])
def test_parameters_that_are_given_to_a_call(zero: Any, name: str) -> None:
    def step(one: Trainee, number: int) -> None:
        fitting(vectors)(one, number)
        x, _ = vectors(number)
        own = dict(one.model.named_parameters())
        assert torch.equal(torch.func.functional_call(one.model, own, x), one.model(x))
        changed = torch.func.functional_call(one.model, {name: 2 * own[name]}, x)
        with torch.no_grad():
            one.seen["changed"] = changed.detach()

    if zero == 3:
        with pytest.raises(UsageError, match=f"{name} is not the parameter .*functional_call"):
            train(2, odd_net, step, shard("blocks.*", zero=zero))
    else:
        wanted = train(1, odd_net, step, None, ended=lambda one: one.seen["changed"])[0][1]
        for found in same(
            odd_net, step, shard("blocks.*", zero=zero), ended=lambda one: one.seen["changed"]
        ):
            assert distance(found, wanted) < 1e-12
