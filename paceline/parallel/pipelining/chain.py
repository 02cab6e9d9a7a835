"""A model as a graph of named layers, of which any consecutive ones are a program of their own.

    layers          tokens | positions | blocks.0 | blocks.1 | blocks.2 | norm | head
    stages              part(0, 3)          |      part(3, 5)      |    part(5, 7)
    values      x ->                       y ->                   z ->              output

What lies between two layers (additions, reshapes) goes with the one or the other, so that few
values cross. A value that a later stage uses is carried by all stages between.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import UsageError
from paceline.parallel.containers import tree_map_only
from paceline.parallel.pipelining.boundaries import place_boundaries
from paceline.parallel.pipelining.flow import ValueFlow
from paceline.parallel.pipelining.layer_names import LayerNames, find_layers
from paceline.parallel.pipelining.operations import OUTPUT, Operation, Ref, find, foreign
from paceline.parallel.pipelining.tracing import Untraceable, trace_operations
from paceline.parallel.pipelining.values import PLAIN

CHAINED = ("*args", "**keywords")  # the inputs where nothing is traced


class StagePart:
    """The program of consecutive layers: it makes of the values that it `takes` those that it
    `gives`.

    `modules` and `attributes` are the paths of all modules, parameters and buffers that it uses.
    They are looked up in the model when they are used, so hooks and other cuts of them work, and
    modules of other parts may be taken out of the model. What is made of numbers and buffers alone,
    such as a mask, is made by each part that uses it; `dtypes` are values that travel as text.
    """

    def __init__(
        self,
        model: nn.Module,
        operations: Sequence[Operation],
        takes: Sequence[str],
        gives: Sequence[str],
        dtypes: Iterable[str] = (),
    ) -> None:
        self._model, self.operations, self.takes, self.gives = (
            model,
            tuple(operations),
            tuple(takes),
            tuple(gives),
        )
        paths = dict.fromkeys(path for operation in operations for path in operation.paths())
        self.modules = tuple(path for path in paths if isinstance(find(model, path), nn.Module))
        self.attributes = tuple(path for path in paths if path not in self.modules)
        last = {
            name: place
            for place, operation in enumerate(operations)
            for name in (operation.name, *operation.reads())
        }
        self._dtypes = frozenset(dtypes)
        self._drops = [
            tuple(name for name in last if last[name] == place and name not in gives)
            for place in range(len(operations))
        ]

    def run(
        self, values: Mapping[str, Any], after: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Run these layers on the values that they take, by name; return those that they give.

        `after` is told each operation's place.
        """
        if missing := [name for name in self.takes if name not in values]:
            raise UsageError(
                f"the stage of {self.modules[0]} takes {', '.join(self.takes)}, and was not given "
                f"{missing[0]}"
            )
        known = {name: tree_map_only(Tensor, enter, values[name]) for name in self.takes}
        for name in self._dtypes.intersection(self.takes):
            known[name] = getattr(torch, values[name])
        for place, (operation, drops) in enumerate(zip(self.operations, self._drops, strict=True)):
            known[operation.name] = operation.call(known, self._model)
            for name in drops:
                del known[name]
            if after is not None:
                after(place)
        gives = {
            name: str(known[name]).removeprefix("torch.") if name in self._dtypes else known[name]
            for name in self.gives
        }
        for name, value in gives.items():
            if name != OUTPUT and (kind := foreign(value)):
                raise UsageError(
                    f"{name}, which goes from one stage to the next, has a {kind.__name__}, which "
                    "can't be sent; let layers return "
                    "tensors, numbers and None in tuples, lists or dicts, or name one layer that "
                    "holds both ends"
                )
        return gives


