"""Parameters, their gradients and what optimizers keep of them go to other workers, and stay the objects that they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.pairs import pairs
from paceline.parallel.cut import Immovable
from paceline.parallel.dealing.relocation import Route, relocate, resize
from tests.harness.thread_groups import ThreadGroup, spawn

pytestmark = pytest.mark.unit


def test_what_a_parameter_has_goes_along() -> None:
    values = torch.arange(6.0, dtype=torch.float64).view(2, 3)

    def body(group: ThreadGroup) -> None:
        here, messages = group.rank == 0, pairs(group)
        first = Parameter(values.clone() if here else torch.empty(0, dtype=torch.float64))
        second = Parameter(torch.empty(0) if here else torch.ones(4))
        both = Parameter(torch.ones(2) if here else torch.empty(0))
        optimizer = torch.optim.AdamW([first, second, both])
        for parameter in (first, second, both):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        seen = list[Any]()
        first.register_hook(lambda grad: seen.append(grad.shape))
        if here:
            first.sum().backward()  # type: ignore[no-untyped-call]
        routes = [Route("first", first, (0,), (1,)), Route("second", second, (1,), (0,)), Route("both", both, (0,), (0, 1))]
        state = dict(optimizer.state[first])
        told = group.gather_objects([x.tolist() for x in (first.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"])])[0]
        sent = relocate(routes, [optimizer], group, messages, 0, everyone=group)
        assert sent == (3 * 48 + 48 + 4 + 3 * 8 + 8 + 4 if here else 3 * 16 + 16 + 4)
        assert [tuple(p.shape) for p in (first, second, both)] == ([(0,), (4,), (2,)] if here else [(2, 3), (0,), (2,)])
        for parameter, shape in ((first, first.shape), (second, second.shape)):
            kept = optimizer.state[parameter]
            assert kept["exp_avg"].shape == kept["exp_avg_sq"].shape == shape and float(kept["step"]) == 1.0
            assert parameter.grad is not None and parameter.grad.shape == shape
        if not here:
            assert [
                x.tolist() for x in (first.detach(), *(optimizer.state[first][key] for key in ("exp_avg", "exp_avg_sq", "step")))
            ] == told
            assert torch.equal(first.grad, torch.full((2, 3), 2.0, dtype=torch.float64))  # type: ignore[arg-type]
            first.grad = None
            (first * 3).sum().backward()  # type: ignore[no-untyped-call]
            assert torch.equal(first.grad, torch.full((2, 3), 3.0, dtype=torch.float64))  # type: ignore[arg-type]
            assert seen[-1] == (2, 3)
        optimizer.step()
        messages.close()

    spawn(2, body)


def test_what_belongs_to_no_parameter_alone_stays_and_all_say_so() -> None:
    def body(group: ThreadGroup) -> str:
        messages = pairs(group)
        parameter = Parameter(torch.ones(4) if group.rank == 0 else torch.empty(0))
        optimizer = torch.optim.LBFGS([parameter])
        if group.rank == 0:
            optimizer.state[parameter]["rows"] = torch.ones(7)
        with pytest.raises(Immovable, match="the LBFGS keeps rows of w, which is neither of its shape nor a number") as caught:
            relocate([Route("w", parameter, (0,), (1,))], [optimizer], group, messages, 0, everyone=group)
        assert parameter.numel() == (4 if group.rank == 0 else 0)
        messages.close()
        return str(caught.value)

    assert len(set(spawn(2, body))) == 1


@pytest.mark.parametrize("foreach", [True, False])
def test_one_number_goes_to_another_worker_and_back(foreach: bool) -> None:
    def body(group: ThreadGroup) -> list[float]:
        here, messages = group.rank == 0, pairs(group)
        scale = Parameter(torch.tensor(2.0, dtype=torch.float64) if here else torch.empty(0, dtype=torch.float64))
        optimizer = torch.optim.AdamW([scale], lr=0.1, foreach=foreach)
        found = list[float]()
        for step in range(4):
            (scale * (step + 1.0)).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found += [scale.item()] if scale.numel() else []
            before, after = (0, 1) if step % 2 == 0 else (1, 0)
            relocate([Route("scale", scale, (before,), (after,))], [optimizer], group, messages, step, everyone=group)
            optimizer.zero_grad()
        messages.close()
        return found

    alone = Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimizer, wanted = torch.optim.AdamW([alone], lr=0.1, foreach=foreach), list[float]()
    for step in range(4):
        optimizer.zero_grad()
        (alone * (step + 1.0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        wanted.append(alone.item())
    assert spawn(2, body) == [wanted[::2], wanted[1::2]]


def test_all_workers_say_so_where_those_of_one_group_cant_move() -> None:
    def body(group: ThreadGroup) -> str:
        mine = next(half for half in [group.sub([0, 1]), group.sub([2, 3])] if half is not None)
        messages = pairs(mine)
        parameter = Parameter(torch.ones(4) if mine.rank == 0 else torch.empty(0))
        optimizer = torch.optim.SGD([parameter])
        if group.rank == 2:
            optimizer.state[parameter]["rows"] = torch.ones(7)
        with pytest.raises(Immovable) as caught:
            relocate([Route("w", parameter, (0,), (1,))], [optimizer], mine, messages, 0, everyone=group)
        assert parameter.numel() == (4 if mine.rank == 0 else 0)
        messages.close()
        return str(caught.value)

    assert len(set(spawn(4, body))) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_parameter_that_others_hold_takes_gradients_of_its_new_size(dtype: torch.dtype) -> None:
    parameter = Parameter(torch.ones(3, dtype=dtype))
    node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    seen = list[Tensor]()
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))  # type: ignore[arg-type]
    resize(parameter, torch.ones(2, 2, dtype=dtype))
    (parameter * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None and parameter.grad.shape == (2, 2) and parameter.dtype == dtype
    assert seen[0] is parameter.grad and node is not None
