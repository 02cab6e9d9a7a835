"""What workers that cut layers between them exchange, forward and backward, as autograd functions
over a Group.

                  forward                          backward
copy              x as it is                       gradients are summed            into a layer cut
                                                   by columns
total             sums                             the gradient as it is           out of a layer
                                                   cut by rows
join              pieces side by side              my piece of the gradient        out of a layer
                                                   whose whole output is wanted
split             my piece                         pieces side by side             into a region cut
                                                   along the sequence
gather            pieces side by side              sums, my piece of them          into a layer cut
                                                   by columns, in such a region
scatter           sums, my piece of them           pieces side by side             out of a layer
                                                   cut by rows, in such a region

`copy` and `total` are f and g of Shoeybi et al., "Megatron-LM" (2019); `gather` and `scatter` are
those of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
Workers run the same graph, so they make these calls in the same order.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.comm.axis_meter import AxisMeter
from paceline.comm.group import Group, Op
from paceline.errors import UsageError
from paceline.parallel.tensor.random_zone import RandomZone

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Keep a function out of graphs that torch.compile makes: what it exchanges is not torch's."""
    disable: Callable[[F], F] = torch.compiler.disable
    return disable(function)


class TensorAxis:
    """The workers that cut layers between them, as layers see them.

    A deepcopy of a layer shares it. `meter` measures exchanges.
    """

    def __init__(self, group: Group, meter: AxisMeter | None = None) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self._meter = AxisMeter("tensor") if meter is None else meter
        self._meter.add(group)
        self.zone = RandomZone(group.rank)
        self._entered: tuple[weakref.ref[Tensor], object, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        return self

    # ---- into and out of layers

    @eager
    def copy(self, x: Tensor, name: str) -> Tensor:
        """Give each worker the whole `x`; what layers that share it send back is summed locally
        first, and over workers once.
        """
        return self._once(x, "copy", lambda: _Copy.apply(x, self, name))  # type: ignore[no-untyped-call]

    @eager
    def gather(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Put the pieces of all workers side by side; layers that share `x` gather it once."""
        return self._once(x, ("gather", dim), lambda: _Gather.apply(x, dim, self, name))  # type: ignore[no-untyped-call]

    @eager
    def total(self, x: Tensor, name: str) -> Tensor:
        """Sum a part of the result over all workers, in place."""
        found: Tensor = _Total.apply(x, self, name)  # type: ignore[no-untyped-call]
        return found

    @eager
    def scatter(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Sum a part of the result over all workers, and keep this worker's piece of a
        dimension.
        """
        found: Tensor = _Scatter.apply(x, dim, self, name)  # type: ignore[no-untyped-call]
        return found

    @eager
    def join(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Put the pieces of all workers side by side, where what follows is the same on all of
        them.
        """
        found: Tensor = _Join.apply(x, dim, self, name)  # type: ignore[no-untyped-call]
        return found

    @eager
    def split(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Keep this worker's piece of a dimension of what is the same on all workers."""
        found: Tensor = _Split.apply(x, dim, self, name)  # type: ignore[no-untyped-call]
        return found

    @eager
    def shared(self, parameters: Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
        """Let workers use whole parameters on parts of the activations: their gradients are
        summed, in one exchange.
        """
        found: tuple[Tensor, ...] = _Shared.apply(self, name, *parameters)  # type: ignore[no-untyped-call]
        return found

    @eager
    def enter(self, x: Tensor) -> None:
        """Let random numbers differ between workers from here on: activations are cut."""
        self.zone.enter(x.device)

    @eager
    def leave(self, x: Tensor) -> None:
        """Let random numbers be equal on all workers again."""
        self.zone.leave(x.device)

    @eager
    def forget(self) -> None:
        """Let go of the input that the layers before have shared."""
        self._entered = None

    def _once(self, x: Tensor, how: object, make: Callable[[], Any]) -> Tensor:
        """Return what was made of this very tensor by the layer before, or make it."""
        if not x.requires_grad or not torch.is_grad_enabled():
            found: Tensor = make()
            return found
        key = (how, x._version)
        if self._entered is None or self._entered[0]() is not x or self._entered[1] != key:
            self._entered = weakref.ref(x), key, make()
        return self._entered[2]

    # ---- exchanges of plain tensors

    def add_up(self, x: Tensor, name: str, *, out: Tensor | None = None, op: Op = "sum") -> Tensor:
        """Sum over all workers, or reduce by another operation."""
        x = x.contiguous()
        with self._meter.exchange(name):
            return self.group.all_reduce(x, op=op, name=name, out=out).wait()

    def objects(self, obj: Any, name: str) -> list[Any]:
        """Gather what each worker has, as JSON."""
        with self._meter.exchange(name):
            return self.group.gather_objects(obj, name=name)

    def side_by_side(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Put the pieces of all workers side by side."""
        x = x.contiguous()
        with self._meter.exchange(name):
            return torch.cat(self.group.all_gather(x, name=name).wait(), dim)

    def sums_of_mine(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Sum over all workers and keep my piece of a dimension."""
        rows = x.shape[dim] // self._fitting(x, dim, name)
        turned = x.movedim(dim, 0).contiguous()
        with self._meter.exchange(name):
            mine = self.group.reduce_scatter(turned, name=name).wait()
        return mine.view(rows, *turned.shape[1:]).movedim(0, dim).contiguous()

    def mine(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Return my piece of a dimension, as a view."""
        rows = x.shape[dim] // self._fitting(x, dim, name)
        return x.narrow(dim, self.rank * rows, rows)

    def _fitting(self, x: Tensor, dim: int, name: str) -> int:
        if x.shape[dim] % self.size:
            more = -x.shape[dim] % self.size
            raise UsageError(
                f"{name}: dimension {dim} has size {x.shape[dim]}, which {self.size} workers can't "
                "cut evenly; "
                f"make it {x.shape[dim] + more}, or {x.shape[dim] - x.shape[dim] % self.size}"
            )
        return self.size


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, name: str) -> Tensor:
        ctx.exchanged = axis, name
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, name = ctx.exchanged
        return axis.add_up(grad, f"gradient of the input of {name}"), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, name: str) -> Tensor:
        if not x.is_contiguous():
            return axis.add_up(x, f"output of {name}")
        ctx.mark_dirty(x)
        return axis.add_up(x, f"output of {name}", out=x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: TensorAxis, name: str) -> Tensor:
        ctx.exchanged = axis, dim, name
        return axis.side_by_side(x, dim, f"output of {name}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, name = ctx.exchanged
        return axis.mine(grad, dim, name), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: TensorAxis, name: str) -> Tensor:
        ctx.exchanged = axis, dim, name
        return axis.mine(x, dim, f"input of {name}").clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, name = ctx.exchanged
        return axis.side_by_side(grad, dim, f"gradient of the input of {name}"), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: TensorAxis, name: str) -> Tensor:
        ctx.exchanged = axis, dim, name
        return axis.side_by_side(x, dim, f"input of {name}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, name = ctx.exchanged
        return axis.sums_of_mine(grad, dim, f"gradient of the input of {name}"), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: TensorAxis, name: str) -> Tensor:
        ctx.exchanged = axis, dim, name
        return axis.sums_of_mine(x, dim, f"output of {name}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, name = ctx.exchanged
        return axis.side_by_side(grad, dim, f"gradient of the output of {name}"), None, None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, name: str, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.exchanged = axis, name, [(parameter.shape, parameter.dtype) for parameter in parameters]
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, name, kinds = ctx.exchanged
        wanted = [place for place in range(len(grads)) if ctx.needs_input_grad[2 + place]]
        kind = functools.reduce(
            torch.promote_types, (kinds[place][1] for place in wanted), torch.float32
        )
        flat = torch.cat([grads[place].reshape(-1).to(kind) for place in wanted])
        flat = axis.add_up(flat, f"gradients of the parameters of {name}", out=flat)
        found: list[Tensor | None] = [None] * len(grads)
        for place, part in zip(
            wanted, flat.split([grads[place].numel() for place in wanted]), strict=True
        ):
            shape, dtype = kinds[place]
            found[place] = part.view(shape).to(dtype)
        return None, None, *found
