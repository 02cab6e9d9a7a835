"""Takes a step of `run.step` that ran out of memory again in two halves, on the worker concerned.

batch    forward: out of memory
halves   forward, gradients | forward, gradients | their weighted sum goes into the parameters,
                                                   in a backward that is exchanged

Until that backward nothing has touched p.grad, so halves that are still too large are halved again.
The other workers see one exchange.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.group_protocol import piece_bounds
from paceline.data.batches import count_rows, cut_rows
from paceline.errors import DataError
from paceline.formatting import format_count
from paceline.loop.ghost import copy_buffers, restore_buffers
from paceline.loop.out_of_memory import is_out_of_memory
from paceline.parallel.batchnorm import BatchNorm, NormWithBuffers
from paceline.parallel.containers import tree_leaves

# steps in which memory may turn out to be too small: optimizers have all of their state after the
# first
FIRST_STEPS = 10


class StepBatch(NamedTuple):
    """What `run.step` is given: the model, its inputs and the target, and options of the model."""

    model: nn.Module
    given: tuple[Any, ...]
    options: Mapping[str, Any]

    def find_obstacle(self) -> str | None:
        """Reason not to take the step in parts; None if none is known before the loss."""
        for module in self.model.modules():
            if reason := getattr(module, "whole_batches_only", ""):
                return str(reason)
            if getattr(module, "scale_grad_by_freq", False):
                return (
                    f"{type(module).__name__} counts the words of the whole batch "
                    "(scale_grad_by_freq)"
                )
            if _takes_statistics(module):
                return f"{type(module).__name__} takes statistics of the whole batch"
        if any(parameter._backward_hooks for parameter in self.model.parameters()):
            return "hooks of parameters would be called for each part"
        if any(
            isinstance(x, Tensor) and x.requires_grad
            for x in tree_leaves((self.given, dict(self.options)))
        ):
            return "what it is given requires gradients"
        try:
            self.count_rows()
        except DataError as error:
            return str(error)
        return None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments, as `weigh` gets them: inputs, options, and the target last."""
        *inputs, target = self.given
        return (*inputs, *self.options.values(), target)

    def count_rows(self) -> int:
        """Number of rows of all tensors. Raises `DataError` if tensors differ in it."""
        return count_rows((self.given, dict(self.options)))

    def take_rows(self, start: int, stop: int, count: int) -> StepBatch:
        """Return rows `start` to `stop` of `count`."""
        return StepBatch(
            self.model,
            cut_rows(self.given, start, stop, count),
            cut_rows(dict(self.options), start, stop, count),
        )


def _takes_statistics(module: nn.Module) -> bool:
    """Whether a layer's output or running statistics would change if a batch came in parts."""
    if isinstance(module, BatchNorm):
        return module.training or module.running_mean is None
    return (
        isinstance(module, NormWithBuffers) and module.training and module.running_mean is not None
    )


class OtherLeaves(Exception):
    """A loss has gradients for tensors that are no parameters of the model."""


Value = Callable[[StepBatch], Tensor]  # goes forward, and returns the loss
# what the losses of parts count in the loss of the whole
Weights = Callable[[Sequence[StepBatch]], Sequence[float]]


def _warn(text: str) -> None:
    # on each worker: others may have memory enough
    print(f"paceline: {text}", file=sys.stderr, flush=True)


