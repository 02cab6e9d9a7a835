"""Cuts a model's layers between workers, as a plan of patterns says, and refuses what can't be
cut before anything is changed.
"""

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
from paceline.parallel.placement import Range, chunk
from paceline.parallel.tensor import peers, uncut
from paceline.parallel.tensor.functions import TensorAxis
from paceline.parallel.tensor.layers import (
    Column,
    Experts,
    LayerCut,
    RowConv1D,
    RowLinear,
    SequenceRegion,
    Summed,
    TensorCutModule,
    VocabEmbedding,
    VocabHead,
    become,
)
from paceline.parallel.tensor.styles import Style, column, experts, row, sequence, summed, vocab

AXIS = "tensor"
# of Mixtral's kind: (experts, out, in), cut along this dimension in so many parts
EXPERTS = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
# of the layers inside, and never calls them, or not always
READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class _Found:
    """A module that a plan names: under its first name, with its style."""

    name: str
    module: nn.Module
    style: Style


@dataclass(frozen=True)
class _ParameterCut:
    """How a parameter is cut: its name, the dimension, and how many parts of it are cut each by
    itself.
    """

    name: str
    parameter: Parameter
    dim: int
    parts: int

    def ranges(self, rank: int, size: int) -> list[Range]:
        """Return what one worker keeps of the dimension."""
        length = self.parameter.shape[self.dim] // self.parts
        first, last = chunk(length, rank, size)
        return [(part * length + first, part * length + last) for part in range(self.parts)]


def cut(
    model: nn.Module,
    layers: Mapping[str, Style],
    divide: Sequence[str],
    context: CutContext,
    *,
    compare: bool = True,
) -> None:
    """Leave this worker its part of the layers that `layers` names.

    Collective along the axis `tensor`.

    `compare`: compare modules with what they return uncut, in their first call.
    Raises `UsageError` before anything is changed where the model can't be cut so.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    size = context.mesh.extent(AXIS)
    found = _named(model, layers)
    _refuse_wrapped(model)
    for each in found:
        _refuse_unknown(each, model)
    regions = {
        id(part): each
        for each in found
        if isinstance(each.style, sequence)
        for part in each.module.modules()
    }
    for each in found:
        if (
            isinstance(each.style, sequence | vocab)
            and regions.get(id(each.module), each) is not each
        ):
            raise UsageError(
                f"tensor: {each.name} lies in the region {regions[id(each.module)].name}, where "
                f"{each.style} can't be; end it before"
            )
    whole = [each for each in found if isinstance(each.style, sequence | summed)]
    sums = _summed(whole, {id(each.module) for each in found if each not in whole})
    cuts = _parameter_cuts(model, [each for each in found if each not in whole], size)
    divided = list(_divided(model, divide, size))
    group = context.groups.along(AXIS)
    axis = TensorAxis(group, context.groups.meter(AXIS))
    _equal_random_numbers(axis)
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    for wanted in cuts:
        _narrow(wanted, context, group.rank)
    for module, name, value in divided:
        setattr(module, name, value)
    for each in found:
        _become(each, axis, regions)
    for name, module in sums:
        become(module, Summed, LayerCut(axis, name))
    cut_ids = {id(one.parameter) for one in cuts}
    whole_ones = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in cut_ids
    ]
    columns = [each.name for each in found if isinstance(each.style, column)]
    peers.watch(model, axis, columns, whole_ones)
    if compare:
        partial = [
            each.name for each in found if isinstance(each.style, column) and not each.style.gather
        ]
        rows = [each.name for each in found if isinstance(each.style, row) and not each.style.split]
        mixtures = [each.name for each in found if isinstance(each.style, experts)]
        settings = {
            name: _divided_since(before[name], part) for name, part in model.named_modules()
        }
        uncut.watch(model, axis, (partial, rows), mixtures, settings)


# ---- what is named


def _named(model: nn.Module, layers: Mapping[str, Style]) -> list[_Found]:
    """Find the modules that patterns name; each once, in the order of the model."""
    names = list(model.named_modules(remove_duplicate=False))
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name, _ in names):
            raise UsageError(
                f"tensor: no module is called {pattern!r}; "
                f"{_near(pattern, [name for name, _ in names if name])}"
            )
    first: dict[int, tuple[str, str, _Found]] = {}
    for name, module in names:
        for pattern, style in layers.items():
            if not fnmatchcase(name, pattern):
                continue
            known = first.setdefault(id(module), (name, pattern, _Found(name, module, style)))
            if known[2].style != style:
                also = "" if known[0] == name else f", which is {known[0]} as well,"
                raise UsageError(
                    f"tensor: {name}{also} is cut by {known[2].style} and by {style} "
                    f"({known[1]!r}, {pattern!r}); choose one"
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
    return [known[2] for known in first.values()]


def _near(wanted: str, names: Sequence[str]) -> str:
    """Say which names are like a pattern."""
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4) or names[:3]
    return f"the nearest are {', '.join(near)}" if near else "it has no modules inside"


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if wrapper := next((kind for kind in (*WRAPPERS, "FSDPModule") if kind in kinds), None):
            raise UsageError(
                f"tensor: {name or 'the model'} is wrapped in {wrapper} already; "
                "give the model as it is, shard() comes after"
            )


def _refuse_unknown(each: _Found, model: nn.Module) -> None:
    """Raise where a module isn't of a kind that its style can cut."""
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
        experts: "Experts",
    }[type(each.style)]
    if _kind(module) not in kinds.split(", "):
        inside = [
            f"{inner} ({type(part).__name__})"
            for inner, part in module.named_modules()
            if _kind(part) and inner
        ][:3]
        hint = (
            f"; name what is inside: {', '.join(f'{name}.{part}' for part in inside)}"
            if inside
            else ""
        )
        raise UsageError(
            f"tensor: {name} is of the kind {kind}, which {each.style} can't cut; "
            f"it cuts {kinds}{hint}"
        )
    if isinstance(each.style, experts):
        return
    if not all(
        part is None or isinstance(part, Parameter)
        for part in (module._parameters.get("weight"), module._parameters.get("bias"))
    ):
        raise UsageError(
            f"tensor: the weight of {name} is computed from others; take weight_norm and the like "
            "off first"
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
            "calling it; "
            "write the block with F.scaled_dot_product_attention and layers of its own"
        )


