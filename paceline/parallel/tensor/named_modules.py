"""The modules that a plan names: finds them, and refuses those that their style can't cut."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.parallel.tensor.cut_layers import TensorCutModule
from paceline.parallel.tensor.styles import Style, column, experts, row, sequence, summed, vocab

# Parameters of experts of Mixtral's kind, of shape (experts, out, in): the dimension that is cut,
# and in how many parts.
EXPERTS = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
# These read the weights of layers inside of them, and never call the layers, or not always.
READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class NamedModule:
    """A module that a plan names, with its first name and its style."""

    name: str
    module: nn.Module
    style: Style


def find_named_modules(model: nn.Module, layers: Mapping[str, Style]) -> list[NamedModule]:
    """Find the modules that patterns name, once each, in the order of the model."""
    names = list(model.named_modules(remove_duplicate=False))
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name, _ in names):
            raise UsageError(
                f"tensor: no module is called {pattern!r}; "
                f"{describe_nearest(pattern, [name for name, _ in names if name])}"
            )
    # A shared module has several names, and must have one style under all of them.
    first: dict[int, tuple[str, str, NamedModule]] = {}
    for name, module in names:
        for pattern, style in layers.items():
            if not fnmatchcase(name, pattern):
                continue
            seen = first.setdefault(id(module), (name, pattern, NamedModule(name, module, style)))
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


def describe_nearest(pattern: str, names: Sequence[str]) -> str:
    """List the names that are most like a pattern, for an error message."""
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    return f"the nearest are {', '.join(near)}" if near else "it has no modules inside"


def refuse_wrapped_model(model: nn.Module) -> None:
    """Raise `UsageError` for a model with a wrapper of torch, such as FSDP."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if wrapper := next((kind for kind in (*WRAPPERS, "FSDPModule") if kind in kinds), None):
            raise UsageError(
                f"tensor: {name or 'the model'} is wrapped in {wrapper} already; "
                "give the model as it is, shard() comes after"
            )


def refuse_uncuttable(each: NamedModule, model: nn.Module) -> None:
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
    if name_module_kind(module) not in kinds.split(", "):
        inside = [
            f"{inner} ({type(part).__name__})"
            for inner, part in module.named_modules()
            if name_module_kind(part) and inner
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
    _refuse_borrowed_weight(name, module, model.get_submodule(each.name.rpartition(".")[0]))


def _refuse_borrowed_weight(name: str, module: nn.Module, parent: nn.Module) -> None:
    """Raise `UsageError` for a layer whose weight is made, or read, by more than its forward."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if not isinstance(weight, Parameter) or not (bias is None or isinstance(bias, Parameter)):
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
    if isinstance(parent, READS_WEIGHTS):
        raise UsageError(
            f"tensor: {name} lies in {type(parent).__name__}, which reads its weights without "
            "calling it; write the block with F.scaled_dot_product_attention and layers of its own"
        )


def name_module_kind(module: nn.Module) -> str:
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


def find_summed_modules(
    whole: Sequence[NamedModule], cut_ids: set[int]
) -> list[tuple[str, nn.Module]]:
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


def _refuse_in_region(name: str, module: nn.Module, region: NamedModule, is_cut: bool) -> None:
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


def map_regions(named: Sequence[NamedModule]) -> dict[int, NamedModule]:
    """Find the outermost region of each module inside of one, by the module's id.

    Raises `UsageError` for a module that can't lie in a region.
    """
    regions = dict[int, NamedModule]()
    for each in named:
        if isinstance(each.style, sequence):
            for part in each.module.modules():
                regions.setdefault(id(part), each)
    for each in named:
        region = regions.get(id(each.module), each)
        if isinstance(each.style, sequence | vocab) and region is not each:
            raise UsageError(
                f"tensor: {each.name} lies in the region {region.name}, where "
                f"{each.style} can't be; end it before"
            )
    return regions
