"""Compares workers along `tensor`: a model's outputs, and parameters that all of them have whole.

first pass                  outputs             a layer whose sum is missing, or a plan that ends in
                                                parts, makes them differ
pass 2, 11, 100, 200, ...   whole parameters    gradients that each worker has clipped or changed by
                                                itself make them differ
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
from paceline.parallel.tensor.exchanges import TensorAxis, exclude_from_compile
from paceline.parallel.tensor.vocab import VocabLogits
from paceline.state.checksum import compute_checksums

# Compared elements of an output; their tolerance, relative to the largest.
SAMPLE, TOLERANCE = 64, 1e-2
# Passes in training after which whole parameters are compared.
EARLY, OFTEN = (2, 11), 100


def watch_model(
    model: nn.Module,
    axis: TensorAxis,
    columns: Sequence[str],
    parameters: Sequence[tuple[str, Parameter]],
) -> None:
    """Compare workers in forwards of a model. Copies of it count their passes with it."""
    passes = [0, 0]  # number of passes, and of those in training
    # Digests of all workers' generators before the first pass. They tell later whether outputs
    # differ as random numbers did, or as a plan ends in parts.
    draws: list[str] = []

    @exclude_from_compile
    def begin(model: nn.Module, args: object) -> None:
        handle.remove()
        if not passes[0]:
            draws[:] = axis.gather_objects(_random_digest(axis), "random numbers")

    @exclude_from_compile
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
    samples = [
        sample_elements(leaf) for leaf in tensors if leaf.is_floating_point() and leaf.numel()
    ]
    for other in axis.gather_objects(samples, "output of the model"):
        if not are_samples_close(samples, other):
            _refuse_different_draws(draws, f"what {type(model).__name__} returns")
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
    """Raise `ReplicasDiffer` if any bit of a whole parameter differs between like workers."""
    # Parameters without memory are gathered only while they are used (zero=3).
    here = [(name, p) for name, p in parameters if p.untyped_storage().nbytes() >= p.nbytes]
    kind = (
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    )
    numbers = [f"{checksum:x}" for checksum in compute_checksums([p.detach() for _, p in here])]
    answers = axis.gather_objects([kind, numbers], "whole parameters")
    # On different processors, or with different numbers of threads, last bits may differ.
    if any(other != kind for other, _ in answers):
        return
    for rank, (_, theirs) in enumerate(answers):
        wrong = [
            name
            for (name, _), one, two in zip(here, theirs, answers[0][1], strict=True)
            if one != two
        ]
        if wrong:
            one, two = axis.group.global_rank(0), axis.group.global_rank(rank)
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            # All workers come here together, so none of them is inside of a zone of own random
            # numbers.
            _refuse_different_draws(
                axis.gather_objects(_random_digest(axis), "random numbers"), f"{wrong[0]}{more}"
            )
            # Different clipping would change all parameters, so this is something else.
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


def _random_digest(axis: TensorAxis) -> str:
    """Digest of the states of torch's random generators, outside of zones."""
    devices = (
        ["cpu", "cuda"] if torch.cuda.is_available() and torch.cuda.is_initialized() else ["cpu"]
    )
    return f"{zlib.crc32(b''.join(axis.random_zone.shared_state(torch.device(device)).numpy().tobytes() for device in devices)):x}"  # noqa: E501


def _refuse_different_draws(draws: Sequence[str], what: str) -> None:
    """Raise `ReplicasDiffer` if workers draw different random numbers, which explains the rest."""
    if len(set(draws)) > 1:
        raise ReplicasDiffer(
            f"{what} differs between workers along `tensor`, and so do their random numbers: "
            "they were seeded differently after "
            "run.prepare, or one has drawn more; seed all of them "
            "alike (by run.seed), and not by rank"
        )


def sample_elements(x: Tensor) -> list[Any]:
    """Sample a tensor: its shape, and some of its elements as text."""
    flat = x.detach().reshape(-1)
    return [
        list(x.shape),
        [repr(value) for value in flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].double().tolist()],
    ]


def are_samples_close(own: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists of samples have the same shapes, and elements within `TOLERANCE`."""
    if [shape for shape, _ in own] != [shape for shape, _ in other]:
        return False
    for (_, one), (_, two) in zip(own, other, strict=True):
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
