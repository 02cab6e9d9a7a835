"""A forward whose layers are on several devices of one worker: values go from device to device, and
autograd takes gradients back.

device 0    embed  blocks.0  blocks.1        a skip goes straight to where it is read
               |       |________________
device 1       blocks.2  blocks.3  head |      output -> where the inputs came from

A parameter that layers on two devices use lies with the first, and is sent along in each forward:
its gradients come back and are summed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.containers import tree_leaves, tree_map_only
from paceline.parallel.pipelining.chain import LayerGraph
from paceline.parallel.pipelining.operations import OUTPUT, Operation, find

Held = tuple[str, str]  # the path of a module, and the name of a parameter or a buffer in it


@dataclass(frozen=True)
class _PlacedOperation:
    """An operation, the place where it is done, what it borrows from other places, and the
    values that nobody reads after it.
    """

    operation: Operation
    place: int
    borrows: tuple[Held, ...]
    drops: tuple[str, ...]


class PlacedForward:
    """The forward of a model whose layers are at several places.

    `places`: that of each layer, never before that of the one before it.

    Copies of the model run as it does, on the devices on which their parameters are.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        places: Sequence[int],
        devices: Sequence[torch.device],
    ) -> None:
        self._model, self._graph, self._devices = model, graph, tuple(devices)
        count = len(graph.layers)
        operations = graph.part(0, count).operations
        at = [places[layer] for layer in graph.owners(0, count)]
        homes = dict[int, int]()  # by the id of a parameter or a buffer
        for operation, place in zip(operations, at, strict=True):
            for held in _used(model, operation):
                homes.setdefault(id(_get(model, held)), place)
        last = {
            name: number
            for number, operation in enumerate(operations)
            for name in (operation.name, *operation.reads())
        }
        self._steps = [
            _PlacedOperation(
                operation,
                place,
                tuple(
                    held
                    for held in _used(model, operation)
                    if homes[id(_get(model, held))] != place
                ),
                tuple(name for name in last if last[name] == number and name != OUTPUT),
            )
            for number, (operation, place) in enumerate(zip(operations, at, strict=True))
        ]
        self._homes = [
            (held, homes[id(_get(model, held))])
            for operation in operations
            for held in _used(model, operation)
        ]

    def place(self) -> None:
        """Move each parameter and buffer to where the first layer is that uses it; they stay the
        objects that they are.
        """
        for held, home in self._homes:
            tensor, device = _get(self._model, held), self._devices[home]
            if tensor.device != device:
                grad, tensor.grad = tensor.grad, None
                tensor.data = tensor.data.to(device)
                tensor.grad = None if grad is None else grad.to(device)

    def __call__(self, *args: Any, **options: Any) -> Any:
        values = self._graph.bind(args, options)
        back = next(
            (leaf.device for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)),
            self._devices[0],
        )
        at, borrowed = dict[str, int](), dict[tuple[int, int], Tensor]()
        for step in self._steps:
            for name in step.operation.reads():
                if at.get(name) != step.place:
                    values[name], at[name] = (
                        move(values[name], self._devices[step.place]),
                        step.place,
                    )
            with self._lent(step, borrowed):
                values[step.operation.name] = step.operation.call(values, self._model)
            at[step.operation.name] = step.place
            for name in step.drops:
                del values[name]
        return move(values[OUTPUT], back)

    @contextlib.contextmanager
    def _lent(
        self, step: _PlacedOperation, borrowed: dict[tuple[int, int], Tensor]
    ) -> Iterator[None]:
        """Let an operation find what it borrows on its own device.

        `borrowed` has what was sent there in this forward already.
        """
        owned = [(*_rows(self._model, held), held) for held in step.borrows]
        lent = list[tuple[dict[str, Any], str, Tensor, Tensor, int]]()
        for row, name, _ in owned:
            tensor = row[name]
            key = id(tensor), step.place
            if key not in borrowed:
                borrowed[key] = move(tensor, self._devices[step.place])
            row[name] = borrowed[key]
            lent.append((row, name, tensor, row[name], row[name]._version))
        try:
            yield
            for (row, name, tensor, sent, version), (_, _, held) in zip(lent, owned, strict=True):
                if row[name] is not sent or (sent is not tensor and sent._version != version):
                    raise UsageError(
                        f"layers on two devices use {'.'.join(filter(None, held))}, and the "
                        "forward changes it there, so one of them would "
                        "miss that: name one layer that holds both, or give each a buffer of its "
                        "own"
                    )
        finally:
            for row, name, tensor, _, _ in lent:
                row[name] = tensor


def move(value: Any, device: torch.device) -> Any:
    """Move the tensors of nested values to a device, from where gradients come back; a device
    that a forward has read is that one, too.
    """
    return tree_map_only(
        (Tensor, torch.device), lambda x: x.to(device) if isinstance(x, Tensor) else device, value
    )


def _used(model: nn.Module, operation: Operation) -> Iterator[Held]:
    """Yield the parameters and buffers that an operation uses."""
    for path in operation.paths():
        found = find(model, path)
        if isinstance(found, nn.Module):
            for inner, module in found.named_modules(prefix=path):
                yield from ((inner, name) for name in _names(module))
        elif isinstance(found, Tensor):
            owner, _, name = path.rpartition(".")
            yield owner, name


def _names(module: nn.Module) -> Iterable[str]:
    return (
        name
        for row in (module._parameters, module._buffers)
        for name, tensor in row.items()
        if tensor is not None
    )


def _rows(model: nn.Module, held: Held) -> tuple[dict[str, Any], str]:
    """Return where a module keeps a parameter or a buffer, and its name there."""
    path, name = held
    module = model.get_submodule(path)
    return (module._parameters if name in module._parameters else module._buffers), name


def _get(model: nn.Module, held: Held) -> Tensor:
    row, name = _rows(model, held)
    tensor: Tensor = row[name]
    return tensor
