"""A model whose own forward runs on every stage; layers of other stages return placeholders.

    stage 0    tokens  blocks.0 |                  ends after its last layer, and gives the next
                                                   stage the results that later stages use
    stage 1    ~~~~~~  ~~~~~~~~   blocks.1  head   blocks.0 returns its result from stage 0; tokens
                                                   returns a tensor of its shape, without values

Nothing is traced. All stages have the same inputs, so each makes masks and positions by itself. The
results that have to travel are found by following one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Private: if it is renamed, this import fails.
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import UsageError
from paceline.parallel.containers import tree_leaves, tree_map, tree_map_only
from paceline.parallel.following.recorder import ALL_STAGES, Source, UseRecorder
from paceline.parallel.pipelining.layer_graph import (
    CHAINED_INPUTS,
    LayerGraph,
    StagePart,
    enter_stage,
)
from paceline.parallel.pipelining.layer_names import find_layers
from paceline.parallel.pipelining.operations import OUTPUT
from paceline.parallel.pipelining.stage_messages import PLAIN
from paceline.parallel.pipelining.tracing import refuse_hooks
from paceline.parallel.torch_pytree import tree_flatten

# Values that go from stage to stage, by name of a layer.
RETURNED, SHAPES = "what layers returned", "shapes of what layers returned"
# Begins the text that stands for a tensor that no later stage uses.
SHAPE_PREFIX = "\0"
# options of transformers
COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
# Rows of plain data: a layer, followed by its sources.
Uses = list[list[Any]]


class FollowedGraph(LayerGraph):
    """A model as layers that its forward calls one after the other.

    `outside_parameters` has the names of parameters in no layer, which every stage holds.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], beside: Sequence[str]) -> None:
        self.model, self.layers, self.inputs, self.outside_parameters = (
            model,
            tuple(layers),
            CHAINED_INPUTS,
            tuple(beside),
        )
        self.recorder: UseRecorder | None = None
        self._uses_by_kind = dict[str, dict[int, set[Source]]]()  # by kind of call, then by layer

    def make_part(self, start: int, stop: int) -> StagePart:
        """Make the program of the layers from `start` to before `stop`."""
        return FollowedPart(self, start, stop)

    def find_owners(self, start: int, stop: int) -> list[int]:
        """Find the layer that each step of `make_part(start, stop)` belongs to."""
        return list(range(start, stop))

    def find_users(self, starts: Sequence[int]) -> dict[nn.Parameter, dict[int, str]]:
        """Find the stages that use each parameter, and its name in each."""
        self._refuse_shared_draws(starts)
        return super().find_users(starts)

    def describe_call(self, values: Mapping[str, Any]) -> str:
        """Describe a forward by its mode and inputs, without numbers: these decide what it uses."""
        leaves, spec = tree_flatten([values[name] for name in CHAINED_INPUTS])
        flags = [
            leaf if isinstance(leaf, bool | str) or leaf is None else type(leaf).__name__
            for leaf in leaves
        ]
        return (
            f"{'training' if self.model.training else 'evaluation'} with "
            f"{' '.join(str(spec).split())} of {flags}"
        )

    def find_crossing_layers(self, place: int, kind: str) -> set[int]:
        """Find layers before `place` with results that are used later; all, if that isn't known."""
        uses = None if self.recorder else self._uses_by_kind.get(kind)
        if uses is None:
            return set(range(place))
        later = {
            source
            for layer, sources in uses.items()
            if layer >= place or layer == ALL_STAGES
            for source in sources
        }
        return {layer for layer in range(place) if layer in later}

    @contextmanager
    def record_uses(self) -> Iterator[UseRecorder]:
        """Record inside of the block what layers use. Stages give each other all results there."""
        self.recorder = UseRecorder(self.model, range(len(self.layers) + 1))
        try:
            yield self.recorder
        finally:
            self.recorder = None

    def rehearse_forward(self, values: Mapping[str, Any]) -> None:
        """Find out what layers use by a forward through all of them here, if it isn't known yet."""
        kind = self.describe_call(values)
        if kind not in self._uses_by_kind:
            with torch.no_grad(), self.record_uses() as recorder:
                for place in range(len(self.layers)):
                    values = {**values, **self.make_part(place, place + 1).run_stage(values)}
            self.learn_uses(kind, [recorder.rows], [0])

    def learn_uses(self, kind: str, recorded: Iterable[Uses], starts: Sequence[int]) -> None:
        """Take the records of all stages for calls of this kind."""
        uses = self._uses_by_kind[kind] = dict[int, set[Source]]()
        for layer, *sources in (row for rows in recorded for row in rows):
            uses.setdefault(layer, set()).update(sources)
        self._refuse_shared_draws(starts)

    def _refuse_shared_draws(self, starts: Sequence[int]) -> None:
        """Raise `UsageError` for random numbers that two stages use, as each would draw its own."""
        users = dict[str, dict[int, int]]()
        for layer, sources in (row for uses in self._uses_by_kind.values() for row in uses.items()):
            # The stage of a layer is the last one that starts at or before it.
            stages = (
                range(len(starts))
                if layer == ALL_STAGES
                else [sum(start <= layer for start in starts) - 1]
            )
            for source in sources:
                if isinstance(source, str):
                    users.setdefault(source, {}).update(dict.fromkeys(stages, layer))
        if shared := next((list(by.values()) for by in users.values() if len(by) > 1), None):
            one, two = (
                self.layers[layer] if 0 <= layer < len(self.layers) else "the end of the forward"
                for layer in shared[:2]
            )
            raise UsageError(
                f"the forward of {type(self.model).__name__} draws random numbers between layers, "
                f"and {one} and {two} use them on two stages, "
                "which would draw different ones: name the module that draws them as a layer, such "
                "as a dropout"
            )


