"""Which modules of a model its layers are: names and patterns as a user writes them, or "auto"."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from paceline.errors import UsageError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class LayerNames:
    """The modules that are layers.

    `entries`: what was written, each with the names of modules that it stands for.
    """

    entries: tuple[tuple[str, tuple[str, ...]], ...]
    # whether the forward has to call the modules of one entry before those of the next
    ordered: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all, in the order in which they were written."""
        return tuple(name for _, names in self.entries for name in names)


def find_layers(model: nn.Module, written: str | Sequence[str]) -> LayerNames:
    """Find the modules that names and patterns stand for: "embed, blocks.*, norm, head" or "auto".

    A `*` matches dots too; of modules inside each other that one pattern matches, the outermost are
    meant.
    """
    entries = (
        [one.strip() for one in written.split(",")] if isinstance(written, str) else list(written)
    )
    if entries == ["auto"]:
        return LayerNames(tuple((name, (name,)) for name in choose_layers(model)), ordered=False)
    modules = {name: module for name, module in model.named_modules() if name}
    found = tuple((entry, tuple(_matches(entry, modules))) for entry in entries)
    by = dict[str, str]()
    for entry, names in found:
        for name in names:
            if name in by:
                raise UsageError(
                    f"{name} is named twice, by {by[name]!r} and by {entry!r}; name each layer once"
                )
            by[name] = entry
    for name, entry in by.items():
        steps = name.split(".")
        if outer := next(
            (one for count in range(1, len(steps)) if (one := ".".join(steps[:count])) in by), None
        ):
            raise UsageError(
                f"{name} (named by {entry!r}) lies inside {outer} (named by {by[outer]!r}); "
                "name one of the two"
            )
    return LayerNames(found)


def _matches(entry: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    matched = [name for name in modules if fnmatch.fnmatchcase(name, entry)]
    if not matched:
        near = difflib.get_close_matches(entry, modules, n=3, cutoff=0.0)
        raise UsageError(
            f"{entry!r} names no module of the model; "
            f"the nearest names are {', '.join(near) or 'none, as it has no modules'}"
        )
    for name in matched:
        if any(name.startswith(f"{outer}.") for outer in matched):
            continue
        if not _is_called(modules[name]):
            instead = (
                f"write {name + '.*'!r}" if next(modules[name].children(), None) else "leave it out"
            )
            raise UsageError(
                f"{name} is a {type(modules[name]).__name__}, which is never called itself; "
                f"{instead}"
            )
        yield name


def choose_layers(model: nn.Module) -> Iterator[str]:
    """Yield the names of layers for "auto": members of containers that have most of the
    parameters, and the modules around these.
    """
    found = list(_walk(model, "", _size(model), inside=isinstance(model, CONTAINERS)))
    if len(found) < 2:
        raise UsageError(
            f'"auto" finds no layers in {type(model).__name__}: most of its parameters are in no '
            "nn.Sequential and no nn.ModuleList; "
            'name its layers, such as "embed, blocks.*, head"'
        )
    yield from found


def _walk(module: nn.Module, prefix: str, whole: int, *, inside: bool) -> Iterator[str]:
    """Yield the names of layers in a module.

    `inside`: it lies in a container, and is taken apart if most of the model is in it.
    """
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        # a sequence can always be taken apart, other forwards rarely
        most = 2 if inside and not isinstance(child, nn.Sequential) else 10
        if not _is_called(child) or most * max(_contained(child), default=0) > whole:
            yield from _walk(
                child, f"{name}.", whole, inside=inside or isinstance(child, CONTAINERS)
            )
        elif _size(child):
            yield name


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward: lists and dicts of modules or parameters have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _contained(module: nn.Module) -> Iterator[int]:
    """Yield how many parameters each container has that is this module or lies in it."""
    return (
        _size(inner)
        for inner in module.modules()
        if isinstance(inner, CONTAINERS) and sum(map(bool, map(_size, inner.children()))) > 1
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