class LayerGraph:
    """A model as layers that follow one another.

    `inputs`: the arguments of its forward that a batch gives; others have their defaults.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        inputs: Sequence[str],
        operations: Sequence[Operation],
    ) -> None:
        self.layers, self.inputs = tuple(layers), tuple(inputs)
        self.model, self._operations, self._flow = (
            model,
            tuple(operations),
            ValueFlow(model, operations, inputs),
        )
        self._starts = place_boundaries(self._flow, layers)

    def part(self, start: int, stop: int) -> StagePart:
        """Return the program of the layers from `start` to before `stop`."""
        if not 0 <= start < stop <= len(self.layers):
            raise UsageError(
                f"layers {start} to {stop} are none of the {len(self.layers)} of the model"
            )
        first, end = self._starts[start], self._starts[stop]
        takes = self.inputs if start == 0 else self._flow.crossing(first)
        gives = (OUTPUT,) if stop == len(self.layers) else self._flow.crossing(end)
        again = self._flow.repeated(first)
        dtypes = (
            operation.name for operation in self._operations if operation.reads_attribute("dtype")
        )
        return StagePart(self.model, [*again, *self._operations[first:end]], takes, gives, dtypes)

    def owners(self, start: int, stop: int) -> list[int]:
        """Return the layer that each operation of `part(start, stop)` belongs to."""
        again = [start] * len(self._flow.repeated(self._starts[start]))
        sizes = [self._starts[layer + 1] - self._starts[layer] for layer in range(start, stop)]
        return again + [
            layer
            for layer, size in zip(range(start, stop), sizes, strict=True)
            for _ in range(size)
        ]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Give the arguments of a call of the model the names that the first part takes."""
        if self.inputs == CHAINED:
            return dict(zip(CHAINED, (tuple(args), dict(kwargs)), strict=True))
        signature = self._signature
        try:
            given = dict(signature.bind(self.model, *args, **kwargs).arguments)
        except TypeError as error:
            raise UsageError(
                f"{type(self.model).__name__} was called with other arguments than its forward "
                f"takes: {error}"
            ) from None
        del given[next(iter(given))]  # the model itself
        for name, value in given.items():
            default = signature.parameters[name].default
            if name not in self.inputs and not (
                value is default or (isinstance(value, PLAIN) and value == default)
            ):
                raise UsageError(
                    f"the layers were cut for a forward without {name!r}; "
                    f"say pipeline(..., inputs={[*self.inputs, name]!r})"
                )
        if missing := [name for name in self.inputs if name not in given]:
            raise UsageError(
                f"the layers were cut for a forward with {missing[0]!r}, which this call of the "
                "model leaves out"
            )
        return {name: given[name] for name in self.inputs}

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(type(self.model).forward)

    def users(self, starts: Sequence[int]) -> dict[nn.Parameter, dict[int, str]]:
        """Return which stages use each parameter, and what they call it: one with several has to
        step by the sum of their gradients.

        `starts` has the first layer of each stage. Raises `UsageError` where two would keep the
        same running statistics.
        """
        found = dict[nn.Parameter, dict[int, str]]()
        for stage, part in enumerate(self._parts(starts)):
            for name, parameter in part_parameters(self.model, part):
                found.setdefault(parameter, {}).setdefault(stage, name)
        self._refuse_shared_statistics(starts)
        return found

    def _parts(self, starts: Sequence[int]) -> Iterator[StagePart]:
        return (
            self.part(start, stop)
            for start, stop in zip(starts, [*starts[1:], len(self.layers)], strict=True)
        )

    def _refuse_shared_statistics(self, starts: Sequence[int]) -> None:
        users = dict[int, int]()
        for stage, part in enumerate(self._parts(starts)):
            for path in part.modules:
                for inner in find(self.model, path).modules():
                    if (
                        isinstance(inner, _NormBase)
                        and inner.track_running_stats
                        and users.setdefault(id(inner), stage) != stage
                    ):
                        raise UsageError(
                            f"stages {users[id(inner)]} and {stage} both use {path}, whose "
                            "statistics only one stage can keep"
                        )