class FollowedPart(StagePart):
    """Layers from `start` to before `stop`: a whole forward in which other layers do nothing."""

    def __init__(self, graph: FollowedGraph, start: int, stop: int) -> None:
        self._model, self._graph, self._start, self._stop = graph.model, graph, start, stop
        self._is_last = stop == len(graph.layers)
        self.operations = ()
        self.takes = CHAINED_INPUTS if start == 0 else (*CHAINED_INPUTS, RETURNED, SHAPES)
        self.gives = (OUTPUT,) if self._is_last else (RETURNED, SHAPES)
        self.modules, self.attributes = graph.layers[start:stop], graph.outside_parameters

    def run_stage(
        self, values: Mapping[str, Any], after: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Run the forward on the model's inputs and the results of layers of earlier stages.

        `after` is called with the number of each layer that ran, counted from 0 in this part.
        """
        recorder, (args, keywords) = self._graph.recorder, (values[name] for name in CHAINED_INPUTS)
        config = getattr(self._model, "config", None)
        if collected := next(
            (name for name in COLLECTED if keywords.get(name, getattr(config, name, False))), ""
        ):
            raise UsageError(
                f"{collected} collects what is inside of layers, "
                "and a stage has its own layers only: leave it out, or set it to False"
            )
        calls = _LayerCalls(self._graph, self._start, self._stop, values, after)
        try:
            with calls.answer_calls(), recorder or nullcontext():
                output = type(self._model).forward(self._model, *args, **keywords)
                if recorder:
                    recorder.enter_layer(len(self._graph.layers), output)
        except _StageEnd:
            return calls.make_stage_output()
        calls.check_all_called()
        return {OUTPUT: output}


class _StageEnd(BaseException):
    """All layers of a stage were called. No `except Exception` in a forward may catch it."""


class _LayerCalls:
    """The calls of layers in one forward of a stage.

    `_next_layer` is the layer that is called next. Each layer that was called is either in
    `_returned`, with its result, or in `_shapes`, with the result's shape.
    """

    def __init__(
        self,
        graph: FollowedGraph,
        start: int,
        stop: int,
        values: Mapping[str, Any],
        after: Callable[[int], None] | None,
    ) -> None:
        self._graph, self._start, self._stop, self._after, self._next_layer = (
            graph,
            start,
            stop,
            after,
            0,
        )
        self._crossing = (
            graph.find_crossing_layers(stop, graph.describe_call(values))
            if stop < len(graph.layers)
            else set[int]()
        )
        self._received = tree_map_only(Tensor, enter_stage, values.get(RETURNED, {}))
        self._shapes: dict[str, Any] = dict(values.get(SHAPES, {}))
        # Results with the versions of their tensors, which tell of later changes in place.
        self._returned = dict[str, tuple[Any, list[int]]]()
        self._placeholders = dict[str, Tensor]()
        tensors = (
            leaf
            for leaf in tree_leaves([values[name] for name in CHAINED_INPUTS])
            if isinstance(leaf, Tensor)
        )
        self._device = next((leaf.device for leaf in tensors), torch.device("cpu"))

    @contextmanager
    def answer_calls(self) -> Iterator[None]:
        """Answer the calls of layers inside of the block."""
        if self._graph.recorder:
            self._graph.recorder.begin_forward()
        modules = [self._graph.model.get_submodule(name) for name in self._graph.layers]
        before = [vars(module).get("_compiled_call_impl") for module in modules]
        try:
            for place, module in enumerate(modules):
                # Private to torch: `nn.Module.__call__` calls this attribute, if it is set, and not
                # its own `_call_impl` with the hooks and the forward. If it isn't looked up any
                # more, layers of other stages run, and fail on their empty weights.
                vars(module)["_compiled_call_impl"] = partial(
                    self._answer_call, place, before[place] or module._call_impl
                )
            yield
        finally:
            for module, own in zip(modules, before, strict=True):
                vars(module).pop("_compiled_call_impl")
                vars(module).update({} if own is None else {"_compiled_call_impl": own})

    def _answer_call(self, place: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer of this stage, or return a result or placeholder of an earlier stage."""
        name, recorder = self._graph.layers[place], self._graph.recorder
        if place != self._next_layer:
            raise UsageError(self._explain_order(name))
        self._next_layer += 1
        if place < self._start and name not in self._received:
            return tree_map(self._make_placeholder, self._shapes[name])
        output = (
            self._received[name]
            if place < self._start
            else self._run_layer(place, call, args, kwargs)
        )
        if place in self._crossing:
            self._returned[name] = output, _tensor_versions(output)
        else:
            self._shapes[name] = tree_map(_describe_shape, output)
        if recorder:
            recorder.leave_layer(place, output)
        if self._next_layer == self._stop < len(self._graph.layers):
            raise _StageEnd
        return output

    def _run_layer(
        self, place: int, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        recorder = self._graph.recorder
        output = (
            recorder.call_layer(place, call, args, kwargs) if recorder else call(*args, **kwargs)
        )
        if self._after:
            self._after(place - self._start)
        return output

    def make_stage_output(self) -> dict[str, Any]:
        """Make the output for the next stage: results that later stages use, shapes of others."""
        for name, (output, versions) in self._returned.items():
            # While recording it isn't known yet whether any stage uses the result.
            if versions != _tensor_versions(output) and not self._graph.recorder:
                raise UsageError(
                    f"the forward changes in place what {name} returned, which later stages use as "
                    "it was: let it make another tensor, or "
                    f"name one layer that holds {name} and the change"
                )
        returned = {name: output for name, (output, _) in self._returned.items()}
        return {
            RETURNED: returned,
            SHAPES: {name: shape for name, shape in self._shapes.items() if name not in returned},
        }

    def check_all_called(self) -> None:
        """Raise `UsageError` if the forward ended before all layers were called."""
        if self._next_layer < len(self._graph.layers):
            raise UsageError(self._explain_order("none"))

    def _explain_order(self, called: str) -> str:
        layers = self._graph.layers
        expected = layers[self._next_layer] if self._next_layer < len(layers) else "the end"
        return (
            f"the forward of {type(self._graph.model).__name__} calls {called} where {expected} "
            "was to follow: name "
            "the layers in the order of the forward, as it calls each once, in every pass"
        )

    def _make_placeholder(self, leaf: Any) -> Any:
        """Make a tensor of a given shape, full of NaN: a loss that used it would be NaN, too."""
        if not (isinstance(leaf, str) and leaf.startswith(SHAPE_PREFIX)):
            return leaf
        if leaf not in self._placeholders:
            dtype, *sizes = leaf.removeprefix(SHAPE_PREFIX).split()
            kind = getattr(torch, dtype)
            nothing = math.nan if kind.is_floating_point or kind.is_complex else 0
            self._placeholders[leaf] = torch.full(
                [int(size) for size in sizes], nothing, dtype=kind, device=self._device
            )
        return self._placeholders[leaf]


def _describe_shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return " ".join(
            [SHAPE_PREFIX + str(leaf.dtype).removeprefix("torch."), *map(str, leaf.shape)]
        )
    return leaf if isinstance(leaf, PLAIN) else None


def _tensor_versions(values: Any) -> list[int]:
    # `_version` is private by name only: the version counter of a tensor, which torch documents.
    return [
        leaf._version
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and not leaf.is_inference()
    ]


def follow_layers(model: nn.Module, names: str | Sequence[str]) -> FollowedGraph:
    """Find the layers of a model by names and patterns, in the order of its forward."""
    layers = find_layers(model, names).names
    refuse_hooks(model, layers)
    modules = [model.get_submodule(name) for name in layers]
    within = {id(inner) for module in modules for inner in module.modules()}
    if twice := next(
        (name for name, module in zip(layers, modules, strict=True) if modules.count(module) > 1),
        "",
    ):
        raise UsageError(
            f"{twice} is one module under two names, and a pipeline calls each layer once: name a "
            "module that contains both calls"
        )
    outside = [(name, module) for name, module in model.named_modules() if id(module) not in within]
    if stateful := next(
        (
            name
            for name, module in outside
            if isinstance(module, _NormBase) and module.track_running_stats
        ),
        "",
    ):
        raise UsageError(
            f"{stateful} keeps running statistics between layers, which only one stage can keep: "
            "name it as a layer"
        )
    return FollowedGraph(
        model,
        layers,
        [
            ".".join(filter(None, (name, key)))
            for name, module in outside
            for key, own in module._parameters.items()
            if own is not None
        ],
    )
