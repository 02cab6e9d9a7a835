"""Which values go from the operations before a place to those after it, and which are made again.

size = x.shape[1]                    a number: it is sent
mask = triu(full((size, size), 1))   made of numbers alone: every stage that uses it makes it again
x.device                             every stage has its own
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from paceline.parallel.pipelining.operations import Operation, look_up_path

# Functions that give the same values whenever they are called: nothing random, nothing in place.
REPEATABLE = re.compile(
    "arange|linspace|logspace|full|ones|zeros|eye|tensor|triu|tril|getitem|view|reshape|flatten|unflatten|squeeze|unsqueeze|expand|repeat|"
    "to|type|float|double|half|bfloat16|long|int|bool|add|sub|mul|truediv|floordiv|mod|neg|pow|div|lt|le|gt|ge|eq|ne|and_|or_|xor|invert|"
    "logical_and|logical_or|logical_not|masked_fill|where|exp|log|sqrt|rsqrt|sin|cos|outer|cumsum|cat|stack|transpose|permute|contiguous"
)
# Functions whose results share no memory with their inputs.
FRESH = re.compile(
    "add|sub|mul|truediv|floordiv|mod|neg|pow|matmul|lt|le|gt|ge|eq|ne|cat|stack|arange|linspace|full|ones|zeros|eye|tensor|size|dim|numel"
)
# Functions that change an input: methods such as add_, operators such as iadd.
IN_PLACE = re.compile(".*[^_]_|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)|setitem")


class ValueFlow:
    """The values of a forward, from the operations that make them to those that use them."""

    def __init__(
        self, model: nn.Module, operations: Sequence[Operation], inputs: Sequence[str]
    ) -> None:
        self.operations, self.inputs = tuple(operations), tuple(inputs)
        self._order = (*inputs, *(operation.name for operation in operations))
        self._repeated = {
            operation.name: operation for operation in _find_repeated(model, operations)
        }

    def crossing_values(self, place: int) -> tuple[str, ...]:
        """Names of the values that operations from `place` on get from those before."""
        needed = self._needed_values(place)
        return tuple(
            name
            for name in self._values_before(place)
            if name in needed and name not in self._repeated
        )

    def repeated_operations(self, place: int) -> tuple[Operation, ...]:
        """The operations before `place` that are done again for those from there on."""
        needed = self._needed_values(place)
        return tuple(
            self._repeated[name]
            for name in self._values_before(place)
            if name in needed and name in self._repeated
        )

    def _values_before(self, place: int) -> Sequence[str]:
        """Names of the values that are made before `place`, in order."""
        return self._order[: len(self.inputs) + place]

    def _needed_values(self, place: int) -> set[str]:
        """Names of values that are read from `place` on, also by operations that are done again."""
        needed = {name for operation in self.operations[place:] for name in operation.value_names()}
        for name in reversed(self._values_before(place)):
            if name in needed and name in self._repeated:
                needed.update(self._repeated[name].value_names())
        return needed


def _find_repeated(model: nn.Module, operations: Sequence[Operation]) -> Iterator[Operation]:
    """Yield the operations that each stage does for itself.

    They work on numbers, on buffers, and on results of such operations.
    """
    changed = _find_changed(operations)
    # Modules that are called as a whole: their buffers may change in the call.
    whole = {
        path
        for operation in operations
        if operation.kind in ("module", "chained")
        for path in operation.model_paths()
    }
    # Numbers are sent, as they are cheap; `repeated` has the values that are made again.
    numbers, repeated = set[str](), set[str]()
    for operation in operations:
        name, reads = operation.name, set(operation.value_names())
        if operation.reads_attribute("device"):
            repeated.add(name)
            yield Operation(name, "device", "device", (), {})
        elif operation.gives_numbers or (reads and reads <= numbers and operation.is_arithmetic):
            numbers.add(name)
        elif (
            name not in changed
            and reads <= numbers | repeated
            and _is_repeatable(model, operation, changed, whole)
        ):
            repeated.add(name)
            yield operation


def _is_repeatable(
    model: nn.Module, operation: Operation, changed: set[str], whole: set[str]
) -> bool:
    """Whether an operation gives the same each time, from values and unchanged buffers alone."""
    if operation.kind not in ("function", "method") or not REPEATABLE.fullmatch(
        operation.called_name
    ):
        return False
    for path in operation.model_paths():
        target, steps = look_up_path(model, path), path.split(".")
        inside = any(".".join(steps[:count]) in whole for count in range(1, len(steps)))
        if inside or path in changed or not isinstance(target, Tensor) or target.requires_grad:
            return False
    return True


def _find_changed(operations: Sequence[Operation]) -> set[str]:
    """Values and buffers that an operation may change in place, or through shared memory."""
    # Go backwards: what shares memory with a changed value is changed, too.
    changed = set[str]()
    for operation in reversed(operations):
        in_place = (
            IN_PLACE.fullmatch(operation.called_name)
            or "out" in operation.kwargs
            or operation.kwargs.get("inplace")
        )
        if in_place or (operation.name in changed and not FRESH.fullmatch(operation.called_name)):
            changed.update([operation.name, *operation.value_names(), *operation.model_paths()])
    return changed