def _kind(module: nn.Module) -> str:
    """Return the kind of a module that can be cut; empty for others, subclasses too, as they may
    compute something else.
    """
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
        return "Experts"
    weight = module._parameters.get("weight")
    is_conv1d = (
        type(module).__name__ == "Conv1D"
        and weight is not None
        and weight.dim() == 2
        and hasattr(module, "nf")
    )
    return "Conv1D" if is_conv1d else ""


def _summed(whole: Sequence[_Found], cut_ids: set[int]) -> list[tuple[str, nn.Module]]:
    """Find the modules whose parameters stay whole and are used on parts of the activations."""
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


def _refuse_in_region(name: str, module: nn.Module, region: _Found, is_cut: bool) -> None:
    """Raise for a module that doesn't treat each position of a sequence by itself, as far as
    that can be known.
    """
    has_state = any(
        part is not None for part in (*module._parameters.values(), *module._buffers.values())
    )
    normalises = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    if isinstance(module, nn.Embedding) or (has_state and not (is_cut or normalises)):
        raise UsageError(
            f"tensor: {name} ({type(module).__name__}) lies in the region {region.style} of "
            f"{region.name or 'the model'}, and isn't known "
            "to treat each position by itself; cut it by column() or row(), or choose a smaller "
            "region"
        )
    if module is region.module and has_state:
        raise UsageError(
            f"tensor: {name} ({type(module).__name__}) is a single layer; "
            "sequence() is for the module that has the blocks"
        )


# ---- what is cut


def _parameter_cuts(model: nn.Module, found: Sequence[_Found], size: int) -> list[_ParameterCut]:
    """Say how each parameter is cut; tied ones once, and alike everywhere."""
    cuts: dict[int, _ParameterCut] = {}
    owners: dict[int, set[int]] = {}
    for each in found:
        for wanted in _of_layer(each):
            known = cuts.setdefault(id(wanted.parameter), wanted)
            owners.setdefault(id(wanted.parameter), set()).add(id(each.module))
            if (known.dim, known.parts) != (wanted.dim, wanted.parts):
                raise UsageError(
                    f"tensor: {wanted.name} is {known.name} as well (tied), and they are cut in "
                    "two ways; cut both by vocab()"
                )
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if (
                parameter is not None
                and id(parameter) in cuts
                and id(module) not in owners[id(parameter)]
            ):
                known = cuts[id(parameter)]
                raise UsageError(
                    f"tensor: {known.name} is {name}.{attribute} as well (tied), which isn't cut; "
                    "cut both alike, by vocab()"
                )
    for wanted in cuts.values():
        _refuse_odd(wanted, size)
    return list(cuts.values())


def _of_layer(each: _Found) -> Iterator[_ParameterCut]:
    if isinstance(each.style, experts):
        yield from (
            _ParameterCut(f"{each.name}.{name}", getattr(each.module, name), *how)
            for name, how in EXPERTS.items()
        )
        return
    weight, bias = each.module._parameters["weight"], each.module._parameters.get("bias")
    assert weight is not None
    transposed = _kind(each.module) == "Conv1D"
    parts = each.style.parts if isinstance(each.style, column) else 1
    by_rows = isinstance(each.style, row)
    yield _ParameterCut(f"{each.name}.weight", weight, int(by_rows != transposed), parts)
    if bias is not None and not by_rows:
        yield _ParameterCut(f"{each.name}.bias", bias, 0, parts)


