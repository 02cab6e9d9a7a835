"""Exchanges of workers that cut layers between them, as autograd functions over a `Group`.

                  forward                  backward
copy_input        x as it is               gradients are summed     into a layer cut by columns
sum_output        sums                     the gradient as it is    out of a layer cut by rows
join_output       pieces side by side      own piece of gradient    out of a layer used as a whole
split_input       own piece                pieces side by side      into a sequence region
gather_input      pieces side by side      own piece of sums        into a column layer in a region
scatter_output    own piece of sums        pieces side by side      out of a row layer in a region

The first two are f and g of Shoeybi et al., "Megatron-LM" (2019). The last two are those of
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022). Workers
run the same graph, so they make these calls in the same order.
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
from paceline.comm.group_protocol import Group, Op
from paceline.errors import UsageError
from paceline.parallel.tensor.random_zone import RandomZone

F = TypeVar("F", bound=Callable[..., Any])


def exclude_from_compile(function: F) -> F:
    """Keep a function out of the graphs of torch.compile, which can't contain our exchanges."""
    disable: Callable[[F], F] = torch.compiler.disable
    return disable(function)


class TensorAxis:
    """The workers that cut layers between them. All layers, and their deepcopies, share one object.

    `meter` measures the exchanges.
    """

    def __init__(self, group: Group, meter: AxisMeter | None = None) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self._meter = AxisMeter("tensor") if meter is None else meter
        self._meter.add_sender(group)
        self.random_zone = RandomZone(group.rank)
        # The last input that was copied or gathered: the input, how, and the result.
        self._shared_input: tuple[weakref.ref[Tensor], object, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        return self

    # ---- into and out of layers

    @exclude_from_compile
    def copy_input(self, x: Tensor, name: str) -> Tensor:
        """Give each worker the whole `x`. In backward, gradients are summed over workers.

        Layers that share `x` share the copy. So autograd sums their gradients locally, and workers
        exchange them once.
        """
        return self._share_result(x, "copy", lambda: _CopyInput.apply(x, self, name))  # type: ignore[no-untyped-call]

    @exclude_from_compile
    def gather_input(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Put the pieces of all workers side by side; layers that share `x` gather it once."""
        return self._share_result(
            x,
            ("gather", dim),
            lambda: _GatherInput.apply(x, dim, self, name),  # type: ignore[no-untyped-call]
        )

    @exclude_from_compile
    def sum_output(self, x: Tensor, name: str) -> Tensor:
        """Sum a partial result over all workers, in place."""
        summed: Tensor = _SumOutput.apply(x, self, name)  # type: ignore[no-untyped-call]
        return summed

    @exclude_from_compile
    def scatter_output(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Sum a partial result over all workers, and keep this worker's piece of a dimension."""
        piece: Tensor = _ScatterOutput.apply(x, dim, self, name)  # type: ignore[no-untyped-call]
        return piece

    @exclude_from_compile
    def join_output(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Put the pieces of all workers side by side; from here on all workers do the same."""
        joined: Tensor = _JoinOutput.apply(x, dim, self, name)  # type: ignore[no-untyped-call]
        return joined

    @exclude_from_compile
    def split_input(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Keep this worker's piece of a dimension of a tensor that all workers have."""
        piece: Tensor = _SplitInput.apply(x, dim, self, name)  # type: ignore[no-untyped-call]
        return piece

    @exclude_from_compile
    def share_parameters(self, parameters: Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
        """Let workers use whole parameters on parts of activations; sum their gradients at once."""
        copies: tuple[Tensor, ...] = _ShareParameters.apply(self, name, *parameters)  # type: ignore[no-untyped-call]
        return copies

    @exclude_from_compile
    def enter_zone(self, x: Tensor) -> None:
        """Let workers draw different random numbers from here on, as activations are cut."""
        self.random_zone.enter_zone(x.device)

    @exclude_from_compile
    def leave_zone(self, x: Tensor) -> None:
        """Let workers draw equal random numbers again."""
        self.random_zone.leave_zone(x.device)

    @exclude_from_compile
    def forget_input(self) -> None:
        """Forget the input that layers have shared so far, and free its copy."""
        self._shared_input = None

    def _share_result(self, x: Tensor, how: object, make: Callable[[], Any]) -> Tensor:
        """Make something of an input, unless the layer before did so with the same tensor."""
        if not x.requires_grad or not torch.is_grad_enabled():
            result: Tensor = make()
            return result
        # `_version` is the version counter of a tensor: one that was written to is another input.
        key = (how, x._version)
        if (
            self._shared_input is None
            or self._shared_input[0]() is not x
            or self._shared_input[1] != key
        ):
            self._shared_input = weakref.ref(x), key, make()
        return self._shared_input[2]

    # ---- exchanges of plain tensors

    def reduce_tensor(
        self, x: Tensor, name: str, *, out: Tensor | None = None, op: Op = "sum"
    ) -> Tensor:
        """Reduce over all workers: sum, or another operation."""
        x = x.contiguous()
        with self._meter.measure_exchange(name):
            return self.group.all_reduce(x, op=op, name=name, out=out).wait()

    def gather_objects(self, obj: Any, name: str) -> list[Any]:
        """Gather an object of each worker, as JSON."""
        with self._meter.measure_exchange(name):
            return self.group.gather_objects(obj, name=name)

    def gather_pieces(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Put the pieces of all workers side by side."""
        x = x.contiguous()
        with self._meter.measure_exchange(name):
            return torch.cat(self.group.all_gather(x, name=name).wait(), dim)

    def reduce_scatter_pieces(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Sum over all workers, and keep this worker's piece of a dimension."""
        rows = x.shape[dim] // self._check_even(x, dim, name)
        # reduce_scatter cuts the first dimension.
        turned = x.movedim(dim, 0).contiguous()
        with self._meter.measure_exchange(name):
            piece = self.group.reduce_scatter(turned, name=name).wait()
        return piece.view(rows, *turned.shape[1:]).movedim(0, dim).contiguous()

    def view_piece(self, x: Tensor, dim: int, name: str) -> Tensor:
        """View this worker's piece of a dimension."""
        rows = x.shape[dim] // self._check_even(x, dim, name)
        return x.narrow(dim, self.rank * rows, rows)

    def _check_even(self, x: Tensor, dim: int, name: str) -> int:
        """Return the number of workers. Raises `UsageError` if they can't divide a dimension."""
        if x.shape[dim] % self.size:
            more = -x.shape[dim] % self.size
            raise UsageError(
                f"{name}: dimension {dim} has size {x.shape[dim]}, which {self.size} workers can't "
                "cut evenly; "
                f"make it {x.shape[dim] + more}, or {x.shape[dim] - x.shape[dim] % self.size}"
            )
        return self.size


class _CopyInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, name: str) -> Tensor:
        ctx.record_wait = axis, name
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, name = ctx.record_wait
        return axis.reduce_tensor(grad, f"gradient of the input of {name}"), None, None


class _SumOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, name: str) -> Tensor:
        if not x.is_contiguous():
            return axis.reduce_tensor(x, f"output of {name}")
        # Autograd has to know that x is changed in place.
        ctx.mark_dirty(x)
        return axis.reduce_tensor(x, f"output of {name}", out=x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class _JoinOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: TensorAxis, name: str) -> Tensor:
        ctx.record_wait = axis, dim, name
        return axis.gather_pieces(x, dim, f"output of {name}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, name = ctx.record_wait
        return axis.view_piece(grad, dim, name), None, None, None


class _SplitInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: TensorAxis, name: str) -> Tensor:
        ctx.record_wait = axis, dim, name
        return axis.view_piece(x, dim, f"input of {name}").clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, name = ctx.record_wait
        return axis.gather_pieces(grad, dim, f"gradient of the input of {name}"), None, None, None


class _GatherInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: TensorAxis, name: str) -> Tensor:
        ctx.record_wait = axis, dim, name
        return axis.gather_pieces(x, dim, f"input of {name}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, name = ctx.record_wait
        return (
            axis.reduce_scatter_pieces(grad, dim, f"gradient of the input of {name}"),
            None,
            None,
            None,
        )


class _ScatterOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: TensorAxis, name: str) -> Tensor:
        ctx.record_wait = axis, dim, name
        return axis.reduce_scatter_pieces(x, dim, f"output of {name}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, name = ctx.record_wait
        return axis.gather_pieces(grad, dim, f"gradient of the output of {name}"), None, None, None


class _ShareParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, name: str, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.record_wait = (
            axis,
            name,
            [(parameter.shape, parameter.dtype) for parameter in parameters],
        )
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, name, kinds = ctx.record_wait
        # One exchange for all gradients, in a dtype that holds each of them.
        places = [place for place in range(len(grads)) if ctx.needs_input_grad[2 + place]]
        kind = functools.reduce(
            torch.promote_types, (kinds[place][1] for place in places), torch.float32
        )
        flat = torch.cat([grads[place].reshape(-1).to(kind) for place in places])
        flat = axis.reduce_tensor(flat, f"gradients of the parameters of {name}", out=flat)
        results: list[Tensor | None] = [None] * len(grads)
        for place, part in zip(
            places, flat.split([grads[place].numel() for place in places]), strict=True
        ):
            shape, dtype = kinds[place]
            results[place] = part.view(shape).to(dtype)
        return None, None, *results
