"""Cuts a model's layers between workers by a plan. All checks come before the first change."""

from __future__ import annotations

import difflib
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
    TensorCutModule,
    VocabEmbedding,
    VocabHead,
    change_class,
)
from paceline.parallel.tensor.exchanges import TensorAxis
from paceline.parallel.tensor.styles import Style, column, experts, row, sequence, summed, vocab

AXIS = "tensor"
# Parameters of experts of Mixtral's kind, of shape (experts, out, in): the dimension that is cut,
# and in how many parts.
EXPERTS = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
# These read the weights of layers inside of them, and never call the layers, or not always.
READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class _NamedModule:
    """A module that a plan names, with its first name and its style."""

    name: str
    module: nn.Module
    style: Style


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
    size = context.mesh.axis_size(AXIS)
    # Checks. A region covers all modules inside of it.
    named = _find_named(model, layers)
    _refuse_wrapped(model)
    for each in named:
        _refuse_uncuttable(each, model)
    regions = {
        id(part): each
        for each in named
        if isinstance(each.style, sequence)
        for part in each.module.modules()
    }
    for each in named:
        if (
            isinstance(each.style, sequence | vocab)
            and regions.get(id(each.module), each) is not each
        ):
            raise UsageError(
                f"tensor: {each.name} lies in the region {regions[id(each.module)].name}, where "
                f"{each.style} can't be; end it before"
            )
    whole = [each for each in named if isinstance(each.style, sequence | summed)]
    sums = _find_summed(whole, {id(each.module) for each in named if each not in whole})
    cuts = _plan_parameter_cuts(model, [each for each in named if each not in whole], size)
    divided = list(_find_divided(model, divide, size))
    # Changes: parameters first, then the attributes and classes of modules.
    group = context.groups.group_along(AXIS)
    axis = TensorAxis(group, context.groups.meter_along(AXIS))
    _share_random_state(axis)
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    for parameter_cut in cuts:
        _cut_parameter(parameter_cut, context, group.rank)
    for module, name, value in divided:
        setattr(module, name, value)
    for each in named:
        _change_layer(each, axis, regions)
    for name, module in sums:
        change_class(module, SummedModule, LayerCut(axis, name))
    # Comparisons in the first calls.
    cut_ids = {id(one.parameter) for one in cuts}
    whole_parameters = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in cut_ids
    ]
    columns = [each.name for each in named if isinstance(each.style, column)]
    peers.watch_model(model, axis, columns, whole_parameters)
    if compare:
        partial = [
            each.name for each in named if isinstance(each.style, column) and not each.style.gather
        ]
        rows = [each.name for each in named if isinstance(each.style, row) and not each.style.split]
        mixtures = [each.name for each in named if isinstance(each.style, experts)]
        settings = {
            name: _changed_numbers(before[name], part) for name, part in model.named_modules()
        }
        uncut.watch_modules(model, axis, (partial, rows), mixtures, settings)


# ---- modules that a plan names


def _find_named(model: nn.Module, layers: Mapping[str, Style]) -> list[_NamedModule]:
    """Find the modules that patterns name, once each, in the order of the model."""
    names = list(model.named_modules(remove_duplicate=False))
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name, _ in names):
            raise UsageError(
                f"tensor: no module is called {pattern!r}; "
                f"{_describe_nearest(pattern, [name for name, _ in names if name])}"
            )
    # A shared module has several names, and must have one style under all of them.
    first: dict[int, tuple[str, str, _NamedModule]] = {}
    for name, module in names:
        for pattern, style in layers.items():
            if not fnmatchcase(name, pattern):
                continue
            seen = first.setdefault(id(module), (name, pattern, _NamedModule(name, module, style)))
            if seen[2].style != style:
                also = "" if seen[0] == name else f", which is {seen[0]} as well,"
                raise UsageError(
                    f"tensor: {name}{also} is cut by {seen[2].style} and by {style} ({seen[1]!r}, "
                    f"{pattern!r}); choose one"
                )
    shared = [
        name
        for name, module in names
        if id(module) in first and not any(fnmatchcase(name, pattern) for pattern in layers)
    ]
    if shared:
        raise UsageError(
            f"tensor: {shared[0]} is a module that is cut under another name; "
            "name it there as well, by the same style"
        )
    return [seen[2] for seen in first.values()]


def _describe_nearest(pattern: str, names: Sequence[str]) -> str:
    """List the names that are most like a pattern, for an error message."""
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    return f"the nearest are {', '.join(near)}" if near else "it has no modules inside"


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if wrapper := next((kind for kind in (*WRAPPERS, "FSDPModule") if kind in kinds), None):
            raise UsageError(
                f"tensor: {name or 'the model'} is wrapped in {wrapper} already; "
                "give the model as it is, shard() comes after"
            )


