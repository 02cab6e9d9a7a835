"""A model as a graph of named layers. Any consecutive layers are a program of their own.

    layers          tokens | positions | blocks.0 | blocks.1 | blocks.2 | norm | head
    stages              part(0, 3)          |      part(3, 5)      |    part(5, 7)
    values      x ->                       y ->                   z ->              output

Operations between two layers (additions, reshapes) go with the one or the other, so that few values
cross. A value that a later stage uses is carried by all stages in between.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

# Private: if it is renamed, this import fails.
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import UsageError
from paceline.parallel.containers import tree_map_only
from paceline.parallel.pipelining.boundaries import place_boundaries
from paceline.parallel.pipelining.flow import ValueFlow
from paceline.parallel.pipelining.layer_names import LayerNames, find_layers
from paceline.parallel.pipelining.operations import (
    OUTPUT,
    Operation,
    ValueRef,
    find_foreign_type,
    look_up_path,
)
from paceline.parallel.pipelining.stage_messages import PLAIN
from paceline.parallel.pipelining.tracing import Untraceable, trace_operations

CHAINED_INPUTS = ("*args", "**keywords")  # names of the inputs if nothing is traced


class StagePart:
    """The program of consecutive layers: it computes `gives` from `takes`, both names of values.

    `modules` and `attributes` are the paths of all modules, parameters and buffers that it uses.
    They are looked up in the model when they are used. So hooks on them and other cuts of them
    work, and the modules of other parts may be taken out of the model. Values made of numbers and
    buffers alone, such as a mask, are made by each part that uses them. `dtypes` names values that
    travel as text.
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
        paths = dict.fromkeys(path for operation in operations for path in operation.model_paths())
        self.modules = tuple(
            path for path in paths if isinstance(look_up_path(model, path), nn.Module)
        )
        self.attributes = tuple(path for path in paths if path not in self.modules)
        # Values are dropped after the last operation that uses them.
        last = {
            name: place
            for place, operation in enumerate(operations)
            for name in (operation.name, *operation.value_names())
        }
        self._dtypes = frozenset(dtypes)
        self._drops = [
            tuple(name for name in last if last[name] == place and name not in gives)
            for place in range(len(operations))
        ]

    def run_stage(
        self, values: Mapping[str, Any], after: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Run these layers on the values that they take, by name; return the values that they give.

        `after` is called with the number of each operation that has run.
        """
        if missing := [name for name in self.takes if name not in values]:
            raise UsageError(
                f"the stage of {self.modules[0]} takes {', '.join(self.takes)}, and was not given "
                f"{missing[0]}"
            )
        present = {name: tree_map_only(Tensor, enter_stage, values[name]) for name in self.takes}
        for name in self._dtypes.intersection(self.takes):
            present[name] = getattr(torch, values[name])
        for place, (operation, drops) in enumerate(zip(self.operations, self._drops, strict=True)):
            present[operation.name] = operation.run_operation(present, self._model)
            for name in drops:
                del present[name]
            if after is not None:
                after(place)
        gives = {
            name: str(present[name]).removeprefix("torch.")
            if name in self._dtypes
            else present[name]
            for name in self.gives
        }
        for name, value in gives.items():
            if name != OUTPUT and (kind := find_foreign_type(value)):
                raise UsageError(
                    f"{name}, which goes from one stage to the next, has a {kind.__name__}, which "
                    "can't be sent; let layers return "
                    "tensors, numbers and None in tuples, lists or dicts, or name one layer that "
                    "holds both ends"
                )
        return gives


class LayerGraph:
    """A model as layers that follow one another.

    `inputs` are the arguments of its forward that a batch gives; others have their default values.
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

    def make_part(self, start: int, stop: int) -> StagePart:
        """Make the program of the layers from `start` to before `stop`."""
        if not 0 <= start < stop <= len(self.layers):
            raise UsageError(
                f"layers {start} to {stop} are none of the {len(self.layers)} of the model"
            )
        first, end = self._starts[start], self._starts[stop]
        takes = self.inputs if start == 0 else self._flow.crossing_values(first)
        gives = (OUTPUT,) if stop == len(self.layers) else self._flow.crossing_values(end)
        again = self._flow.repeated_operations(first)
        dtypes = (
            operation.name for operation in self._operations if operation.reads_attribute("dtype")
        )
        return StagePart(self.model, [*again, *self._operations[first:end]], takes, gives, dtypes)

    def find_owners(self, start: int, stop: int) -> list[int]:
        """Find the layer that each operation of `make_part(start, stop)` belongs to."""
        again = [start] * len(self._flow.repeated_operations(self._starts[start]))
        sizes = [self._starts[layer + 1] - self._starts[layer] for layer in range(start, stop)]
        return again + [
            layer
            for layer, size in zip(range(start, stop), sizes, strict=True)
            for _ in range(size)
        ]

    def bind_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Name the arguments of a call of the model as the first part takes them."""
        if self.inputs == CHAINED_INPUTS:
            return dict(zip(CHAINED_INPUTS, (tuple(args), dict(kwargs)), strict=True))
        signature = self._signature
        try:
            arguments = dict(signature.bind(self.model, *args, **kwargs).arguments)
        except TypeError as error:
            raise UsageError(
                f"{type(self.model).__name__} was called with other arguments than its forward "
                f"takes: {error}"
            ) from None
        del arguments[next(iter(arguments))]  # the model itself
        for name, value in arguments.items():
            default = signature.parameters[name].default
            if name not in self.inputs and not (
                value is default or (isinstance(value, PLAIN) and value == default)
            ):
                raise UsageError(
                    f"the layers were cut for a forward without {name!r}; "
                    f"say pipeline(..., inputs={[*self.inputs, name]!r})"
                )
        if missing := [name for name in self.inputs if name not in arguments]:
            raise UsageError(
                f"the layers were cut for a forward with {missing[0]!r}, which this call of the "
                "model leaves out"
            )
        return {name: arguments[name] for name in self.inputs}

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(type(self.model).forward)

    def find_users(self, starts: Sequence[int]) -> dict[nn.Parameter, dict[int, str]]:
        """Find the stages that use each parameter, and the parameter's name in each.

        A parameter of several stages has to step by the sum of their gradients. `starts` has the
        first layer of each stage. Raises `UsageError` if two stages would keep the same running
        statistics.
        """
        stages_of = dict[nn.Parameter, dict[int, str]]()
        for stage, part in enumerate(self._make_parts(starts)):
            for name, parameter in iterate_part_parameters(self.model, part):
                stages_of.setdefault(parameter, {}).setdefault(stage, name)
        self._refuse_shared_statistics(starts)
        return stages_of

    def _make_parts(self, starts: Sequence[int]) -> Iterator[StagePart]:
        return (
            self.make_part(start, stop)
            for start, stop in zip(starts, [*starts[1:], len(self.layers)], strict=True)
        )

    def _refuse_shared_statistics(self, starts: Sequence[int]) -> None:
        users = dict[int, int]()
        for stage, part in enumerate(self._make_parts(starts)):
            for path in part.modules:
                for inner in look_up_path(self.model, path).modules():
                    if (
                        isinstance(inner, _NormBase)
                        and inner.track_running_stats
                        and users.setdefault(id(inner), stage) != stage
                    ):
                        raise UsageError(
                            f"stages {users[id(inner)]} and {stage} both use {path}, whose "
                            "statistics only one stage can keep"
                        )


def iterate_part_parameters(
    model: nn.Module, part: StagePart
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names and parameters that a part uses; one with several names comes with each."""
    for path in part.modules:
        for name, parameter in look_up_path(model, path).named_parameters(remove_duplicate=False):
            yield f"{path}.{name}", parameter
    for path in part.attributes:
        if isinstance(parameter := look_up_path(model, path), nn.Parameter):
            yield path, parameter


def list_part_parameters(model: nn.Module, part: StagePart) -> list[nn.Parameter]:
    """List the parameters that a part uses, once each."""
    return list(
        {id(parameter): parameter for _, parameter in iterate_part_parameters(model, part)}.values()
    )


def trace_layers(
    model: nn.Module,
    names: str | Sequence[str],
    *,
    trace: bool = True,
    inputs: Sequence[str] | None = None,
) -> LayerGraph:
    """Find the layers of a model by names and patterns.

    Args:
        model: Model to find layers in. It isn't changed.
        names: Names and patterns in the order of the forward, such as "tokens, blocks.*, norm,
            head"; or "auto".
        trace: Whether operations between layers are traced. If not, each layer is called with the
            result of the one before; a tuple is several arguments. Default: True.
        inputs: Arguments of the forward that a batch gives. Default: those without a default value.

    Raises:
        Untraceable: The forward can't be traced.
        UsageError: Names don't fit the model, or parameters are in no layer.
    """
    written = find_layers(model, names)
    if trace:
        used_inputs = tuple(_required_inputs(model) if inputs is None else inputs)
        if not used_inputs:
            raise Untraceable(
                f"all arguments of the forward of {type(model).__name__} have defaults, and "
                "inputs=[...] doesn't say which a batch gives"
            )
        operations = trace_operations(model, written.names, used_inputs)
        layers = _sort_layers(written, operations)
    else:
        used_inputs, operations, layers = (
            CHAINED_INPUTS,
            list(_chain_layers(written.names)),
            written.names,
        )
    _refuse_unused(model, operations, trace=trace)
    return LayerGraph(model, layers, used_inputs, operations)


def _chain_layers(names: Iterable[str]) -> Iterator[Operation]:
    args, kwargs = ValueRef(CHAINED_INPUTS[0]), dict[str, Any](keywords=ValueRef(CHAINED_INPUTS[1]))
    for name in names:
        yield Operation(name, "chained", name, (args,), kwargs)
        args, kwargs = ValueRef(name), {}
    yield Operation(OUTPUT, "output", OUTPUT, (args,), {})


def _required_inputs(model: nn.Module) -> Iterator[str]:
    for name, parameter in list(inspect.signature(type(model).forward).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise UsageError(
                f"the forward of {type(model).__name__} takes *{name}; give its arguments names, "
                "or say trace=False"
            )
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            yield name


def _sort_layers(written: LayerNames, operations: Sequence[Operation]) -> tuple[str, ...]:
    """Sort layers into the order of the forward. Raises `UsageError` if another is written."""
    called = list(
        dict.fromkeys(
            path
            for operation in operations
            for path in operation.model_paths()
            if path in set(written.names)
        )
    )
    if never := [name for name in written.names if name not in called]:
        raise UsageError(
            f"the forward never calls {', '.join(never[:5])}; leave it out of the layers, and out "
            "of the model if nothing uses it"
        )
    entry = {name: place for place, (_, names) in enumerate(written.entries) for name in names}
    places = [entry[name] for name in called]
    if written.ordered and places != sorted(places):
        # Suggest the entries in their right order, if the forward calls the layers of each in a
        # row.
        entries = list(dict.fromkeys(written.entries[place][0] for place in places))
        whole = sum(
            place != before for place, before in zip(places, [-1, *places], strict=False)
        ) == len(entries)
        raise UsageError(
            "the forward calls the layers in another order; "
            f'write "{", ".join(entries if whole else called)}"'
        )
    return tuple(called)


def _refuse_unused(model: nn.Module, operations: Sequence[Operation], *, trace: bool) -> None:
    """Raise `UsageError` for parameters that no layer has: no stage would hold them."""
    whole = StagePart(model, operations, (), ())
    used = {id(parameter) for _, parameter in iterate_part_parameters(model, whole)}
    unused = [name for name, parameter in model.named_parameters() if id(parameter) not in used]
    if unused:
        names = ", ".join(unused[:4]) + (f" and {len(unused) - 4} more" if len(unused) > 4 else "")
        why = (
            "the forward doesn't use them; take them out of the model"
            if trace
            else "name the layers that have them"
        )
        raise UsageError(f"no layer has the parameters {names}: {why}")


def enter_stage(x: Tensor) -> Tensor:
    """Let layers change an input of a stage in place, which autograd forbids for leaves."""
    if not (x.requires_grad and x.is_leaf and torch.is_grad_enabled()):
        return x
    entered: Tensor = _EnterStage.apply(x)  # type: ignore[no-untyped-call]
    return entered


class _EnterStage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        # The result shares the input's version counter. So a change in place is noticed if the
        # input was saved for a backward.
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return grad
