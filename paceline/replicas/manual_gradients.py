"""Checks gradients that a script sets itself (p.grad = torch.autograd.grad(...)).

They are not exchanged, so replicas may diverge.

    in the first steps, and about     before an optimizer steps, all workers exchange the parameters
    once a second                     whose p.grad is not the result of backward
    if there are any                  they exchange the norm and the sum of each such gradient;
                                      equal except for rounding: go on; otherwise: an error

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

FIRST_STEPS: Final = 2  # the first steps are always checked
CALLS_BETWEEN_CHECKS: Final = 256  # one in this number of steps is checked if no loader counts them
RELATIVE_TOLERANCE: Final = 1e-3  # relative difference that rounding may cause between replicas


class NextMeeting(Protocol):
    """Schedule of meetings of all workers. After the step `next_step` they meet anyway."""

    next_step: int


class ManualGradients:
    """Checks the gradients of an optimizer before it steps, in the first steps and at meetings.

    Args:
        loop: The training loop.
        meetings: Schedule of meetings of all workers.
        twin: Finds, for a rank, the first rank that has the same part of a cut model.
    """

    def __init__(
        self, loop: TrainingLoop, meetings: NextMeeting, twin: Callable[[int], int]
    ) -> None:
        self._loop, self.meetings, self._find_twin = loop, meetings, twin
        self._call_count = 0  # number of optimizer steps outside of loops over a loader

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raise `UsageError`, on all workers, if gradients that a script set differ.

        Collective if a check is due.
        """
        if not self._is_due():
            return
        backward, meet = self._loop.backward, self._loop.context.agreement.meet
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        own_slots = backward.watched.find_foreign(stepped)
        reports = [
            msgpack.unpackb(body)
            for body in meet("optimizer.step", msgpack.packb(own_slots) if own_slots else b"")
            if body
        ]
        slots = sorted({slot for measurements in reports for slot in measurements})
        if not slots:
            return
        # Replicas of one part must have equal gradients. Different parts of a cut model may differ.
        parameters = backward.watched.parameters
        figures = [_measure_gradient(parameters[slot].parameter.grad) for slot in slots]
        measurements = [
            msgpack.unpackb(body)
            for body in meet("gradients set by the script", msgpack.packb(figures))
        ]
        for (slot, *values), ranks in itertools.product(
            zip(slots, *measurements, strict=True), self._group_replicas(len(measurements))
        ):
            if any(not _is_near(values[ranks[0]], values[rank]) for rank in ranks):
                sides = "; ".join(
                    f"rank {self._loop.context.group.global_rank(rank)}: "
                    f"{_describe_gradient(values[rank])}"
                    for rank in ranks
                )
                raise UsageError(
                    f"p.grad of {parameters[slot].name} was set by the script, and differs "
                    f"between workers ({sides}): only what "
                    "loss.backward() adds is exchanged. Use loss.backward(), or set p.grad = "
                    "run.mean(g) on every worker"
                )

    def _group_replicas(self, size: int) -> Iterable[list[int]]:
        """Group the ranks by the part of the model that they have."""
        ranks_by_twin = defaultdict[int, list[int]](list)
        for rank in range(size):
            ranks_by_twin[self._find_twin(self._loop.context.group.global_rank(rank))].append(rank)
        return ranks_by_twin.values()

    def _is_due(self) -> bool:
        loop = self._loop
        if loop.leading_turn is not None:
            return loop.steps_made < FIRST_STEPS or loop.steps_made + 1 >= self.meetings.next_step
        self._call_count += 1
        return not loop.transaction.recovers and (
            self._call_count <= FIRST_STEPS or self._call_count % CALLS_BETWEEN_CHECKS == 0
        )


def _measure_gradient(grad: Tensor | None) -> list[float] | None:
    """Measure a gradient: its norm, its sum, and the tolerance of the sum."""
    if grad is None:
        return None
    values = grad.detach()
    values = values.coalesce().values() if values.is_sparse else values
    values = torch.view_as_real(values) if values.is_complex() else values
    # Rounding errors of n elements add up to about sqrt(n) of one.
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return [
        norm,
        float(values.sum(dtype=torch.float64)),
        RELATIVE_TOLERANCE * norm * math.sqrt(max(values.numel(), 1)),
    ]


def _is_near(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    if not all(map(math.isfinite, (*first, *second))):
        return repr(first) == repr(second)
    return bool(
        abs(first[0] - second[0]) <= RELATIVE_TOLERANCE * max(first[0], second[0])
        and abs(first[1] - second[1]) <= max(first[2], second[2])
    )


def _describe_gradient(value: Any) -> str:
    return "None" if value is None else f"norm {value[0]:.6g}"
