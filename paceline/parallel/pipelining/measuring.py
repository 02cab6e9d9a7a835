"""What each layer of a model takes, measured on a micro-batch: seconds of its forward and backward,
and bytes.

The model runs layer by layer, and has to fit into this worker's memory with the activations of one
layer. Of one that doesn't, `count_layers` counts operations instead, where it has been built
without memory.
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
from paceline.parallel.following.graph import FollowedGraph
from paceline.parallel.pipelining.chain import LayerGraph, StagePart, own_parameters
from paceline.parallel.pipelining.operations import find
from paceline.parallel.pipelining.split import LayerCost

Criterion = Callable[[Any], Tensor]
Clock = Callable[[], float]
Around = Callable[[StagePart], AbstractContextManager[None]]
# of a worker that is only counted for: ratios of layers matter, not these
OPERATIONS_A_SECOND, BYTES_A_SECOND = 1e11, 1e10


def as_it_is(part: StagePart) -> AbstractContextManager[None]:
    """Do nothing with a layer while it is measured."""
    return nullcontext()


def measure_layers(
    graph: LayerGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Criterion | None = None,
    repeats: int = 5,
    around: Around = as_it_is,
) -> list[LayerCost]:
    """Measure what each layer takes for a call of the model with these arguments, which are one
    micro-batch.

    Layers compare as the medians of `repeats` do; all of them together take what they take in the
    mean: a worker that is stopped now and then, as by a quota, is that much slower.
    `loss` makes of the output what is gone back from, and counts as a part of the last layer.
    Parameters, gradients, buffers and the random state of torch are left as they are. Hooks on
    modules are called. `around`: what is done with each layer while it is measured.
    """
    values = graph.bind(args, kwargs or {})
    with untouched(graph.model):
        if isinstance(graph, FollowedGraph):
            graph.rehearse(values)
        found = list(_measure(graph, values, loss, repeats, time.perf_counter, around=around))
    return [_scaled(cost, _slower(found)) for cost, _ in found]


def count_layers(
    graph: LayerGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Criterion | None = None,
) -> list[LayerCost]:
    """Count what each layer takes for a call of a model that is built without memory (pl.meta()):
    operations, and bytes as if measured.

    Seconds are those of a worker that does 1e11 operations and moves 1e10 bytes in one; how they
    compare is what they are good for.
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
    values = tree_map_only(Tensor, lambda x: x.to("meta"), graph.bind(args, kwargs or {}))
    with FlopCounterMode(display=False) as counter:
        found = [
            cost
            for cost, _ in _measure(
                graph, values, loss, 0, lambda: counter.get_total_flops() / OPERATIONS_A_SECOND
            )
        ]
    moved = [(cost.parameters + cost.kept) / BYTES_A_SECOND for cost in found]
    return [
        replace(
            cost,
            forward_seconds=cost.forward_seconds + more,
            backward_seconds=cost.backward_seconds + 2 * more,
        )
        for cost, more in zip(found, moved, strict=True)
    ]


def _slower(found: Sequence[tuple[LayerCost, float]]) -> float:
    """Return how much longer all layers take in the mean than by medians."""
    medians = sum(cost.forward_seconds + cost.backward_seconds for cost, _ in found)
    return sum(mean for _, mean in found) / medians if medians > 0 else 1.0


def _scaled(cost: LayerCost, factor: float) -> LayerCost:
    return replace(
        cost,
        forward_seconds=cost.forward_seconds * factor,
        backward_seconds=cost.backward_seconds * factor,
    )


