"""Clips gradients to their norm over all workers, if parameters are cut over some of them.

|g|^p = sum of whole parameters, once    + sum of parameters cut along `tensor`, over `tensor`
      + sum of parameters cut along `shard`, over `shard`    + sum of those cut along both
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.parallel.clipping import check_norm_is_finite
from paceline.prepare.cuts import ModelCuts
from paceline.workers.axes import RunAxes

TINY = 1e-6  # as torch adds to a norm before it divides by it


def clip_gradients(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    finite: bool = False,
    cuts: ModelCuts,
    axes: RunAxes,
) -> Tensor:
    """Clip the gradients of parameters, and return their norm before. Collective.

    A parameter that was cut stands for the pieces that are trained in its place. With `finite`, a
    norm that is not finite raises `RuntimeError` on all workers and leaves gradients as they are.
    """
    if not norm_type > 0:
        raise UsageError(
            f"run.clip: norm_type={norm_type} is no norm; give a number above 0, or inf"
        )
    # Norms by the axes along which a parameter is cut: a sum along them counts each part once.
    norms = {
        frozenset(kind): list[Tensor]()
        for count in range(len(axes.cut_axes) + 1)
        for kind in itertools.combinations(axes.cut_axes, count)
    }
    grads, seen = list[Tensor](), set[int]()
    for parameter in parameters:
        trained = cuts.trained_tensor(parameter) if isinstance(parameter, Parameter) else parameter
        if trained.grad is None or id(trained) in seen:
            continue
        seen.add(id(trained))
        grads.append(trained.grad)
        placement = cuts.placements.placement_of(trained)
        kind = frozenset(placement.axes) & frozenset(axes.cut_axes)
        if trained.grad.numel() and not placement.copy:  # the largest of no numbers is none
            norms[kind].append(
                torch.linalg.vector_norm(trained.grad, norm_type, dtype=torch.float64)
            )
    sums = {kind: _join_norms(mine, norm_type) for kind, mine in norms.items()}
    groups = {kind: axes.groups.group_along(*kind) for kind in sums if kind}
    # All gathers travel at once.
    gathers = [group.all_gather(sums[kind], name="run.clip") for kind, group in groups.items()]
    parts = (
        axes.slice.agreement.wait_for_some(
            lambda: [part for gather in gathers for part in gather.wait()], "run.clip"
        )
        if gathers
        else []
    )
    total = float(_join_norms([sums[frozenset()], *parts], norm_type))
    if finite:
        check_norm_is_finite(total, norm_type)
    # so that a norm that is no number reaches the gradients, as torch has it
    if grads and not total + TINY <= max_norm:
        torch._foreach_mul_(grads, max_norm / (total + TINY))
    return torch.tensor(total, dtype=grads[0].dtype if grads else torch.get_default_dtype())


def _join_norms(norms: list[Tensor], norm_type: float) -> Tensor:
    """Norm of vectors side by side from their norms, on the processor.

    To read it waits for a GPU once.
    """
    if not norms:
        return torch.zeros(1, dtype=torch.float64)
    beside = torch.stack([norm.to(norms[0].device).reshape(()) for norm in norms])
    joined: Tensor = torch.linalg.vector_norm(beside, norm_type)
    return joined.reshape(1).cpu()
