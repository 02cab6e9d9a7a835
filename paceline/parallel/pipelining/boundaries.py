"""Where one layer ends and the next begins, among the operations between them: there where the least data crosses.

    blocks.0   add   relu   cat   blocks.1        operations in the order of the forward
             ^     ^      ^     ^                 boundaries that are possible; of equal ones, the last

Sizes aren't known before the model runs; they are estimated by what operations do, in units of what a layer returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from paceline.errors import UsageError
from paceline.parallel.pipelining.operations import Operation

NUMBERS = {"size", "dim", "numel", "stride", "is_floating_point", "item"}
NUMBER_ATTRIBUTES = {"shape", "device", "dtype", "ndim", "is_cuda", "requires_grad", "training"}
SMALLER = {
    *[
        "getitem",
        "select",
        "narrow",
        "chunk",
        "split",
        "unbind",
        "mean",
        "sum",
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "any",
        "all",
        "norm",
    ],
    *["max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"],
    *["adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "cross_entropy", "nll_loss", "mse_loss"],
}
LARGER = set(["interpolate", "upsample", "repeat", "repeat_interleave", "expand", "one_hot", "pad", "outer"])
SUMMED = set(["cat", "concat", "stack", "hstack", "vstack"])
NUMBER = 1e-3


def place_boundaries(operations: Sequence[Operation], layers: Sequence[str], inputs: Sequence[str]) -> list[int]:
    """Return at which operation each layer begins, and after the last the number of operations."""
    first = dict[str, int]()
    for place, operation in enumerate(operations):
        for path in operation.paths():
            first.setdefault(path, place)
    sizes = estimate_sizes(operations, inputs)
    starts = [0]
    for layer, following in pairwise(layers):
        if first[layer] == first[following]:
            raise UsageError(f"the forward gives {layer} and {following} to one function; name what holds both, as one layer")
        places = range(first[layer] + 1, first[following] + 1)
        starts.append(min(reversed(places), key=lambda place: sum(sizes[name] for name in crossing(operations, inputs, place))))
    return [*starts, len(operations)]


def crossing(operations: Sequence[Operation], inputs: Sequence[str], place: int) -> tuple[str, ...]:
    """Return the names of the values that are there before the operation at `place`, and used from it on."""
    read = {name for operation in operations[place:] for name in operation.reads()}
    return tuple(name for name in (*inputs, *(operation.name for operation in operations[:place])) if name in read)


def estimate_sizes(operations: Sequence[Operation], inputs: Sequence[str]) -> dict[str, float]:
    """Estimate the size of each value; a number of Python has next to none."""
    sizes = dict.fromkeys(inputs, 1.0)
    for operation in operations:
        sizes[operation.name] = _size(operation, [sizes[name] for name in operation.reads()])
    return sizes


def _size(operation: Operation, of: Sequence[float]) -> float:
    called: Any = operation.target if isinstance(operation.target, str) else getattr(operation.target, "__name__", "")
    largest = max(of, default=1.0)
    if operation.kind not in ("function", "method"):
        return 1.0
    if called in NUMBERS or (called == "getattr" and operation.args[1] in NUMBER_ATTRIBUTES):
        return NUMBER
    if called in SUMMED:
        return sum(of)
    if largest == NUMBER:  # arithmetic with numbers gives a number, functions of torch a tensor
        return 1.0 if getattr(operation.target, "__module__", "") in ("torch", None) and called not in ("getitem",) else NUMBER
    return largest * (0.5 if called in SMALLER else 2.0 if called in LARGER else 1.0)