def _measure(
    graph: LayerGraph,
    values: Mapping[str, Any],
    loss: Criterion | None,
    repeats: int,
    clock: Clock,
    *,
    around: Around = as_it_is,
) -> Iterator[tuple[LayerCost, float]]:
    """Yield what each layer takes, by medians, and the mean of the seconds of its forward and
    backward.
    """
    for at in range(len(graph.layers)):
        with around(graph.part(at, at + 1)):
            layer = _MeasuredLayer(graph, at, loss if at == len(graph.layers) - 1 else None, clock)
            runs = [layer.run(values) for _ in range(repeats + 1)]  # the first warms up
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
        found = replace(
            layer.cost,
            forward_seconds=statistics.median(run.forward_seconds for run in timed),
            backward_seconds=statistics.median(run.backward_seconds for run in timed),
            kept=runs[-1].kept,
            sends=_nbytes(tensors),
            returns=_nbytes(leaf for leaf in tensors if leaf.requires_grad),
        )
        yield found, statistics.mean(run.forward_seconds + run.backward_seconds for run in timed)


def combine_costs(measured: Sequence[Sequence[LayerCost]]) -> tuple[list[LayerCost], list[float]]:
    """Make of what each worker has measured one list of costs, and how fast each is, the fastest
    1.0. Bytes are those of the first.
    """
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
    gives: dict[str, Any]  # what the next layer takes, without the graph of this one


class _MeasuredLayer:
    """One layer of a model, which can be run again and again."""

    def __init__(self, graph: LayerGraph, at: int, loss: Criterion | None, clock: Clock) -> None:
        self._clock, self._part, self._loss = clock, graph.part(at, at + 1), loss
        self._parameters = own_parameters(graph.model, self._part)
        self._trained = [one for one in self._parameters if one.requires_grad]
        self._state = {
            _storage(one) for one in (*self._parameters, *part_buffers(graph.model, self._part))
        }
        self.cost = LayerCost(
            graph.layers[at], 0.0, 0.0, _nbytes(self._parameters), _nbytes(self._trained)
        )

    def _now(self, devices: Iterable[torch.device]) -> float:
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return self._clock()

    def run(self, values: Mapping[str, Any]) -> _MeasuredPass:
        taken = {name: tree_map_only(Tensor, _copied, values[name]) for name in self._part.takes}
        entries = [leaf for leaf in tree_leaves(taken) if isinstance(leaf, Tensor)]
        devices = {leaf.device for leaf in (*entries, *self._parameters)}
        kept = dict[int, int]()

        def keep(x: Tensor) -> Tensor:
            kept[_storage(x)] = x.untyped_storage().nbytes()
            return x

        with saved_tensors_hooks(keep, lambda x: x):
            began = self._now(devices)
            gives = self._part.run(taken)
            output = gives if self._loss is None else self._loss(next(iter(gives.values())))
            forward = self._now(devices) - began
        roots = [
            leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        kept |= {_storage(leaf): leaf.untyped_storage().nbytes() for leaf in roots}
        came = {_storage(leaf) for leaf in entries}
        nbytes = sum(size for storage, size in kept.items() if storage not in self._state | came)
        wanted = [leaf for leaf in entries if leaf.requires_grad] + self._trained
        roots = [leaf for leaf in roots if leaf.grad_fn is not None]
        backward = 0.0
        if roots and wanted:
            began = self._now(devices)
            torch.autograd.grad(
                roots, wanted, [torch.ones_like(leaf) for leaf in roots], allow_unused=True
            )
            backward = self._now(devices) - began
        return _MeasuredPass(forward, backward, nbytes, tree_map_only(Tensor, _alone, gives))


def _alone(x: Tensor) -> Tensor:
    """Return a tensor of the same memory that begins a graph of its own."""
    return x.detach().requires_grad_(x.requires_grad)


def _copied(x: Tensor) -> Tensor:
    """Return a copy that begins a graph of its own: layers may change in place what they are
    given.
    """
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)


def _storage(x: Tensor) -> int:
    storage: int = x.untyped_storage()._cdata
    return storage  # not where its bytes lie: meta tensors have none


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def part_buffers(model: nn.Module, part: StagePart) -> Iterator[Tensor]:
    for path in part.modules:
        yield from find(model, path).buffers()
    yield from (found for path in part.attributes if isinstance(found := find(model, path), Tensor))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leave the buffers of a model, and the random state of torch, as they are."""
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
