"""A forward whose layers are on several devices of one worker.

device 0    embed  blocks.0  blocks.1        a skip goes straight to where it is read
               |       |________________
device 1       blocks.2  blocks.3  head |      output -> where the inputs came from

Values go from device to device, and autograd takes gradients back. A parameter that layers on two
devices use lies with the first. It is sent along in each forward, so its gradients are summed
there.
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
from paceline.parallel.pipelining.layer_graph import LayerGraph
from paceline.parallel.pipelining.operations import OUTPUT, Operation, look_up_path

# Path of a module, and name of a parameter or a buffer in it.
StateName = tuple[str, str]


@dataclass(frozen=True)
class _PlacedOperation:
    """An operation and the place where it runs.

    `borrows` are its parameters and buffers from other places, `drops` the values that no operation
    reads after it.
    """

    operation: Operation
    place: int
    borrows: tuple[StateName, ...]
    drops: tuple[str, ...]


class PlacedForward:
    """The forward of a model whose layers are at several places, the indices of `devices`.

    `places` has the place of each layer, never before that of the layer before it. Copies of the
    model run on the devices that their parameters are on.
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
        operations = graph.make_part(0, count).operations
        at = [places[layer] for layer in graph.find_owners(0, count)]
        # A parameter or buffer, by its id, lives where the first operation that uses it runs.
        homes = dict[int, int]()
        for operation, place in zip(operations, at, strict=True):
            for held in _find_state(model, operation):
                homes.setdefault(id(_get_tensor(model, held)), place)
        # The last operation that writes or reads each value; the value is dropped after it.
        last = {
            name: index
            for index, operation in enumerate(operations)
            for name in (operation.name, *operation.value_names())
        }
        self._steps = [
            _PlacedOperation(
                operation,
                place,
                tuple(
                    held
                    for held in _find_state(model, operation)
                    if homes[id(_get_tensor(model, held))] != place
                ),
                tuple(name for name in last if last[name] == index and name != OUTPUT),
            )
            for index, (operation, place) in enumerate(zip(operations, at, strict=True))
        ]
        self._state_places = [
            (held, homes[id(_get_tensor(model, held))])
            for operation in operations
            for held in _find_state(model, operation)
        ]

    def move_state(self) -> None:
        """Move each parameter and buffer to its place. They stay the same objects."""
        for held, home in self._state_places:
            tensor, device = _get_tensor(self._model, held), self._devices[home]
            if tensor.device != device:
                grad, tensor.grad = tensor.grad, None
                tensor.data = tensor.data.to(device)
                tensor.grad = None if grad is None else grad.to(device)

    def __call__(self, *args: Any, **options: Any) -> Any:
        values = self._graph.bind_inputs(args, options)
        # The output goes back to the device of the first input.
        back = next(
            (leaf.device for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)),
            self._devices[0],
        )
        at, borrowed = dict[str, int](), dict[tuple[int, int], Tensor]()
        for step in self._steps:
            for name in step.operation.value_names():
                if at.get(name) != step.place:
                    values[name], at[name] = (
                        move_values(values[name], self._devices[step.place]),
                        step.place,
                    )
            with self._lend_state(step, borrowed):
                values[step.operation.name] = step.operation.run_operation(values, self._model)
            at[step.operation.name] = step.place
            for name in step.drops:
                del values[name]
        return move_values(values[OUTPUT], back)

    @contextlib.contextmanager
    def _lend_state(
        self, step: _PlacedOperation, borrowed: dict[tuple[int, int], Tensor]
    ) -> Iterator[None]:
        """Let an operation find what it borrows on its own device, inside of the block.

        `borrowed` has copies that this forward has made already, by the tensor's id and the place.
        """
        owned = [(*_find_row(self._model, held), held) for held in step.borrows]
        lent = list[tuple[dict[str, Any], str, Tensor, Tensor, int]]()
        for row, name, _ in owned:
            tensor = row[name]
            key = id(tensor), step.place
            if key not in borrowed:
                borrowed[key] = move_values(tensor, self._devices[step.place])
            row[name] = borrowed[key]
            lent.append((row, name, tensor, row[name], row[name]._version))
        try:
            yield
            # The model's own tensor must not miss a change that the forward made to its copy.
            for (row, name, tensor, sent, version), (_, _, held) in zip(lent, owned, strict=True):
                if row[name] is not sent or (sent is not tensor and sent._version != version):
                    raise UsageError(
                        f"layers on two devices use {'.'.join(filter(None, held))}, and the "
                        "forward changes it there, so one of them would "
                        "miss that: name one layer that holds both, "
                        "or give each a buffer of its own"
                    )
        finally:
            for row, name, tensor, _, _ in lent:
                row[name] = tensor


def move_values(value: Any, device: torch.device) -> Any:
    """Move tensors in nested values to a device, so that gradients come back; and devices, too.

    A device that a forward has read from a tensor, as in `torch.zeros(..., device=x.device)`,
    changes with that tensor.
    """
    return tree_map_only(
        (Tensor, torch.device), lambda x: x.to(device) if isinstance(x, Tensor) else device, value
    )


def _find_state(model: nn.Module, operation: Operation) -> Iterator[StateName]:
    """Yield the parameters and buffers that an operation uses."""
    for path in operation.model_paths():
        target = look_up_path(model, path)
        if isinstance(target, nn.Module):
            for inner, module in target.named_modules(prefix=path):
                yield from ((inner, name) for name in _state_names(module))
        elif isinstance(target, Tensor):
            owner, _, name = path.rpartition(".")
            yield owner, name


def _state_names(module: nn.Module) -> Iterable[str]:
    return (
        name
        for row in (module._parameters, module._buffers)
        for name, tensor in row.items()
        if tensor is not None
    )


def _find_row(model: nn.Module, held: StateName) -> tuple[dict[str, Any], str]:
    """Find the dict of a module that holds a parameter or buffer, and the name in it."""
    path, name = held
    module = model.get_submodule(path)
    return (module._parameters if name in module._parameters else module._buffers), name


def _get_tensor(model: nn.Module, held: StateName) -> Tensor:
    row, name = _find_row(model, held)
    tensor: Tensor = row[name]
    return tensor
