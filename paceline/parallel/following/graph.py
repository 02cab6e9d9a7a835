"""A model whose own forward runs on every stage, with the layers of other stages stood in for:
nothing is traced.

    stage 0    tokens   blocks.0 |                          it ends after its last layer, and gives
                                                            what later stages use
    stage 1    ~~~~~~   ~~~~~~~~   blocks.1   head          blocks.0 returns what came; tokens a
                                                            tensor of its shape, without numbers

All stages have the same inputs, so masks and positions are made by each. What has to come is found
by following one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten

from paceline.errors import UsageError
from paceline.parallel.containers import tree_leaves, tree_map, tree_map_only
from paceline.parallel.following.recorder import EVERY, Source, UseRecorder
from paceline.parallel.pipelining.chain import CHAINED, LayerGraph, StagePart, enter
from paceline.parallel.pipelining.layer_names import find_layers
from paceline.parallel.pipelining.operations import OUTPUT
from paceline.parallel.pipelining.tracing import refuse_hooks
from paceline.parallel.pipelining.values import PLAIN

# values that go from stage to stage, by name of layer
RETURNED, SHAPES = "what layers returned", "shapes of what layers returned"
SHAPE = "\0"  # begins the text in the place of a tensor that nobody needs
# by hooks of transformers inside of layers
COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
Uses = list[list[Any]]  # of plain data: a layer, and what it uses


class FollowedGraph(LayerGraph):
    """A model as layers that are called one after the other by its forward.

    `beside`: parameters in no layer, which every stage has.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], beside: Sequence[str]) -> None:
        self.model, self.layers, self.inputs, self.beside = (
            model,
            tuple(layers),
            CHAINED,
            tuple(beside),
        )
        self.recorder: UseRecorder | None = None
        self._uses = dict[str, dict[int, set[Source]]]()  # by kind of call

    def part(self, start: int, stop: int) -> StagePart:
        """Return the program of the layers from `start` to before `stop`."""
        return FollowedPart(self, start, stop)

    def owners(self, start: int, stop: int) -> list[int]:
        """Return the layer that each step of `part(start, stop)` belongs to."""
        return list(range(start, stop))

    def users(self, starts: Sequence[int]) -> dict[nn.Parameter, dict[int, str]]:
        """Return which stages use each parameter, and what they call it."""
        self._refuse_shared_draws(starts)
        return super().users(starts)

    def kind(self, values: Mapping[str, Any]) -> str:
        """Put in words what a forward on these inputs depends on, but for numbers: another kind
        may use other values.
        """
        leaves, spec = tree_flatten([values[name] for name in CHAINED])
        flags = [
            leaf if isinstance(leaf, bool | str) or leaf is None else type(leaf).__name__
            for leaf in leaves
        ]
        return (
            f"{'training' if self.model.training else 'evaluation'} with "
            f"{' '.join(str(spec).split())} of {flags}"
        )

    def crossing(self, place: int, kind: str) -> set[int]:
        """Return the layers whose results the stages from layer `place` on have to be given; all
        of them before that is known.
        """
        uses = None if self.recorder else self._uses.get(kind)
        if uses is None:
            return set(range(place))
        later = {
            source
            for layer, sources in uses.items()
            if layer >= place or layer == EVERY
            for source in sources
        }
        return {layer for layer in range(place) if layer in later}

    @contextmanager
    def recording(self) -> Iterator[UseRecorder]:
        """Note what layers use, inside of the block. Stages give each other everything there."""
        self.recorder = UseRecorder(self.model, range(len(self.layers) + 1))
        try:
            yield self.recorder
        finally:
            self.recorder = None

    def rehearse(self, values: Mapping[str, Any]) -> None:
        """Find out what layers use where all of them are here, if that isn't known."""
        kind = self.kind(values)
        if kind not in self._uses:
            with torch.no_grad(), self.recording() as recorder:
                for place in range(len(self.layers)):
                    values = {**values, **self.part(place, place + 1).run(values)}
            self.learn(kind, [recorder.plain], [0])

    def learn(self, kind: str, recorded: Iterable[Uses], starts: Sequence[int]) -> None:
        """Take what all stages have noted of calls of this kind."""
        uses = self._uses[kind] = dict[int, set[Source]]()
        for layer, *sources in (row for rows in recorded for row in rows):
            uses.setdefault(layer, set()).update(sources)
        self._refuse_shared_draws(starts)

    def _refuse_shared_draws(self, starts: Sequence[int]) -> None:
        """Refuse random numbers that two stages use: each draws its own."""
        users = dict[str, dict[int, int]]()
        for layer, sources in (row for uses in self._uses.values() for row in uses.items()):
            stages = (
                range(len(starts))
                if layer == EVERY
                else [sum(start <= layer for start in starts) - 1]
            )
            for source in sources:
                if isinstance(source, str):
                    users.setdefault(source, {}).update(dict.fromkeys(stages, layer))
        if found := next((list(by.values()) for by in users.values() if len(by) > 1), None):
            one, two = (
                self.layers[layer] if 0 <= layer < len(self.layers) else "the end of the forward"
                for layer in found[:2]
            )
            raise UsageError(
                f"the forward of {type(self.model).__name__} draws random numbers between layers "
                f"that {one} and {two} use, on two stages, "
                "which would draw others: name the module that draws them as a layer, such as a "
                "dropout"
            )


