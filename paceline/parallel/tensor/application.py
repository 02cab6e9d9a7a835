"""Cuts a model's layers between workers by a plan. All checks come before the first change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.parallel.cut import CutContext
from paceline.parallel.initialise import GENERATORS
from paceline.parallel.placement import Range, chunk_range
from paceline.parallel.tensor import peers, uncut
from paceline.parallel.tensor.cut_layers import (
    ColumnLinear,
    CutExperts,
    LayerCut,
    RowConv1D,
    RowLinear,
    SequenceRegion,
    SummedModule,
    VocabEmbedding,
    VocabHead,
    change_class,
)
from paceline.parallel.tensor.exchanges import TensorAxis
from paceline.parallel.tensor.named_modules import (
    EXPERTS,
    NamedModule,
    describe_nearest,
    find_named_modules,
    find_summed_modules,
    map_regions,
    name_module_kind,
    refuse_uncuttable,
    refuse_wrapped_model,
)
from paceline.parallel.tensor.styles import Style, column, experts, row, sequence, summed, vocab

AXIS = "tensor"


@dataclass(frozen=True)
class _ParameterCut:
    """How a parameter is cut: along `dim`, where each of `parts` equal parts is cut by itself."""

    name: str
    parameter: Parameter
    dim: int
    parts: int

    def find_ranges(self, rank: int, size: int) -> list[Range]:
        """Ranges of the dimension that a worker keeps, one in each part."""
        length = self.parameter.shape[self.dim] // self.parts
        first, last = chunk_range(length, rank, size)
        return [(part * length + first, part * length + last) for part in range(self.parts)]


@dataclass(frozen=True)
class CheckedLayers:
    """What a cut changes, once it is known to be possible.

    Attributes:
        named: Modules that are cut, or computed on parts.
        regions: Region of the sequence around a module, by the module's id.
        sums: Names and modules whose gradients are summed.
        parameters: How parameters are cut.
        divided: Numbers of modules that are divided: module, attribute, new value.
    """

    named: Sequence[NamedModule]
    regions: Mapping[int, NamedModule]
    sums: Sequence[tuple[str, nn.Module]]
    parameters: Sequence[_ParameterCut]
    divided: Sequence[tuple[nn.Module, str, int]]


def cut_layers(
    model: nn.Module,
    layers: Mapping[str, Style],
    divide: Sequence[str],
    context: CutContext,
    *,
    compare: bool = True,
) -> None:
    """Leave this worker its part of the layers that patterns name. Collective along `tensor`.

    Args:
        model: Model to change in place.
        layers: Styles by patterns of module names.
        divide: Patterns of integer attributes that are divided by the number of workers.
        context: The mesh, and the placements so far.
        compare: Whether modules are compared with their undivided output, in their first call.
            Default: True.

    Raises:
        UsageError: The model can't be cut in this way. Nothing is changed then.
    """
    # Private: the model that torch.compile has wrapped.
    model = getattr(model, "_orig_mod", model)
    checked = check_layers(model, layers, divide, context.mesh.axis_size(AXIS))
    # Changes: parameters first, then the attributes and classes of modules.
    group = context.groups.group_along(AXIS)
    axis = TensorAxis(group, context.groups.meter_along(AXIS))
    _share_random_state(axis)
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    for parameter_cut in checked.parameters:
        _cut_parameter(parameter_cut, context, group.rank)
    for module, name, value in checked.divided:
        setattr(module, name, value)
    for each in checked.named:
        _change_layer(each, axis, checked.regions)
    for name, module in checked.sums:
        change_class(module, SummedModule, LayerCut(axis, name))
    # Comparisons in the first calls.
    cut_ids = {id(one.parameter) for one in checked.parameters}
    whole_parameters = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in cut_ids
    ]
    columns = [each.name for each in checked.named if isinstance(each.style, column)]
    peers.watch_model(model, axis, columns, whole_parameters)
    if compare:
        _compare_with_uncut(model, axis, checked.named, before)


def check_layers(
    model: nn.Module, layers: Mapping[str, Style], divide: Sequence[str], size: int
) -> CheckedLayers:
    """Check that `size` workers can divide the layers that patterns name. Nothing is changed.

    Raises:
        UsageError: The model can't be cut in this way.
    """
    named = find_named_modules(model, layers)
    refuse_wrapped_model(model)
    for each in named:
        refuse_uncuttable(each, model)
    whole = [each for each in named if isinstance(each.style, sequence | summed)]
    cut = [each for each in named if each not in whole]
    return CheckedLayers(
        named,
        map_regions(named),
        find_summed_modules(whole, {id(each.module) for each in cut}),
        _plan_parameter_cuts(model, cut, size),
        list(_find_divided(model, divide, size)),
    )


def _compare_with_uncut(
    model: nn.Module,
    axis: TensorAxis,
    named: Sequence[NamedModule],
    before: Mapping[str, Mapping[str, Any]],
) -> None:
    """Compare cut modules with their undivided output in the first calls.

    `before` has the attributes of each module before the cut.
    """
    partial = [
        each.name for each in named if isinstance(each.style, column) and not each.style.gather
    ]
    rows = [each.name for each in named if isinstance(each.style, row) and not each.style.split]
    mixtures = [each.name for each in named if isinstance(each.style, experts)]
    settings = {name: _changed_numbers(before[name], part) for name, part in model.named_modules()}
    uncut.watch_modules(model, axis, (partial, rows), mixtures, settings)


# ---- parameters and attributes that are cut


def _plan_parameter_cuts(
    model: nn.Module, named: Sequence[NamedModule], size: int
) -> list[_ParameterCut]:
    """List how each parameter is cut; a tied one once, and in the same way everywhere."""
    cuts: dict[int, _ParameterCut] = {}
    owners: dict[int, set[int]] = {}
    for each in named:
        for new in _plan_layer_cuts(each):
            first = cuts.setdefault(id(new.parameter), new)
            owners.setdefault(id(new.parameter), set()).add(id(each.module))
            if (first.dim, first.parts) != (new.dim, new.parts):
                raise UsageError(
                    f"tensor: {new.name} is {first.name} as well (tied), and they are cut in two "
                    "ways; cut both by vocab()"
                )
    # A module that isn't named must not have a cut parameter, too.
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if (
                parameter is not None
                and id(parameter) in cuts
                and id(module) not in owners[id(parameter)]
            ):
                first = cuts[id(parameter)]
                raise UsageError(
                    f"tensor: {first.name} is {name}.{attribute} as well (tied), which isn't cut; "
                    "cut both alike, by vocab()"
                )
    for parameter_cut in cuts.values():
        _refuse_uneven(parameter_cut, size)
    return list(cuts.values())


def _plan_layer_cuts(each: NamedModule) -> Iterator[_ParameterCut]:
    """Yield how the parameters of a layer are cut."""
    if isinstance(each.style, experts):
        yield from (
            _ParameterCut(f"{each.name}.{name}", getattr(each.module, name), *how)
            for name, how in EXPERTS.items()
        )
        return
    weight, bias = each.module._parameters["weight"], each.module._parameters.get("bias")
    assert weight is not None
    # nn.Linear has its weight as (out, in), and Conv1D as (in, out).
    transposed = name_module_kind(each.module) == "Conv1D"
    parts = each.style.parts if isinstance(each.style, column) else 1
    by_rows = isinstance(each.style, row)
    yield _ParameterCut(f"{each.name}.weight", weight, int(by_rows != transposed), parts)
    if bias is not None and not by_rows:
        yield _ParameterCut(f"{each.name}.bias", bias, 0, parts)


def _refuse_uneven(parameter_cut: _ParameterCut, size: int) -> None:
    length, step = parameter_cut.parameter.shape[parameter_cut.dim], size * parameter_cut.parts
    if length % step:
        fits = [
            str(each) for each in range(2, length + 1) if length % (each * parameter_cut.parts) == 0
        ][:6]
        parts = f"{parameter_cut.parts} parts by " if parameter_cut.parts > 1 else ""
        sizes = (
            f"{length // step * step} or {length - length % step + step}"
            if length >= step
            else str(step)
        )
        raise UsageError(
            f"tensor: dimension {parameter_cut.dim} of {parameter_cut.name} has size {length}, "
            f"which {parts}{size} workers can't cut evenly; "
            f"make it {sizes}, or tensor={' or '.join(fits) or 1}"
        )


def _find_divided(
    model: nn.Module, patterns: Sequence[str], size: int
) -> Iterator[tuple[nn.Module, str, int]]:
    """Yield the attributes that are divided, with their new values."""
    modules = list(model.named_modules())
    for pattern in patterns:
        place, _, attribute = pattern.rpartition(".")
        matching = [(name, module) for name, module in modules if fnmatchcase(name, place)]
        having = [
            (name, module)
            for name, module in matching
            if isinstance(getattr(module, attribute, None), int)
        ]
        if not having:
            numbers = {
                key
                for _, module in matching
                for key, value in vars(module).items()
                if type(value) is int
            }
            names = [f"{place}.{key}" for key in sorted(numbers)] or [
                name for name, _ in modules if name
            ]
            raise UsageError(
                f"tensor: divide={pattern!r} names no integer attribute of a module; "
                f"{describe_nearest(pattern, names)}"
            )
        for name, module in having:
            value = int(getattr(module, attribute))
            if value % size:
                raise UsageError(
                    f"tensor: {name}.{attribute} is {value}, "
                    f"which {size} workers can't divide evenly; choose "
                    f"tensor={' or '.join(str(each) for each in range(2, value + 1) if value % each == 0) or 1}"  # noqa: E501
                )
            yield module, attribute, value // size


def _changed_numbers(before: Mapping[str, Any], module: nn.Module) -> dict[str, int]:
    """The integers of a module that have changed, with their values from before."""
    return {
        key: value
        for key, value in before.items()
        if isinstance(value, int) and vars(module)[key] != value
    }


def _cut_parameter(parameter_cut: _ParameterCut, context: CutContext, rank: int) -> None:
    """Leave a parameter its local part. It stays the same object, for optimizers and ties."""
    parameter, size = parameter_cut.parameter, context.mesh.axis_size(AXIS)
    placement = context.placements.placement_of(parameter, parameter_cut.name)
    placement = placement.cut_dim(parameter_cut.dim, parameter_cut.find_ranges(rank, size), AXIS)
    # The gradient has to go while the shape changes.
    with torch.no_grad():
        grad = (
            None
            if parameter.grad is None
            else _copy_part(parameter.grad, parameter_cut, rank, size)
        )
        local = _copy_part(parameter.data, parameter_cut, rank, size)
        parameter.grad = None
        parameter.set_(local)  # type: ignore[call-overload]
        parameter.grad = grad
    context.placements.add_placement(parameter, placement)


def _copy_part(whole: Tensor, parameter_cut: _ParameterCut, rank: int, size: int) -> Tensor:
    dim = parameter_cut.dim
    ranges = parameter_cut.find_ranges(rank, size)
    return torch.cat(
        [whole.narrow(dim, first, last - first) for first, last in ranges], dim
    ).contiguous()


def _change_layer(each: NamedModule, axis: TensorAxis, regions: Mapping[int, NamedModule]) -> None:
    """Let a module compute on its part."""
    module, style, name = each.module, each.style, each.name
    region = regions.get(id(module))
    dim = region.style.dim if region is not None and isinstance(region.style, sequence) else None
    kind = name_module_kind(module)
    parameter_cuts = () if isinstance(style, sequence | summed) else _plan_layer_cuts(each)
    dims = {one.name.rpartition(".")[2]: (one.dim, one.parts) for one in parameter_cuts}
    match style:
        case column():
            change_class(
                module,
                ColumnLinear,
                LayerCut(
                    axis, name, parts=style.parts, gather=style.gather, sequence=dim, dims=dims
                ),
            )
            _divide_sizes(module, kind, 0, axis.size)
        case row():
            change_class(
                module,
                RowConv1D if kind == "Conv1D" else RowLinear,
                LayerCut(axis, name, split=style.split, sequence=dim, dims=dims),
            )
            _divide_sizes(module, kind, 1, axis.size)
        case vocab():
            weight = module._parameters["weight"]
            words = 0 if weight is None else len(weight) * axis.size
            change_class(
                module,
                VocabEmbedding if kind == "Embedding" else VocabHead,
                LayerCut(axis, name, vocabulary=words, dims=dims),
            )
        case experts():
            change_class(module, CutExperts, LayerCut(axis, name, dims=dims))
        case sequence():
            change_class(module, SequenceRegion, LayerCut(axis, name, sequence=dim))


def _divide_sizes(module: nn.Module, kind: str, which: int, size: int) -> None:
    """Divide the sizes that a layer says it has, as its code may use them."""
    attribute = {"Linear": ("out_features", "in_features"), "Conv1D": ("nf", "nx")}[kind][which]
    if isinstance(value := getattr(module, attribute, None), int):
        setattr(module, attribute, value // size)


# ---- random numbers


def _share_random_state(axis: TensorAxis) -> None:
    """Let all workers draw the first one's numbers, for equal dropout of whole activations."""
    state = axis.group.broadcast(torch.get_rng_state(), name="state of the random generator").wait()
    if axis.rank:
        # If ranks are threads, another one may be making a module now.
        with GENERATORS:
            torch.set_rng_state(state)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state = axis.group.broadcast(
            torch.cuda.get_rng_state(), name="state of the device's random generator"
        ).wait()
        torch.cuda.set_rng_state(state)