def _refuse_odd(wanted: _ParameterCut, size: int) -> None:
    length, step = wanted.parameter.shape[wanted.dim], size * wanted.parts
    if length % step:
        fits = [str(each) for each in range(2, length + 1) if length % (each * wanted.parts) == 0][
            :6
        ]
        parts = f"{wanted.parts} parts by " if wanted.parts > 1 else ""
        sizes = (
            f"{length // step * step} or {length - length % step + step}"
            if length >= step
            else str(step)
        )
        raise UsageError(
            f"tensor: dimension {wanted.dim} of {wanted.name} has size {length}, which "
            f"{parts}{size} workers can't cut evenly; "
            f"make it {sizes}, or tensor={' or '.join(fits) or 1}"
        )


def _divided(
    model: nn.Module, patterns: Sequence[str], size: int
) -> Iterator[tuple[nn.Module, str, int]]:
    """Find the attributes that are divided, and what they become."""
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
                f"{_near(pattern, names)}"
            )
        for name, module in having:
            value = int(getattr(module, attribute))
            if value % size:
                raise UsageError(
                    f"tensor: {name}.{attribute} is {value}, which {size} workers can't divide "
                    "evenly; "
                    "choose "
                    f"tensor={' or '.join(str(each) for each in range(2, value + 1) if value % each == 0) or 1}"  # noqa: E501
                )
            yield module, attribute, value // size


def _divided_since(before: Mapping[str, Any], module: nn.Module) -> dict[str, int]:
    """Return the whole numbers of a module that are others now, as they were."""
    return {
        key: value
        for key, value in before.items()
        if isinstance(value, int) and vars(module)[key] != value
    }


def _narrow(wanted: _ParameterCut, context: CutContext, rank: int) -> None:
    """Leave a parameter its local part, in the object that it is: optimizers and ties keep it."""
    parameter, size = wanted.parameter, context.mesh.extent(AXIS)
    placement = context.placements.of(parameter, wanted.name)
    placement = placement.narrow(wanted.dim, wanted.ranges(rank, size), AXIS)
    with torch.no_grad():
        grad = None if parameter.grad is None else _part(parameter.grad, wanted, rank, size)
        local = _part(parameter.data, wanted, rank, size)
        parameter.grad = None
        parameter.set_(local)  # type: ignore[call-overload]
        parameter.grad = grad
    context.placements.add(parameter, placement)


def _part(whole: Tensor, wanted: _ParameterCut, rank: int, size: int) -> Tensor:
    return torch.cat(
        [
            whole.narrow(wanted.dim, first, last - first)
            for first, last in wanted.ranges(rank, size)
        ],
        wanted.dim,
    ).contiguous()


def _become(each: _Found, axis: TensorAxis, regions: Mapping[int, _Found]) -> None:
    """Let a module compute on its part."""
    module, style, name = each.module, each.style, each.name
    region = regions.get(id(module))
    dim = region.style.dim if region is not None and isinstance(region.style, sequence) else None
    kind = _kind(module)
    wanted = () if isinstance(style, sequence | summed) else _of_layer(each)
    dims = {one.name.rpartition(".")[2]: (one.dim, one.parts) for one in wanted}
    match style:
        case column():
            become(
                module,
                Column,
                LayerCut(
                    axis, name, parts=style.parts, gather=style.gather, sequence=dim, dims=dims
                ),
            )
            _resize(module, kind, 0, axis.size)
        case row():
            become(
                module,
                RowConv1D if kind == "Conv1D" else RowLinear,
                LayerCut(axis, name, split=style.split, sequence=dim, dims=dims),
            )
            _resize(module, kind, 1, axis.size)
        case vocab():
            weight = module._parameters["weight"]
            words = 0 if weight is None else len(weight) * axis.size
            become(
                module,
                VocabEmbedding if kind == "Embedding" else VocabHead,
                LayerCut(axis, name, vocabulary=words, dims=dims),
            )
        case experts():
            become(module, Experts, LayerCut(axis, name, dims=dims))
        case sequence():
            become(module, SequenceRegion, LayerCut(axis, name, sequence=dim))


def _resize(module: nn.Module, kind: str, which: int, size: int) -> None:
    """Let the sizes that a layer tells be those of its part, which its code may use."""
    attribute = {"Linear": ("out_features", "in_features"), "Conv1D": ("nf", "nx")}[kind][which]
    if isinstance(value := getattr(module, attribute, None), int):
        setattr(module, attribute, value // size)


# ---- what has to be equal on all workers


def _equal_random_numbers(axis: TensorAxis) -> None:
    """Let all workers draw the numbers of the first one: dropout of activations that all of them
    have is the same.
    """
    state = axis.group.broadcast(torch.get_rng_state(), name="state of the random generator").wait()
    if axis.rank:
        with GENERATORS:  # where ranks are threads, another one may be making a module by now
            torch.set_rng_state(state)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state = axis.group.broadcast(
            torch.cuda.get_rng_state(), name="state of the device's random generator"
        ).wait()
        torch.cuda.set_rng_state(state)
