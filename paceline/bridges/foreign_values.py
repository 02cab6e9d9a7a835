"""Collective calls as other libraries have them: reduce, gather and broadcast any value."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any, Final

import torch
from torch import Tensor

from paceline.data.serialization import pack_value, unpack_value
from paceline.errors import UsageError
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


def reduce_value(run: Run, x: Any, operation: Any, *, weight: float | None = None) -> Any:
    """Reduce a tensor or a number over all workers. Collective.

    Workers without samples (ghosts) are left out inside the loop over a loader.

    Args:
        run: The run.
        x: A tensor of the same shape on all workers, or a number.
        operation: As of `parse_operation`.
        weight: Weight of this worker in a mean. Default: its samples inside the loop over a loader,
            else 1.

    Returns:
        A tensor for a tensor, else a number.
    """
    name = parse_operation(operation)
    if not isinstance(x, Tensor | int | float):
        raise UsageError(f"a {type(x).__qualname__} can't be reduced: give a tensor or a number")
    if name == "mean":
        return run.mean(x, weight)
    if name == "sum":
        return run.sum(x)
    rows = run.gather(torch.as_tensor(x).detach().unsqueeze(0))
    extreme = rows.amax(0) if name == "max" else rows.amin(0)
    return extreme if isinstance(x, Tensor) else extreme.item()


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
