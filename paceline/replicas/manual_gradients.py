"""Checks gradients that a script sets itself (p.grad = torch.autograd.grad(...)).

They are not exchanged, so replicas may diverge.

    the first steps, and about once a second    whose p.grad is not the result of backward?
                                                all, before an optimizer steps
    a worker has such a gradient                its norm and its sum on each worker
                                                the same, but for rounding: go on

A gradient changed in place (clipped, decayed) still counts as the result of backward.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import msgpack
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.loop.turns import TrainingLoop

FIRST: Final = 2  # steps that are checked in any case
OFTEN: Final = 256  # of so many steps one is checked, where no loader counts them
NEAR: Final = 1e-3  # relative difference of what replicas compute alike


class NextMeeting(Protocol):
    """Schedule of meetings of all workers. `next`: the step after which they meet anyway."""

    next_step: int


class ManualGradients:
    """Checks the gradients of an optimizer before it steps: in first steps and at meetings.

    `twin` is the first of the workers that have the same part of a cut model as this one.
    """

    def __init__(
        self, loop: TrainingLoop, meetings: NextMeeting, twin: Callable[[int], int]
    ) -> None:
        self._loop, self.meetings, self._twin = loop, meetings, twin
        self._calls = 0  # outside of loops over a loader

    def look(self, optimizer: Optimizer) -> None:
        """Raise `UsageError` on all workers if gradients were set that replicas don't have alike.

        Collective, where a check is due.
        """
        if not self._due():
            return
        backward, meet = self._loop.backward, self._loop.context.agreement.meet
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        mine = backward.watched.find_foreign(stepped)
        found = [
            msgpack.unpackb(body)
            for body in meet("optimizer.step", msgpack.packb(mine) if mine else b"")
            if body
        ]
        numbers = sorted({number for theirs in found for number in theirs})
        if not numbers:
            return
        parameters = backward.watched.parameters
        figures = [_figures(parameters[number].parameter.grad) for number in numbers]
        theirs = [
            msgpack.unpackb(body)
            for body in meet("gradients set by the script", msgpack.packb(figures))
        ]
        for (number, *values), ranks in itertools.product(
            zip(numbers, *theirs, strict=True), self._replicas(len(theirs))
        ):
            if any(not _near(values[ranks[0]], values[rank]) for rank in ranks):
                sides = "; ".join(
                    f"rank {self._loop.context.group.global_rank(rank)}: {_worded(values[rank])}"
                    for rank in ranks
                )
                raise UsageError(
                    f"p.grad of {parameters[number].name} was set by the script, and differs "
                    f"between workers ({sides}): only what "
                    "loss.backward() adds is exchanged. Use loss.backward(), or set p.grad = "
                    "run.mean(g) on every worker"
                )

    def _replicas(self, size: int) -> Iterable[list[int]]:
        """Return the ranks that have the same part of the model, of each part."""
        found = defaultdict[int, list[int]](list)
        for rank in range(size):
            found[self._twin(self._loop.context.group.global_rank(rank))].append(rank)
        return found.values()

    def _due(self) -> bool:
        loop = self._loop
        if loop.led is not None:
            return loop.steps < FIRST or loop.steps + 1 >= self.meetings.next_step
        self._calls += 1
        return not loop.transaction.recovers and (self._calls <= FIRST or self._calls % OFTEN == 0)


def _figures(grad: Tensor | None) -> list[float] | None:
    """Return the norm and the sum of a gradient, and how far sums may lie apart."""
    if grad is None:
        return None
    values = grad.detach()
    values = values.coalesce().values() if values.is_sparse else values
    values = torch.view_as_real(values) if values.is_complex() else values
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return [
        norm,
        float(values.sum(dtype=torch.float64)),
        NEAR * norm * math.sqrt(max(values.numel(), 1)),
    ]


def _near(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if not all(map(math.isfinite, (*one, *other))):
        return repr(one) == repr(other)
    return bool(
        abs(one[0] - other[0]) <= NEAR * max(one[0], other[0])
        and abs(one[1] - other[1]) <= max(one[2], other[2])
    )


def _worded(value: Any) -> str:
    return "None" if value is None else f"norm {value[0]:.6g}"