def part_parameters(model: nn.Module, part: StagePart) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield names and parameters of all that a part uses; a parameter with several names comes
    with each.
    """
    for path in part.modules:
        for name, parameter in find(model, path).named_parameters(remove_duplicate=False):
            yield f"{path}.{name}", parameter
    for path in part.attributes:
        if isinstance(parameter := find(model, path), nn.Parameter):
            yield path, parameter


def own_parameters(model: nn.Module, part: StagePart) -> list[nn.Parameter]:
    """Return the parameters that a part uses, each once."""
    return list(
        {id(parameter): parameter for _, parameter in part_parameters(model, part)}.values()
    )


def trace_layers(
    model: nn.Module,
    names: str | Sequence[str],
    *,
    trace: bool = True,
    inputs: Sequence[str] | None = None,
) -> LayerGraph:
    """Find the layers of a model by names and patterns, in the order of its forward: "tokens,
    positions, blocks.*, norm, head" or "auto".

    `trace`: take down what the forward does between the layers; otherwise each is called with what
    the one before returned, a tuple as several arguments. `inputs`: those arguments of the forward
    that a batch gives; without, all that have no default.
    """
    found = find_layers(model, names)
    if trace:
        given = tuple(_inputs(model) if inputs is None else inputs)
        if not given:
            raise Untraceable(
                f"all arguments of the forward of {type(model).__name__} have defaults, and "
                "inputs=[...] doesn't say which a batch gives"
            )
        operations = trace_operations(model, found.names, given)
        layers = _in_order(found, operations)
    else:
        given, operations, layers = CHAINED, list(_chained(found.names)), found.names
    _refuse_unused(model, operations, trace=trace)
    return LayerGraph(model, layers, given, operations)


def _chained(names: Iterable[str]) -> Iterator[Operation]:
    args, kwargs = Ref(CHAINED[0]), dict[str, Any](keywords=Ref(CHAINED[1]))
    for name in names:
        yield Operation(name, "chained", name, (args,), kwargs)
        args, kwargs = Ref(name), {}
    yield Operation(OUTPUT, "output", OUTPUT, (args,), {})


def _inputs(model: nn.Module) -> Iterator[str]:
    for name, parameter in list(inspect.signature(type(model).forward).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise UsageError(
                f"the forward of {type(model).__name__} takes *{name}; give its arguments names, "
                "or say trace=False"
            )
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            yield name


def _in_order(found: LayerNames, operations: Sequence[Operation]) -> tuple[str, ...]:
    called = list(
        dict.fromkeys(
            path
            for operation in operations
            for path in operation.paths()
            if path in set(found.names)
        )
    )
    if never := [name for name in found.names if name not in called]:
        raise UsageError(
            f"the forward never calls {', '.join(never[:5])}; leave it out of the layers, and out "
            "of the model if nothing uses it"
        )
    entry = {name: place for place, (_, names) in enumerate(found.entries) for name in names}
    places = [entry[name] for name in called]
    if found.ordered and places != sorted(places):
        written = list(dict.fromkeys(found.entries[place][0] for place in places))
        whole = sum(
            place != before for place, before in zip(places, [-1, *places], strict=False)
        ) == len(written)
        raise UsageError(
            "the forward calls the layers in another order; "
            f'write "{", ".join(written if whole else called)}"'
        )
    return tuple(called)


def _refuse_unused(model: nn.Module, operations: Sequence[Operation], *, trace: bool) -> None:
    whole = StagePart(model, operations, (), ())
    used = {id(parameter) for _, parameter in part_parameters(model, whole)}
    left = [name for name, parameter in model.named_parameters() if id(parameter) not in used]
    if left:
        names = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        why = (
            "the forward doesn't use them; take them out of the model"
            if trace
            else "name the layers that have them"
        )
        raise UsageError(f"no layer has the parameters {names}: {why}")


def enter(x: Tensor) -> Tensor:
    """Let layers change what they are given in place, as they may in the model: autograd forbids
    it for tensors that begin a graph.
    """
    if not (x.requires_grad and x.is_leaf and torch.is_grad_enabled()):
        return x
    entered: Tensor = _Entered.apply(x)  # type: ignore[no-untyped-call]
    return entered


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        # shares the counter of versions: who changes it in place is found out, where it was kept
        # for a backward
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return grad
