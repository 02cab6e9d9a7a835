"""Compares what workers that cut a model between them should have alike: what the model returns,
and the parameters that stay whole.

first pass                  outputs          a layer whose sum is missing, a plan that ends in parts
pass 2, 11, 100, 200, ...   whole parameters  gradients that were clipped or changed by each worker
                                              for itself
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.errors import ReplicasDiffer, UsageError
from paceline.parallel.containers import tree_leaves
from paceline.parallel.tensor.functions import TensorAxis, eager
from paceline.parallel.tensor.vocab import VocabLogits
from paceline.state.checksum import checksums

# elements of an output that are compared, and how far they may differ, relative to the largest
SAMPLE, TOLERANCE = 64, 1e-2
EARLY, OFTEN = (2, 11), 100  # passes in training after which whole parameters are compared


def watch(
    model: nn.Module,
    axis: TensorAxis,
    columns: Sequence[str],
    parameters: Sequence[tuple[str, Parameter]],
) -> None:
    """Compare in the forward of a whole model. Copies of the model count their passes with it."""
    passes = [0, 0]  # all, and those in training
    # of each worker, before the first pass: a plan that ends in parts leaves other ones
    draws: list[str] = []

    @eager
    def begin(model: nn.Module, args: object) -> None:
        handle.remove()
        if not passes[0]:
            draws[:] = axis.objects(_draws(axis), "random numbers")

    @eager
    def compare(model: nn.Module, args: object, out: object) -> None:
        passes[0] += 1
        passes[1] += model.training and torch.is_grad_enabled()
        if passes[0] == 1:
            _compare_outputs(axis, columns, model, out, draws)
        elif (
            model.training
            and torch.is_grad_enabled()
            and (passes[1] in EARLY or passes[1] % OFTEN == 0)
        ):
            _compare_parameters(axis, parameters)

    handle = model.register_forward_pre_hook(begin)
    model.register_forward_hook(compare)


def _compare_outputs(
    axis: TensorAxis, columns: Sequence[str], model: nn.Module, out: object, draws: Sequence[str]
) -> None:
    tensors = [
        leaf
        for leaf in tree_leaves(out)
        if isinstance(leaf, Tensor) and not isinstance(leaf, VocabLogits)
    ]
    mine = [sample(leaf) for leaf in tensors if leaf.is_floating_point() and leaf.numel()]
    for other in axis.objects(mine, "output of the model"):
        if not alike(mine, other):
            _refuse_draws(draws, f"what {type(model).__name__} returns")
            hint = (
                f"; {columns[-1]} is the last one cut by column(): row() has to follow it, or "
                "column(gather=True)"
                if columns
                else ""
            )
            raise UsageError(
                f"tensor: what {type(model).__name__} returns differs between workers that have "
                f"the same samples{hint}"
            )


def _compare_parameters(axis: TensorAxis, parameters: Sequence[tuple[str, Parameter]]) -> None:
    """Raise `ReplicasDiffer` where whole parameters differ in a bit between workers that compute
    alike.
    """
    # others are gathered while they are used
    here = [(name, p) for name, p in parameters if p.untyped_storage().nbytes() >= p.nbytes]
    kind = (
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    )
    numbers = [f"{number:x}" for number in checksums([p.detach() for _, p in here])]
    found = axis.objects([kind, numbers], "whole parameters")
    if any(other != kind for other, _ in found):  # then the last bits may differ
        return
    for rank, (_, theirs) in enumerate(found):
        wrong = [
            name
            for (name, _), one, two in zip(here, theirs, found[0][1], strict=True)
            if one != two
        ]
        if wrong:
            one, two = axis.group.global_rank(0), axis.group.global_rank(rank)
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            # asked for when all have come here: none is in the middle of drawing numbers of its own
            _refuse_draws(axis.objects(_draws(axis), "random numbers"), f"{wrong[0]}{more}")
            # clipping leaves none as it was
            if len(wrong) < sum(parameter.requires_grad for _, parameter in here):
                module = wrong[0].rpartition(".")[0]
                raise ReplicasDiffer(
                    f"{wrong[0]}{more}, which workers along `tensor` have whole, differs between "
                    f"ranks {one} and {two}: if {module} works "
                    "on features between column() and row(), its gradients have to be summed, "
                    f"{{{module!r}: pl.summed()}}; otherwise "
                    "change parameters and gradients alike on all workers, and clip by run.clip()"
                )
            raise ReplicasDiffer(
                f"{wrong[0]}{more}, which workers along `tensor` have whole, differs between ranks "
                f"{one} and {two}: clip gradients by "
                "run.clip(), which takes the norm over all parts, and change parameters and "
                "gradients alike on all workers"
            )


def _draws(axis: TensorAxis) -> str:
    """Return a text that differs where torch's random generators do."""
    devices = (
        ["cpu", "cuda"] if torch.cuda.is_available() and torch.cuda.is_initialized() else ["cpu"]
    )
    return f"{zlib.crc32(b''.join(axis.zone.outside(torch.device(device)).numpy().tobytes() for device in devices)):x}"  # noqa: E501


def _refuse_draws(draws: Sequence[str], what: str) -> None:
    """Raise `ReplicasDiffer` where workers that should draw the same random numbers don't, which
    is why others differ.
    """
    if len(set(draws)) > 1:
        raise ReplicasDiffer(
            f"{what} differs between workers along `tensor`, and so do their random numbers: "
            "they were seeded differently after "
            "run.prepare, or one has drawn more; seed all of them alike (by run.seed), and not by "
            "rank"
        )


def sample(x: Tensor) -> list[Any]:
    """Return the shape of a tensor and some of its elements, in text."""
    flat = x.detach().reshape(-1)
    return [
        list(x.shape),
        [repr(value) for value in flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].double().tolist()],
    ]


def alike(mine: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether samples of tensors have the same shapes and about the same elements."""
    if [shape for shape, _ in mine] != [shape for shape, _ in other]:
        return False
    for (_, one), (_, two) in zip(mine, other, strict=True):
        x, y = (
            torch.tensor([float(value) for value in values], dtype=torch.float64)
            for values in (one, two)
        )
        near = torch.isclose(
            x,
            y,
            rtol=TOLERANCE,
            atol=TOLERANCE * float(x.nan_to_num(0, 0, 0).abs().max()),
            equal_nan=True,
        )
        if not bool(near.all()):
            return False
    return True
