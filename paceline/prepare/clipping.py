"""Clips gradients of a cut model by their norm over all workers.

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

    Args:
        parameters: Parameters. One that was cut stands for the piece that is trained in its place.
        max_norm: Largest norm that is left as it is.
        norm_type: Exponent p of the norm, above 0; may be inf.
        finite: Whether a norm that is not finite raises an error. Default: no.
        cuts: The cuts of the run.
        axes: The groups of the run.

    Returns:
        The norm, as a tensor on the CPU.

    Raises:
        RuntimeError: The norm is not finite and `finite` is set. Raised on all workers; gradients
            stay as they are.
        UsageError: `norm_type` is not above 0.
    """
    if not norm_type > 0:
        raise UsageError(
            f"run.clip: norm_type={norm_type} is no norm; give a number above 0, or inf"
        )
    # Norms are kept apart by the axes along which a parameter is cut. A sum along these axes counts
    # each part once. Every combination has an entry, so that all workers make the same calls.
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
        # An empty gradient has no largest element (p = inf), and a copy counts on another worker.
        if trained.grad.numel() and not placement.copy:
            norms[kind].append(
                torch.linalg.vector_norm(trained.grad, norm_type, dtype=torch.float64)
            )
    sums = {kind: _join_norms(own_norms, norm_type) for kind, own_norms in norms.items()}
    groups = {kind: axes.groups.group_along(*kind) for kind in sums if kind}
    # All gathers begin before the first one is waited for, so they overlap.
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
    # The test is negated for a norm of nan: as in torch, it makes the gradients nan.
    # `_foreach_mul_` is private to torch, which clips with it too. If it goes, this raises an
    # AttributeError, and a loop over `grads` does the same.
    if grads and not total + TINY <= max_norm:
        torch._foreach_mul_(grads, max_norm / (total + TINY))
    return torch.tensor(total, dtype=grads[0].dtype if grads else torch.get_default_dtype())


def _join_norms(norms: list[Tensor], norm_type: float) -> Tensor:
    """Compute the norm of a vector from the norms of its parts, on the CPU.

    It waits for a GPU once.
    """
    if not norms:
        return torch.zeros(1, dtype=torch.float64)
    stacked = torch.stack([norm.to(norms[0].device).reshape(()) for norm in norms])
    joined: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return joined.reshape(1).cpu()