class HalvedSteps:
    """Remembers how many rows fit into the memory of worker `rank`."""

    def __init__(self, rank: Callable[[], int]) -> None:
        self._rank = rank
        self.max_rows: int | None = None  # rows at a time; None: all, so far
        self._proven: int | None = None  # with which a step has been taken
        self._failed = 0  # the fewest rows that didn't fit
        self._seen_step, self._first_steps = -1, 0  # the last step seen, and how many

    def is_first(self, step: int) -> bool:
        """Count step number `step`, and return whether it is one of the `FIRST` of this process.

        A resumed run has such first steps, too.
        """
        if step != self._seen_step:
            self._seen_step, self._first_steps = step, self._first_steps + 1
        return self._first_steps <= FIRST_STEPS

    def step_in_parts(
        self,
        batch: StepBatch,
        count: int,
        value: Value,
        weights: Weights,
        scale: Callable[[Tensor], float],
        *,
        first: bool,
    ) -> Tensor:
        """Go forward and back in parts of at most `most` of `count` rows, and return the loss.

        The backward pass begins at the loss times `scale`. In the `first` steps parts become
        smaller if memory runs out. Raises `OtherLeaves`, with everything as it was before, if the
        loss has gradients for tensors that are no parameters of the model.
        """
        saved = copy_buffers([batch.model])
        while True:
            try:
                loss = self._accumulate_parts(batch, count, value, weights, scale)
                break
            except OtherLeaves:
                restore_buffers(saved)
                self.max_rows = self._proven
                raise
            except Exception as error:
                if not (first and self.may_halve(error, min(count, self.max_rows or count))):
                    raise
            restore_buffers(saved)
            self.halve_rows(min(count, self.max_rows or count))
        if self.max_rows != self._proven:
            self._proven = self.max_rows
            failed = format_count(self._failed, "sample")
            _warn(
                f"rank {self._rank()} ran out of memory on {failed}, and takes {self.max_rows} at "
                "a "
                "time from now on"
            )
        return loss

    def may_halve(self, error: Exception, count: int) -> bool:
        """Whether memory has run out and this number of rows can be halved."""
        return is_out_of_memory(error) and count > 1

    def halve_rows(self, count: int) -> None:
        """Take at most half of this number of rows at a time from now on."""
        self.max_rows, self._failed = (count + 1) // 2, count
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _accumulate_parts(
        self,
        batch: StepBatch,
        count: int,
        value: Value,
        weights: Weights,
        scale: Callable[[Tensor], float],
    ) -> Tensor:
        most = self.max_rows or count
        parts = [
            batch.take_rows(start, stop, count)
            for start, stop in piece_bounds(count, math.ceil(count / most))
        ]
        trained = [parameter for parameter in batch.model.parameters() if parameter.requires_grad]
        sums: list[Tensor | None] = [None] * len(trained)
        total: Tensor | None = None
        for part, weight in zip(parts, weights(parts), strict=True):
            loss = value(part)
            weighted = loss.detach() * weight
            total = weighted if total is None else total + weighted
            if loss.requires_grad:
                if not {id(leaf) for leaf in find_leaves(loss)} <= {
                    id(parameter) for parameter in trained
                }:
                    raise OtherLeaves
                grads = torch.autograd.grad(
                    loss * (weight * scale(loss)), trained, allow_unused=True
                )
                sums = [
                    _add_gradients(before, grad) for before, grad in zip(sums, grads, strict=True)
                ]
                del grads
            del loss
        inject_gradients(trained, sums)
        assert total is not None
        return total


def find_leaves(loss: Tensor, *, beside: Iterable[Any] = ()) -> Iterator[Tensor]:
    """Yield the tensors to which a backward from `loss` would add gradients.

    Tensors that are reached only through nodes of `beside` are left out.
    """
    if loss.grad_fn is None:
        yield loss
        return
    seen = {*beside}
    waiting = [loss.grad_fn] if loss.grad_fn not in seen else []
    while waiting:
        node = waiting.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)


def _add_gradients(before: Tensor | None, grad: Tensor | None) -> Tensor | None:
    return before if grad is None else grad if before is None else before + grad


def inject_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Let a backward find these gradients, as if it had made them."""
    pairs = [
        (parameter, grad)
        for parameter, grad in zip(parameters, gradients, strict=True)
        if grad is not None
    ]
    if pairs:
        carrier: Tensor = _InjectedGradients.apply(
            [grad for _, grad in pairs], *(parameter for parameter, _ in pairs)
        )  # type: ignore[no-untyped-call]
        carrier.backward()


class _InjectedGradients(torch.autograd.Function):
    """A number whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.saved_tensors)
