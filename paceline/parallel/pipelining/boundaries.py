"""Where one layer ends and the next begins, among the operations between them: there where the
least data crosses.

    blocks.0   add   relu   cat   blocks.1        operations in the order of the forward
             ^     ^      ^     ^                 boundaries that are possible; of equal ones, the
                                                  last

Sizes aren't known before the model runs; they are estimated by what operations do, in units of what
a layer returns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from paceline.errors import UsageError
from paceline.parallel.pipelining.flow import ValueFlow
from paceline.parallel.pipelining.operations import Operation

NUMBERS = re.compile("size|dim|numel|stride|is_floating_point|item")
NUMBER_ATTRIBUTES = re.compile("shape|device|dtype|ndim|is_cuda|requires_grad")
SMALLER = re.compile(
    "getitem|select|narrow|chunk|split|unbind|mean|sum|amax|amin|max|min|argmax|argmin|any|all|norm|(adaptive_)?(max|avg)_pool[123]d|"
    "cross_entropy|nll_loss|mse_loss"
)
LARGER = re.compile("interpolate|upsample|repeat|repeat_interleave|expand|one_hot|pad|outer")
SUMMED = re.compile("cat|concat|stack|hstack|vstack")
NUMBER = 1e-3


def place_boundaries(flow: ValueFlow, layers: Sequence[str]) -> list[int]:
    """Return at which operation each layer begins, and after the last the number of operations."""
    first = dict[str, int]()
    for place, operation in enumerate(flow.operations):
        for path in operation.paths():
            first.setdefault(path, place)
    sizes = estimate_sizes(flow.operations, flow.inputs)
    starts = [0]
    for layer, following in pairwise(layers):
        if first[layer] == first[following]:
            raise UsageError(
                f"the forward gives {layer} and {following} to one function; "
                "name what holds both, as one layer"
            )
        places = range(first[layer] + 1, first[following] + 1)
        starts.append(
            min(
                reversed(places),
                key=lambda place: sum(sizes[name] for name in flow.crossing(place)),
            )
        )
    return [*starts, len(flow.operations)]


def estimate_sizes(operations: Sequence[Operation], inputs: Sequence[str]) -> dict[str, float]:
    """Estimate the size of each value; a number of Python has next to none."""
    sizes = dict.fromkeys(inputs, 1.0)
    for operation in operations:
        sizes[operation.name] = _size(operation, [sizes[name] for name in operation.reads()])
    return sizes


def _size(operation: Operation, of: Sequence[float]) -> float:
    called, largest = operation.called, max(of, default=1.0)
    if operation.kind not in ("function", "method"):
        return 1.0
    if NUMBERS.fullmatch(called) or (
        called == "getattr" and NUMBER_ATTRIBUTES.fullmatch(operation.args[1])
    ):
        return NUMBER
    if SUMMED.fullmatch(called):
        return sum(of)
    if largest == NUMBER:
        return NUMBER if operation.is_arithmetic else 1.0
    return largest * (
        0.5 if SMALLER.fullmatch(called) else 2.0 if LARGER.fullmatch(called) else 1.0
    )
