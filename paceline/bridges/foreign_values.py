"""Collective calls as other libraries have them: reduce, gather and broadcast any value."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any, Final

import torch
from torch import Tensor

from paceline.data.serialization import pack_value, unpack_value
from paceline.errors import UsageError
from paceline.loop import collectives
from paceline.session.run import Run, parts_of_run

OPERATIONS: Final = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


def parse_operation(operation: Any) -> str:
    """Name of an operation: "mean", "sum", "max" or "min".

    Args:
        operation: Text, torch's `ReduceOp`, or None for "mean".

    Raises:
        UsageError: It is another operation.
    """
    text = "mean" if operation is None else str(operation).rpartition(".")[2].lower()
    if text not in OPERATIONS:
        raise UsageError(f"reduce_op={operation!r} is none of {', '.join(OPERATIONS)}")
    return OPERATIONS[text]


def reduce_value(run: Run, x: Any, operation: Any, *, of_batch: bool = True) -> Any:
    """Reduce a tensor or a number over all workers. Collective.

    Args:
        run: The run.
        x: A tensor of the same shape on all workers, or a number.
        operation: As of `parse_operation`.
        of_batch: Whether `x` belongs to the present batch of the loop over a loader, if there is
            one. A mean is then weighted by samples, and workers without samples (ghosts) are left
            out. Otherwise workers count alike. Default: True.

    Returns:
        A tensor for a tensor, else a number.
    """
    name = parse_operation(operation)
    if not isinstance(x, Tensor | int | float):
        raise UsageError(f"a {type(x).__qualname__} can't be reduced: give a tensor or a number")
    if name == "mean":
        return run.mean(x, None if of_batch else 1.0)
    if name == "sum":
        return run.sum(x) if of_batch else _sum_of_all(run, x)
    if run.size == 1:
        return x
    own = torch.as_tensor(x).detach()
    rows = run.gather(own.unsqueeze(0)) if of_batch else gather_stacked(run, own)
    extreme = rows.amax(0) if name == "max" else rows.amin(0)
    return extreme if isinstance(x, Tensor) else extreme.item()


def _sum_of_all(run: Run, x: Any) -> Any:
    """Sum over all workers, those without samples in the present batch as well. Collective."""
    context = parts_of_run(run).axes.slice
    agreement, group = context.agreement, context.group
    return agreement.attempt_call(lambda: collectives.sum_values(agreement, group, x, ghost=False))


def gather_stacked(run: Run, x: Tensor) -> Tensor:
    """Gather a tensor of all workers, in a new first dim if there are several. Collective.

    Raises:
        UsageError: Shapes or dtypes differ. Raised on all workers.
    """
    if run.size == 1:
        return x
    agreement = parts_of_run(run).axes.everyone

    def gather() -> Tensor:
        form = f"{tuple(x.shape)} {x.dtype}"
        forms = agreement.meet("all_gather", form.encode())
        if len(set(forms)) > 1:
            sides = "; ".join(f"rank {rank}: {each.decode()}" for rank, each in enumerate(forms))
            raise UsageError(
                f"all_gather got different tensors ({sides}), which can't be stacked: "
                "run.gather(x) of paceline joins rows, in the order of the data set"
            )
        parts = agreement.group.all_gather(x.detach().contiguous(), name="all_gather").wait()
        return torch.stack(list(parts))

    return agreement.attempt_call(gather)


def broadcast_value(run: Run, value: Any, source: int = 0) -> Any:
    """Give all workers the value of one. Collective.

    Args:
        run: The run.
        value: Plain values, tensors and paths, nested in dicts, lists and tuples. Nothing is
            pickled. Only the value of `source` counts.
        source: Rank of the worker that gives it. Default: 0.

    Raises:
        UsageError: There is no such rank.
        DataError: The value holds an object of another type. Raised on `source`.
    """
    if not 0 <= source < run.size:
        raise UsageError(f"broadcast from rank {source}: there are {run.size} workers")
    if run.size == 1:
        return value
    agreement = parts_of_run(run).axes.everyone
    # paths are common here, and no plain value
    is_path = isinstance(value, PurePath)
    own = pack_value((is_path, str(value) if is_path else value), what="broadcast")
    body = own if run.rank == source else b""
    answers = agreement.attempt_call(lambda: agreement.meet("broadcast", body))
    if run.rank == source:
        return value
    was_path, received = unpack_value(answers[source])
    return Path(received) if was_path else received
