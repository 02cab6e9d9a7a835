"""Measures the layers of a model on a micro-batch: seconds of forward and backward, and bytes.

The model runs layer by layer. It has to fit into this worker's memory, with the activations of one
layer. For a model that doesn't, and has been built without memory, `count_layers` counts
operations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import UsageError
from paceline.parallel.containers import tree_leaves, tree_map_only
from paceline.parallel.following.followed_graph import FollowedGraph
from paceline.parallel.pipelining.layer_graph import LayerGraph, StagePart, list_part_parameters
from paceline.parallel.pipelining.operations import look_up_path
from paceline.parallel.pipelining.split import LayerCost
from paceline.parallel.torch_tensor import storage_key

Criterion = Callable[[Any], Tensor]
Clock = Callable[[], float]
Around = Callable[[StagePart], AbstractContextManager[None]]
# Of a worker for which operations are only counted. Only the ratios of layers matter.
OPERATIONS_A_SECOND, BYTES_A_SECOND = 1e11, 1e10


def no_context(part: StagePart) -> AbstractContextManager[None]:
    """Leave a layer as it is while it is measured."""
    return nullcontext()


def measure_layers(
    graph: LayerGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Criterion | None = None,
    repeats: int = 5,
    around: Around = no_context,
) -> list[LayerCost]:
    """Measure each layer in a call of the model with one micro-batch.

    Layers compare as the medians of all repetitions. Their sum is scaled to the mean of all of
    them, so that a worker that is stopped now and then, as by a quota, is slower by that.

    Parameters, gradients, buffers and torch's random state stay as they are. Hooks on modules are
    called.

    Args:
        graph: Model with its layers.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        loss: Makes a loss of the output. It counts as a part of the last layer. Default: none.
        repeats: Number of repetitions. Default: 5.
        around: Context in which each layer is measured. Default: none.

    Returns:
        Cost of each layer.
    """
    values = graph.bind_inputs(args, kwargs or {})
    with preserve_state(graph.model):
        if isinstance(graph, FollowedGraph):
            graph.rehearse_forward(values)
        measured = list(
            _measure_each(graph, values, loss, repeats, time.perf_counter, around=around)
        )
    return [_scale_cost(cost, _mean_ratio(measured)) for cost, _ in measured]


def count_layers(
    graph: LayerGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Criterion | None = None,
) -> list[LayerCost]:
    """Count the operations and bytes of each layer of a model that is built without memory.

    Seconds are those of a worker with 1e11 operations and 1e10 bytes a second. Only their ratios
    mean something. Other arguments are those of `measure_layers`.
    """
    if any(not parameter.is_meta for parameter in graph.model.parameters()):
        raise UsageError(
            "count_layers() is for models without memory: build it inside `with pl.meta():`, or "
            "say measure_layers()"
        )
    if isinstance(graph, FollowedGraph):
        raise UsageError(
            "split='auto' counts operations of a model without memory by tracing, which "
            f"{type(graph.model).__name__} can't be: say "
            "split=[layers of each stage], or build it with memory"
        )
    values = tree_map_only(Tensor, lambda x: x.to("meta"), graph.bind_inputs(args, kwargs or {}))
    with FlopCounterMode(display=False) as counter:
        counted = [
            cost
            for cost, _ in _measure_each(
                graph, values, loss, 0, lambda: counter.get_total_flops() / OPERATIONS_A_SECOND
            )
        ]
    moved = [(cost.parameters + cost.kept) / BYTES_A_SECOND for cost in counted]
    return [
        replace(
            cost,
            forward_seconds=cost.forward_seconds + more,
            backward_seconds=cost.backward_seconds + 2 * more,
        )
        for cost, more in zip(counted, moved, strict=True)
    ]


def _mean_ratio(measured: Sequence[tuple[LayerCost, float]]) -> float:
    """Ratio of the mean time of all layers to their medians."""
    medians = sum(cost.forward_seconds + cost.backward_seconds for cost, _ in measured)
    return sum(mean for _, mean in measured) / medians if medians > 0 else 1.0


def _scale_cost(cost: LayerCost, factor: float) -> LayerCost:
    return replace(
        cost,
        forward_seconds=cost.forward_seconds * factor,
        backward_seconds=cost.backward_seconds * factor,
    )


def _measure_each(
    graph: LayerGraph,
    values: Mapping[str, Any],
    loss: Criterion | None,
    repeats: int,
    clock: Clock,
    *,
    around: Around = no_context,
) -> Iterator[tuple[LayerCost, float]]:
    """Yield the cost of each layer, by medians, and its mean seconds forward and backward."""
    for at in range(len(graph.layers)):
        with around(graph.make_part(at, at + 1)):
            layer = _MeasuredLayer(graph, at, loss if at == len(graph.layers) - 1 else None, clock)
            runs = [layer.run_layer(values) for _ in range(repeats + 1)]  # the first run warms up
        values = {
            **(
                {name: values[name] for name in graph.inputs}
                if isinstance(graph, FollowedGraph)
                else {}
            ),
            **runs[-1].gives,
        }
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        timed = runs[1:] or runs
        cost = replace(
            layer.cost,
            forward_seconds=statistics.median(run.forward_seconds for run in timed),
            backward_seconds=statistics.median(run.backward_seconds for run in timed),
            kept=runs[-1].kept,
            sends=_count_bytes(tensors),
            returns=_count_bytes(leaf for leaf in tensors if leaf.requires_grad),
        )
        yield cost, statistics.mean(run.forward_seconds + run.backward_seconds for run in timed)


def combine_costs(measured: Sequence[Sequence[LayerCost]]) -> tuple[list[LayerCost], list[float]]:
    """Combine the measurements of all workers into costs and speeds; the fastest has speed 1.0.

    Bytes are those of the first worker.
    """
    # A worker's speed is how much sooner it is through with all layers. Costs are medians over
    # workers of their times at speed 1, so that one disturbed measurement doesn't count.
    totals = [
        sum(cost.forward_seconds + cost.backward_seconds for cost in costs) for costs in measured
    ]
    if min(totals) <= 0:
        raise UsageError(
            f"worker {totals.index(min(totals))} has measured that its layers take no time; "
            "measure with a larger micro-batch"
        )
    speeds = [min(totals) / total for total in totals]
    costs = list[LayerCost]()
    for rows in zip(*measured, strict=True):
        forward = statistics.median(
            row.forward_seconds * speed for row, speed in zip(rows, speeds, strict=True)
        )
        backward = statistics.median(
            row.backward_seconds * speed for row, speed in zip(rows, speeds, strict=True)
        )
        costs.append(replace(rows[0], forward_seconds=forward, backward_seconds=backward))
    return costs, speeds


class _MeasuredPass(NamedTuple):
    forward_seconds: float
    backward_seconds: float
    kept: int
    # The values for the next layer, without this layer's graph.
    gives: dict[str, Any]


class _MeasuredLayer:
    """One layer of a model, which can be run repeatedly."""

    def __init__(self, graph: LayerGraph, at: int, loss: Criterion | None, clock: Clock) -> None:
        self._clock, self._part, self._loss = clock, graph.make_part(at, at + 1), loss
        self._parameters = list_part_parameters(graph.model, self._part)
        self._trained = [one for one in self._parameters if one.requires_grad]
        self._state = {
            storage_key(one)
            for one in (*self._parameters, *iterate_part_buffers(graph.model, self._part))
        }
        self.cost = LayerCost(
            graph.layers[at], 0.0, 0.0, _count_bytes(self._parameters), _count_bytes(self._trained)
        )

    def _read_clock(self, devices: Iterable[torch.device]) -> float:
        """Read the clock, once devices have finished."""
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return self._clock()

    def run_layer(self, values: Mapping[str, Any]) -> _MeasuredPass:
        """Run the layer forward and backward once."""
        taken = {
            name: tree_map_only(Tensor, _copy_detached, values[name]) for name in self._part.takes
        }
        entries = [leaf for leaf in tree_leaves(taken) if isinstance(leaf, Tensor)]
        devices = {leaf.device for leaf in (*entries, *self._parameters)}
        saved_nbytes = dict[int, int]()  # bytes of saved storages

        def keep(x: Tensor) -> Tensor:
            saved_nbytes[storage_key(x)] = x.untyped_storage().nbytes()
            return x

        with saved_tensors_hooks(keep, lambda x: x):
            began = self._read_clock(devices)
            gives = self._part.run_stage(taken)
            output = gives if self._loss is None else self._loss(next(iter(gives.values())))
            forward = self._read_clock(devices) - began
        # Go back from all results, with ones for gradients: their values don't change the time.
        roots = [
            leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        # Results are kept as well. Parameters, buffers and inputs are there anyway.
        saved_nbytes |= {storage_key(leaf): leaf.untyped_storage().nbytes() for leaf in roots}
        input_storages = {storage_key(leaf) for leaf in entries}
        nbytes = sum(
            size
            for storage, size in saved_nbytes.items()
            if storage not in self._state | input_storages
        )
        targets = [leaf for leaf in entries if leaf.requires_grad] + self._trained
        roots = [leaf for leaf in roots if leaf.grad_fn is not None]
        backward = 0.0
        if roots and targets:
            began = self._read_clock(devices)
            torch.autograd.grad(
                roots, targets, [torch.ones_like(leaf) for leaf in roots], allow_unused=True
            )
            backward = self._read_clock(devices) - began
        return _MeasuredPass(
            forward, backward, nbytes, tree_map_only(Tensor, _detach_tensor, gives)
        )


def _detach_tensor(x: Tensor) -> Tensor:
    """Make a tensor in the same memory that begins a graph of its own."""
    return x.detach().requires_grad_(x.requires_grad)


def _copy_detached(x: Tensor) -> Tensor:
    """Copy a tensor to begin a graph of its own, as layers may change their inputs in place."""
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def iterate_part_buffers(model: nn.Module, part: StagePart) -> Iterator[Tensor]:
    """Yield the buffers, and the parameters that aren't in modules, that a part uses."""
    for path in part.modules:
        yield from look_up_path(model, path).buffers()
    yield from (
        target
        for path in part.attributes
        if isinstance(target := look_up_path(model, path), Tensor)
    )


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Set back the buffers of a model, and torch's random state, at the end of the block."""
    places = [(module, dict(module._buffers)) for module in model.modules()]
    copies = [
        (buffer, buffer.detach().clone())
        for _, row in places
        for buffer in row.values()
        if buffer is not None
    ]
    devices = {
        parameter.device.index
        for parameter in model.parameters()
        if parameter.device.type == "cuda"
    }
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in copies:
                buffer.copy_(before)
        for module, row in places:
            module._buffers.update(row)
