"""Clips gradients to the norm that they have over all workers, where parameters are cut over some of them.

|g|^p = sum of whole parameters, once    + sum of those cut along `tensor`, over `tensor`
      + sum of those cut along `shard`, over `shard`    + sum of those cut along both, over both
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.session.axes import RunAxes
from paceline.session.prepare.cuts import ModelCuts

TINY = 1e-6  # as torch adds to a norm before it divides by it


def clip(parameters: Iterable[Tensor], max_norm: float, norm_type: float, *, cuts: ModelCuts, axes: RunAxes) -> Tensor:
    """Clip the gradients of these parameters, or of what is trained in their place, and return their norm before. Collective."""
    if not norm_type > 0:
        raise UsageError(f"run.clip: norm_type={norm_type} is no norm; give a number above 0, or inf")
    sums = {frozenset(kind): 0.0 for count in range(len(axes.cut) + 1) for kind in itertools.combinations(axes.cut, count)}
    grads, seen = list[Tensor](), set[int]()
    for parameter in parameters:
        trained = cuts.trained(parameter) if isinstance(parameter, Parameter) else parameter
        if trained.grad is None or id(trained) in seen:
            continue
        seen.add(id(trained))
        grads.append(trained.grad)
        kind = frozenset(cuts.placements.of(trained).axes) & frozenset(axes.cut)
        sums[kind] = _joined(sums[kind], float(torch.linalg.vector_norm(trained.grad, norm_type, dtype=torch.float64)), norm_type)
    total = sums[frozenset()]
    for kind, mine in sums.items():
        if kind:
            group = axes.groups.along(*kind)
            parts = group.all_gather(torch.tensor([mine], dtype=torch.float64), name="run.clip").wait()
            for part in parts:
                total = _joined(total, float(part), norm_type)
    if grads and not total + TINY <= max_norm:  # so that a norm that is no number reaches the gradients, as torch has it
        torch._foreach_mul_(grads, max_norm / (total + TINY))
    return torch.tensor(total, dtype=grads[0].dtype if grads else torch.get_default_dtype())


def _joined(one: float, other: float, norm_type: float) -> float:
    """Return the norm of two vectors side by side that have these norms."""
    if math.isnan(one) or math.isnan(other):
        return math.nan
    if norm_type == math.inf:
        return max(one, other)
    return math.hypot(one, other) if norm_type == 2.0 else float((one**norm_type + other**norm_type) ** (1 / norm_type))