class FollowedPart(StagePart):
    """The layers from `start` to before `stop`, as a run of the whole forward in which other
    layers only return something.
    """

    def __init__(self, graph: FollowedGraph, start: int, stop: int) -> None:
        self._model, self._graph, self._start, self._stop = graph.model, graph, start, stop
        self._ends = stop == len(graph.layers)
        self.operations = ()
        self.takes = CHAINED if start == 0 else (*CHAINED, RETURNED, SHAPES)
        self.gives = (OUTPUT,) if self._ends else (RETURNED, SHAPES)
        self.modules, self.attributes = graph.layers[start:stop], graph.beside

    def run(
        self, values: Mapping[str, Any], after: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Run the forward on the inputs of the model and what layers of earlier stages returned;
        `after` is told each layer that ran.
        """
        recorder, (args, keywords) = self._graph.recorder, (values[name] for name in CHAINED)
        config = getattr(self._model, "config", None)
        if collected := next(
            (name for name in COLLECTED if keywords.get(name, getattr(config, name, False))), ""
        ):
            raise UsageError(
                f"{collected} collects what is inside of layers, which no stage has of others: "
                "leave it out, or say False"
            )
        calls = _Calls(self._graph, self._start, self._stop, values, after)
        try:
            with calls.answering(), recorder or nullcontext():
                output = type(self._model).forward(self._model, *args, **keywords)
                if recorder:
                    recorder.enter(len(self._graph.layers), output)
        except _StageEnds:
            return calls.gives()
        calls.end()
        return {OUTPUT: output}


class _StageEnds(BaseException):
    """All layers of a stage were called; no `except Exception` of a forward may take it."""


class _Calls:
    """The calls of layers in one forward of a stage."""

    def __init__(
        self,
        graph: FollowedGraph,
        start: int,
        stop: int,
        values: Mapping[str, Any],
        after: Callable[[int], None] | None,
    ) -> None:
        self._graph, self._start, self._stop, self._after, self._next = graph, start, stop, after, 0
        self._crossing = (
            graph.crossing(stop, graph.kind(values)) if stop < len(graph.layers) else set[int]()
        )
        self._came = tree_map_only(Tensor, enter, values.get(RETURNED, {}))
        self._shapes: dict[str, Any] = dict(values.get(SHAPES, {}))
        # with the versions of tensors, which tell of changes in place
        self._returned = dict[str, tuple[Any, list[int]]]()
        self._empty = dict[str, Tensor]()
        tensors = (
            leaf
            for leaf in tree_leaves([values[name] for name in CHAINED])
            if isinstance(leaf, Tensor)
        )
        self._device = next((leaf.device for leaf in tensors), torch.device("cpu"))

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer the calls of layers, inside of the block."""
        if self._graph.recorder:
            self._graph.recorder.begin()
        modules = [self._graph.model.get_submodule(name) for name in self._graph.layers]
        before = [vars(module).get("_compiled_call_impl") for module in modules]
        try:
            for place, module in enumerate(modules):
                # private to torch, which calls it in the place of a module's hooks and forward;
                # without it, layers fail on empty weights
                vars(module)["_compiled_call_impl"] = partial(
                    self._answer, place, before[place] or module._call_impl
                )
            yield
        finally:
            for module, own in zip(modules, before, strict=True):
                vars(module).pop("_compiled_call_impl")
                vars(module).update({} if own is None else {"_compiled_call_impl": own})

    def _answer(self, place: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name, recorder = self._graph.layers[place], self._graph.recorder
        if place != self._next:
            raise UsageError(self._explain(name))
        self._next += 1
        if place < self._start and name not in self._came:
            return tree_map(self._stand_in, self._shapes[name])
        output = self._came[name] if place < self._start else self._run(place, call, args, kwargs)
        if place in self._crossing:
            self._returned[name] = output, _versions(output)
        else:
            self._shapes[name] = tree_map(_shape, output)
        if recorder:
            recorder.leave(place, output)
        if self._next == self._stop < len(self._graph.layers):
            raise _StageEnds
        return output

    def _run(
        self, place: int, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        recorder = self._graph.recorder
        output = recorder.call(place, call, args, kwargs) if recorder else call(*args, **kwargs)
        if self._after:
            self._after(place - self._start)
        return output

    def gives(self) -> dict[str, Any]:
        """Return what layers have returned, for the next stage: whole if one after it uses it,
        or else of which shape it is.
        """
        for name, (output, versions) in self._returned.items():
            # else it isn't known yet whether any stage uses it
            if versions != _versions(output) and not self._graph.recorder:
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

    def end(self) -> None:
        """Raise `UsageError` if the forward ended before all layers were called."""
        if self._next < len(self._graph.layers):
            raise UsageError(self._explain("none"))

    def _explain(self, called: str) -> str:
        layers = self._graph.layers
        expected = layers[self._next] if self._next < len(layers) else "the end"
        return (
            f"the forward of {type(self._graph.model).__name__} calls {called} where {expected} "
            "was to follow: name "
            "the layers in the order of the forward, as it calls each once, in every pass"
        )

    def _stand_in(self, leaf: Any) -> Any:
        """Make something of a tensor's shape, whose numbers are none: if they were used after
        all, the loss would be none.
        """
        if not (isinstance(leaf, str) and leaf.startswith(SHAPE)):
            return leaf
        if leaf not in self._empty:
            dtype, *sizes = leaf.removeprefix(SHAPE).split()
            kind = getattr(torch, dtype)
            nothing = math.nan if kind.is_floating_point or kind.is_complex else 0
            self._empty[leaf] = torch.full(
                [int(size) for size in sizes], nothing, dtype=kind, device=self._device
            )
        return self._empty[leaf]


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return " ".join([SHAPE + str(leaf.dtype).removeprefix("torch."), *map(str, leaf.shape)])
    return leaf if isinstance(leaf, PLAIN) else None


def _versions(values: Any) -> list[int]:
    return [
        leaf._version
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and not leaf.is_inference()
    ]


def follow_layers(model: nn.Module, names: str | Sequence[str]) -> FollowedGraph:
    """Find the layers of a model by names and patterns in the order of its forward, which is
    followed when it runs.
    """
    layers = find_layers(model, names).names
    refuse_hooks(model, layers)
    modules = [model.get_submodule(name) for name in layers]
    within = {id(inner) for module in modules for inner in module.modules()}
    if twice := next(
        (name for name, module in zip(layers, modules, strict=True) if modules.count(module) > 1),
        "",
    ):
        raise UsageError(
            f"{twice} is one module under two names, and a pipeline calls each layer once: "
            "name what holds both calls"
        )
    outside = [(name, module) for name, module in model.named_modules() if id(module) not in within]
    if kept := next(
        (
            name
            for name, module in outside
            if isinstance(module, _NormBase) and module.track_running_stats
        ),
        "",
    ):
        raise UsageError(
            f"{kept} keeps running statistics between layers, which only one stage can keep: "
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
