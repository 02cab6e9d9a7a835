"""Which values go from the operations before a place to those after it, and which are made on both
sides.

size = x.shape[1]                    a number: it is sent
mask = triu(full((size, size), 1))   made of numbers alone: every stage that uses it makes it anew,
                                     and it is not sent
x.device                             every stage has its own
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from paceline.parallel.pipelining.operations import Operation, find

# the same values whenever they are called; nothing random, nothing in place
REPEATABLE = re.compile(
    "arange|linspace|logspace|full|ones|zeros|eye|tensor|triu|tril|getitem|view|reshape|flatten|unflatten|squeeze|unsqueeze|expand|repeat|"
    "to|type|float|double|half|bfloat16|long|int|bool|add|sub|mul|truediv|floordiv|mod|neg|pow|div|lt|le|gt|ge|eq|ne|and_|or_|xor|invert|"
    "logical_and|logical_or|logical_not|masked_fill|where|exp|log|sqrt|rsqrt|sin|cos|outer|cumsum|cat|stack|transpose|permute|contiguous"
)
FRESH = re.compile(  # what shares no memory with what it is made of
    "add|sub|mul|truediv|floordiv|mod|neg|pow|matmul|lt|le|gt|ge|eq|ne|cat|stack|arange|linspace|full|ones|zeros|eye|tensor|size|dim|numel"
)
IN_PLACE = re.compile(".*[^_]_|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)|setitem")


class ValueFlow:
    """The values of a forward, from where they are made to where they are used."""

    def __init__(
        self, model: nn.Module, operations: Sequence[Operation], inputs: Sequence[str]
    ) -> None:
        self.operations, self.inputs = tuple(operations), tuple(inputs)
        self._order = (*inputs, *(operation.name for operation in operations))
        self._repeated = {operation.name: operation for operation in _repeated(model, operations)}

    def crossing(self, place: int) -> tuple[str, ...]:
        """Return the names of the values that the operations from `place` on are given by those
        before.
        """
        needed = self._needed(place)
        return tuple(
            name for name in self._before(place) if name in needed and name not in self._repeated
        )

    def repeated(self, place: int) -> tuple[Operation, ...]:
        """Return the operations before `place` that are done again by those who go on from
        there.
        """
        needed = self._needed(place)
        return tuple(
            self._repeated[name]
            for name in self._before(place)
            if name in needed and name in self._repeated
        )

    def _before(self, place: int) -> Sequence[str]:
        return self._order[: len(self.inputs) + place]

    def _needed(self, place: int) -> set[str]:
        """Return the names of values that are read from `place` on, and of those that the
        repeated ones among them are made of.
        """
        needed = {name for operation in self.operations[place:] for name in operation.reads()}
        for name in reversed(self._before(place)):
            if name in needed and name in self._repeated:
                needed.update(self._repeated[name].reads())
        return needed


def _repeated(model: nn.Module, operations: Sequence[Operation]) -> Iterator[Operation]:
    """Yield the operations that every stage does for itself: those on numbers, buffers and
    results of such operations.
    """
    changed = _changed(operations)
    whole = {
        path
        for operation in operations
        if operation.kind in ("module", "chained")
        for path in operation.paths()
    }
    numbers, made = set[str](), set[str]()
    for operation in operations:
        name, reads = operation.name, set(operation.reads())
        if operation.reads_attribute("device"):
            made.add(name)
            yield Operation(name, "device", "device", (), {})
        elif operation.gives_numbers or (reads and reads <= numbers and operation.is_arithmetic):
            numbers.add(name)
        elif (
            name not in changed
            and reads <= numbers | made
            and _is_repeatable(model, operation, changed, whole)
        ):
            made.add(name)
            yield operation


def _is_repeatable(
    model: nn.Module, operation: Operation, changed: set[str], whole: set[str]
) -> bool:
    """Whether an operation does the same each time, and takes nothing from the model but buffers
    that the forward doesn't change.
    """
    if operation.kind not in ("function", "method") or not REPEATABLE.fullmatch(operation.called):
        return False
    for path in operation.paths():
        found, steps = find(model, path), path.split(".")
        inside = any(".".join(steps[:count]) in whole for count in range(1, len(steps)))
        if inside or path in changed or not isinstance(found, Tensor) or found.requires_grad:
            return False
    return True


def _changed(operations: Sequence[Operation]) -> set[str]:
    """Return the names of values, and paths of buffers, that an operation may change in place,
    and of what shares their memory.
    """
    changed = set[str]()
    for operation in reversed(operations):
        in_place = (
            IN_PLACE.fullmatch(operation.called)
            or "out" in operation.kwargs
            or operation.kwargs.get("inplace")
        )
        if in_place or (operation.name in changed and not FRESH.fullmatch(operation.called)):
            changed.update([operation.name, *operation.reads(), *operation.paths()])
    return changed
