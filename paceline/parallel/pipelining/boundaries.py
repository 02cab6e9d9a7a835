"""Chooses, among the operations between two layers, the boundary that the least data crosses.

    blocks.0   add   relu   cat   blocks.1        operations in the order of the forward
             ^     ^      ^     ^                 possible boundaries; of equal ones, the last

Sizes aren't known before the model runs. They are estimated from what operations do, in units of a
layer's result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from paceline.errors import UsageError
from paceline.parallel.pipelining.flow import ValueFlow
from paceline.parallel.pipelining.operations import Operation

# Names of operations whose results are numbers of Python, or smaller or larger than their largest
# input, or as large as all inputs together.
NUMBER_FUNCTIONS = re.compile("size|dim|numel|stride|is_floating_point|item")
NUMBER_ATTRIBUTES = re.compile("shape|device|dtype|ndim|is_cuda|requires_grad")
SHRINKING_FUNCTIONS = re.compile(
    "getitem|select|narrow|chunk|split|unbind|mean|sum|amax|amin|max|min|argmax|argmin|any|all|norm|(adaptive_)?(max|avg)_pool[123]d|"
    "cross_entropy|nll_loss|mse_loss"
)
GROWING_FUNCTIONS = re.compile(
    "interpolate|upsample|repeat|repeat_interleave|expand|one_hot|pad|outer"
)
JOINING_FUNCTIONS = re.compile("cat|concat|stack|hstack|vstack")
NUMBER_SIZE = 1e-3  # the estimated size of a number


def place_boundaries(flow: ValueFlow, layers: Sequence[str]) -> list[int]:
    """Find the operation at which each layer begins; the last entry is the number of operations."""
    # The first operation that uses each path. A boundary lies after a layer's and up to the next
    # one's.
    first = dict[str, int]()
    for place, operation in enumerate(flow.operations):
        for path in operation.model_paths():
            first.setdefault(path, place)
    sizes = estimate_sizes(flow.operations, flow.inputs)
    starts = [0]
    for layer, following in pairwise(layers):
        if first[layer] == first[following]:
            raise UsageError(
                f"the forward gives {layer} and {following} to one function; name a module that "
                "contains both, as one layer"
            )
        places = range(first[layer] + 1, first[following] + 1)
        starts.append(
            min(
                reversed(places),
                key=lambda place: sum(sizes[name] for name in flow.crossing_values(place)),
            )
        )
    return [*starts, len(flow.operations)]


def estimate_sizes(operations: Sequence[Operation], inputs: Sequence[str]) -> dict[str, float]:
    """Estimate the size of each value; a number of Python has almost none."""
    sizes = dict.fromkeys(inputs, 1.0)
    for operation in operations:
        sizes[operation.name] = _estimate_size(
            operation, [sizes[name] for name in operation.value_names()]
        )
    return sizes


def _estimate_size(operation: Operation, of: Sequence[float]) -> float:
    called, largest = operation.called_name, max(of, default=1.0)
    if operation.kind not in ("function", "method"):
        return 1.0
    if NUMBER_FUNCTIONS.fullmatch(called) or (
        called == "getattr" and NUMBER_ATTRIBUTES.fullmatch(operation.args[1])
    ):
        return NUMBER_SIZE
    if JOINING_FUNCTIONS.fullmatch(called):
        return sum(of)
    if largest == NUMBER_SIZE:
        return NUMBER_SIZE if operation.is_arithmetic else 1.0
    return largest * (
        0.5
        if SHRINKING_FUNCTIONS.fullmatch(called)
        else 2.0
        if GROWING_FUNCTIONS.fullmatch(called)
        else 1.0
    )
