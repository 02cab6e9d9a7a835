"""Parameters of a pipeline go from worker to worker, with their gradients and what optimizers keep of them, as the split changes.

worker 0    blocks.0  blocks.1  blocks.2 ---+      objects stay the same: optimizers, schedulers and scripts hold them
worker 1    blocks.3                  <-----+      what has left has no elements here any more
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.comm.group import Group, Work
from paceline.comm.pairs import Pairs
from paceline.errors import UsageError
from paceline.parallel.cut import Immovable
from paceline.parallel.pipelining.values import PLAIN, pack, unpack
from paceline.parallel.placement import COUNTS


@dataclass(frozen=True)
class Route:
    """A parameter, and the places along `stage` that have it before and after."""

    name: str
    parameter: Parameter
    before: tuple[int, ...]
    after: tuple[int, ...]


def relocate(routes: Sequence[Route], optimizers: Sequence[Optimizer], group: Group, pairs: Pairs, lane: int, *, everyone: Group) -> int:
    """Move what has to move, and return the bytes that this worker has sent. Collective; `routes` are in the same order on all workers.

    `pairs` joins the workers of `group`, and nothing else uses this lane. Raises `Immovable` on all workers, those of `everyone`, before
    anything has moved, where an optimizer keeps what can't be divided by parameters.
    """
    _check(routes, optimizers, group.rank, everyone)
    rank, sends, nbytes = group.rank, list[Work[None]](), 0
    for route in routes:
        coming = [place for place in route.after if place not in route.before]
        if coming and rank == route.before[0]:
            head, tensors = pack(_content(route.parameter, optimizers), f"what is kept of {route.name}")
            what = f"{route.name}, as the split changes"
            sends += [pairs.send(place, lane, {"name": route.name, **head}, tensors, what=what) for place in coming]
            nbytes += len(coming) * sum(tensor.nbytes for tensor in tensors)
    for work in sends:
        work.wait()
    for route in routes:
        if rank in route.after and rank not in route.before:
            message = pairs.receive(route.before[0], lane, what=f"{route.name}, as the split changes").wait()
            if message.head["name"] != route.name:
                raise UsageError(
                    f"{route.name} was to come as the split changes, and {message.head['name']} came: prepare alike everywhere"
                )
            _take(route.parameter, optimizers, unpack(message.head, message.tensors)[0])
        elif rank in route.before and rank not in route.after:
            _drop(route.parameter, optimizers)
        elif route.parameter.grad is not None:
            route.parameter.grad = route.parameter.grad.clone()  # strategies take back the memory of gradients
    return nbytes


def _check(routes: Sequence[Route], optimizers: Sequence[Optimizer], rank: int, everyone: Group) -> None:
    """Raise `Immovable`, on all workers, where an optimizer keeps something of another shape than its parameter's, or no plain data."""
    wrong = ""
    for route in routes if not wrong else ():
        for optimizer in optimizers if rank in route.before else ():
            for key, value in optimizer.state.get(route.parameter, {}).items():
                for leaf in tree_leaves(value):
                    fits = leaf.shape == route.parameter.shape or leaf.numel() <= 1 if isinstance(leaf, Tensor) else _is_plain(leaf)
                    if not fits and not wrong:
                        wrong = (
                            f"the {type(optimizer).__qualname__} keeps {key} of {route.name}, which is neither of its shape nor a number, "
                            "and can't go to another worker with it: leave out again=True, or use an optimizer that keeps such"
                        )
    told = [answer.decode() for answer in everyone.agree(wrong.encode())]
    if text := next(filter(None, told), ""):
        raise Immovable(text)


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, PLAIN)


def _content(parameter: Parameter, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return all there is of a parameter. Numbers that an optimizer keeps on the processor are noted, as tensors come out on a device."""
    states = [dict(optimizer.state[parameter]) if parameter in optimizer.state else None for optimizer in optimizers]
    here = [[isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in tree_leaves(state)] for state in states]
    return {"data": parameter.detach(), "grad": parameter.grad, "states": states, "processor": here}


def _take(parameter: Parameter, optimizers: Sequence[Optimizer], content: Mapping[str, Any]) -> None:
    resize(parameter, content["data"])
    parameter.grad = content["grad"]
    for optimizer, state, here in zip(optimizers, content["states"], content["processor"], strict=True):
        optimizer.state.pop(parameter, None)
        if state is not None:
            places = iter(here)
            moved = {key: _homed(value, places) for key, value in state.items()}
            optimizer.state[parameter] = moved


def _homed(value: Any, places: Any) -> Any:
    """Return a value whose tensors are on the processor where the next of `places` says so."""
    leaves = [leaf.cpu() if next(places) and isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(value)]
    coming = iter(leaves)
    return tree_map_only(object, lambda _: next(coming), value)


def _drop(parameter: Parameter, optimizers: Sequence[Optimizer]) -> None:
    shape, grad = parameter.shape, parameter.grad
    resize(parameter, parameter.new_empty(0))
    parameter.grad = None if grad is None else torch.empty_like(parameter)
    for optimizer in optimizers:
        state = optimizer.state.get(parameter)
        if state is not None:
            optimizer.state[parameter] = {key: value if key in COUNTS else _emptied(value, shape) for key, value in state.items()}


def _emptied(value: Any, shape: torch.Size) -> Any:
    return tree_map_only(Tensor, lambda x: x.new_empty(0) if x.shape == shape else x, value)


def resize(parameter: Parameter, data: Tensor) -> None:
    """Give a parameter other data of any size, and leave it without a gradient.

    The node that adds to its gradient knows the size that it was made for, and torch makes another one where the dtype changes alone: so it
    changes for a moment.
    """
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=torch.float16 if parameter.dtype != torch.float16 else torch.float32, device=parameter.device)
    parameter.data = data.detach()