def _refuse_uncuttable(each: _NamedModule, model: nn.Module) -> None:
    """Raise `UsageError` for a module that its style can't cut."""
    name, module, kind = each.name or "the model", each.module, type(each.module).__name__
    if isinstance(module, TensorCutModule):
        raise UsageError(f"tensor: {name} is cut already; cut it once")
    if "forward" in module.__dict__:
        raise UsageError(
            f"tensor: {name} ({kind}) has a forward of its own on the instance, which a cut would "
            "pass over; cut it first"
        )
    if isinstance(each.style, summed):
        return
    if isinstance(each.style, sequence):
        if type(module).forward is getattr(nn.Module, "forward", None) or isinstance(
            module, nn.ModuleList | nn.ModuleDict
        ):
            raise UsageError(
                f"tensor: {name} ({kind}) is never called itself, so it can't be a region; "
                f"name what is called: {name}.*"
            )
        return
    kinds = {
        column: "Linear, Conv1D",
        row: "Linear, Conv1D",
        vocab: "Embedding, Linear",
        experts: "CutExperts",
    }[type(each.style)]
    if _module_kind(module) not in kinds.split(", "):
        inside = [
            f"{inner} ({type(part).__name__})"
            for inner, part in module.named_modules()
            if _module_kind(part) and inner
        ][:3]
        hint = (
            f"; name what is inside: {', '.join(f'{name}.{part}' for part in inside)}"
            if inside
            else ""
        )
        raise UsageError(
            f"tensor: {name} is a {kind}, which {each.style} can't cut; it cuts {kinds}{hint}"
        )
    if isinstance(each.style, experts):
        return
    if not all(
        part is None or isinstance(part, Parameter)
        for part in (module._parameters.get("weight"), module._parameters.get("bias"))
    ):
        raise UsageError(
            f"tensor: the weight of {name} is computed from others; "
            "take weight_norm and the like off first"
        )
    if not isinstance(module._parameters.get("weight"), Parameter):
        raise UsageError(
            f"tensor: the weight of {name} is no parameter of its own; take weight_norm and the "
            "like off first"
        )
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    ):
        raise UsageError(
            f"tensor: {name} has max_norm, sparse or scale_grad_by_freq, which need all rows; "
            "leave them out, or don't cut it"
        )
    parent = model.get_submodule(each.name.rpartition(".")[0])
    if isinstance(parent, READS_WEIGHTS):
        raise UsageError(
            f"tensor: {name} lies in {type(parent).__name__}, which reads its weights without "
            "calling it; write the block with F.scaled_dot_product_attention and layers of its own"
        )


def _module_kind(module: nn.Module) -> str:
    """The kind of a module that can be cut; "" for others, subclasses included."""
    if type(module) in (nn.Linear, nn.Embedding):
        return type(module).__name__
    # of transformers
    if isinstance(module, nn.Embedding) and type(module).__name__.endswith("ScaledWordEmbedding"):
        return "Embedding"
    shapes = [
        parameter.shape
        for name in EXPERTS
        if (parameter := module._parameters.get(name)) is not None
    ]
    if len(shapes) == len(module._parameters) == 2 and shapes[0] == (
        shapes[1][0],
        2 * shapes[1][-1],
        shapes[1][1],
    ):
        return "CutExperts"
    weight = module._parameters.get("weight")
    is_conv1d = (
        type(module).__name__ == "Conv1D"
        and weight is not None
        and weight.dim() == 2
        and hasattr(module, "nf")
    )
    return "Conv1D" if is_conv1d else ""


def _find_summed(whole: Sequence[_NamedModule], cut_ids: set[int]) -> list[tuple[str, nn.Module]]:
    """Find the modules whose parameters stay whole, and are used on parts of activations."""
    sums: dict[int, tuple[str, nn.Module]] = {}
    for each in whole:
        for inner, module in each.module.named_modules():
            name = f"{each.name}.{inner}" if inner else each.name
            if isinstance(each.style, sequence):
                _refuse_in_region(name, module, each, id(module) in cut_ids)
            if id(module) not in cut_ids and any(
                parameter is not None for parameter in module._parameters.values()
            ):
                sums[id(module)] = name, module
    return list(sums.values())


def _refuse_in_region(name: str, module: nn.Module, region: _NamedModule, is_cut: bool) -> None:
    """Raise `UsageError` for a module that may not treat each position of a sequence by itself."""
    has_state = any(
        part is not None for part in (*module._parameters.values(), *module._buffers.values())
    )
    normalises = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    if isinstance(module, nn.Embedding) or (has_state and not (is_cut or normalises)):
        raise UsageError(
            f"tensor: {name} ({type(module).__name__}) lies in the region {region.style} of "
            f"{region.name or 'the model'}, and isn't known "
            "to treat each position by itself; cut it by column() or row(), "
            "or choose a smaller region"
        )
    if module is region.module and has_state:
        raise UsageError(
            f"tensor: {name} ({type(module).__name__}) is a single layer; "
            "sequence() is for the module that has the blocks"
        )


# ---- parameters and attributes that are cut


def _plan_parameter_cuts(
    model: nn.Module, named: Sequence[_NamedModule], size: int
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


def _plan_layer_cuts(each: _NamedModule) -> Iterator[_ParameterCut]:
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
    transposed = _module_kind(each.module) == "Conv1D"
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
                f"{_describe_nearest(pattern, names)}"
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


def _change_layer(
    each: _NamedModule, axis: TensorAxis, regions: Mapping[int, _NamedModule]
) -> None:
    """Let a module compute on its part."""
    module, style, name = each.module, each.style, each.name
    region = regions.get(id(module))
    dim = region.style.dim if region is not None and isinstance(region.style, sequence) else None
    kind = _module_kind(module)
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
