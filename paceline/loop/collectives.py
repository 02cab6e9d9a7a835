"""Collective calls of a run: the shared seed, `Run.mean`, `Run.sum` and `Run.gather`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgpack
import torch
from torch import Tensor

from paceline.comm.agreement import Agreement
from paceline.comm.group_protocol import Group
from paceline.errors import UsageError


def agree_on_seed(agreement: Agreement, given: int | None, arguments: str) -> int:
    """Agree on the seed of all workers, drawn by the first if none is `given`.

    Raises `UsageError` if `arguments` differ. Collective.
    """
    drawn = random.SystemRandom().getrandbits(31) if given is None else given
    seeds = [
        msgpack.unpackb(body) for body in agreement.meet("start", msgpack.packb([drawn, arguments]))
    ]
    if any(answer[1] != seeds[0][1] for answer in seeds):
        sides = "; ".join(f"rank {rank}: {answer[1]}" for rank, answer in enumerate(seeds))
        raise UsageError(
            f"workers were started with different arguments ({sides}); "
            "call start(...) alike on all of them"
        )
    return int(seeds[0][0])


def average_values(
    agreement: Agreement, group: Group, x: Tensor | float, weight: float
) -> Tensor | float:
    """Return the mean of `x` over all workers by `weight`: a float for a float, else a tensor.

    Weight 0 is left out, even nan.
    """
    if not 0 <= weight < math.inf:
        raise UsageError(f"run.mean got weight={weight}; a weight is a number, zero or more")
    tensor = x.detach() if isinstance(x, Tensor) else torch.tensor(float(x), dtype=torch.float64)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.float64)
    total = math.fsum(_exchange_weights(agreement, "run.mean", tensor, weight))
    if total == 0:
        raise UsageError(
            "run.mean: the weights of all workers are zero; give weight=, or call it where some "
            "worker has samples"
        )
    weighted = tensor * (weight / total) if weight else torch.zeros_like(tensor)
    result = group.all_reduce(weighted.contiguous(), name="run.mean").wait()
    return result if isinstance(x, Tensor) else float(result)


def sum_values(
    agreement: Agreement, group: Group, x: Tensor | float, *, ghost: bool
) -> Tensor | float:
    """Return the sum of `x` over workers, a number for a number; that of a `ghost` is left out."""
    exact = None if isinstance(x, int) else torch.float64
    tensor = x.detach() if isinstance(x, Tensor) else torch.tensor(x, dtype=exact)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.int64)
    _exchange_weights(agreement, "run.sum", tensor)
    addend = torch.zeros_like(tensor) if ghost else tensor
    total = group.all_reduce(addend.contiguous(), name="run.sum").wait()
    return total if isinstance(x, Tensor) else total.item()


def _exchange_weights(
    agreement: Agreement, call: str, x: Tensor, weight: float = 1.0
) -> list[float]:
    """Return the weights of all workers.

    Raises `UsageError` if they have other kinds of tensors.
    """
    form = f"{tuple(x.shape)} {x.dtype} on {x.device.type}"
    answers = [msgpack.unpackb(a) for a in agreement.meet(call, msgpack.packb([form, weight]))]
    if any(other != answers[0][0] for other, _ in answers):
        sides = "; ".join(f"rank {rank}: {other}" for rank, (other, _) in enumerate(answers))
        raise UsageError(
            f"{call} got different tensors ({sides}); give it the same shape, dtype and device on "
            "every worker"
        )
    return [other for _, other in answers]


def gather_rows(
    agreement: Agreement,
    group: Group,
    x: Tensor,
    *,
    ghost: bool,
    order: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Gather the rows (dim 0) of all workers in rank order, without those of ghosts. Collective.

    A number is one row. `order` has the places in the batch of the samples of each rank; if there
    is one place for each row, rows are sorted by it.
    """
    rows = x.detach().reshape(1) if x.dim() == 0 else x.detach()
    devices = agreement.meet("run.gather", rows.device.type.encode())
    if len(set(devices)) > 1:
        sides = ", ".join(f"{place.decode()} on rank {rank}" for rank, place in enumerate(devices))
        raise UsageError(
            f"run.gather got tensors in different places ({sides}); bring them to run.device on "
            "every worker"
        )
    parts = group.all_gather((rows[:0] if ghost else rows).contiguous(), name="run.gather").wait()
    all_rows = torch.cat(parts)
    if order is None or [len(part) for part in parts] != [len(places) for places in order]:
        return all_rows
    return torch.empty_like(all_rows).index_copy_(
        0, torch.tensor([at for places in order for at in places], device=all_rows.device), all_rows
    )
