"""Which modules of a model are its layers: names and patterns that a user writes, or "auto"."""

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

    `entries` has what was written, each with the names of its modules. If `ordered`, the forward
    has to call the modules of one entry before those of the next.
    """

    entries: tuple[tuple[str, tuple[str, ...]], ...]
    ordered: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all layers, in the order in which they were written."""
        return tuple(name for _, names in self.entries for name in names)


def find_layers(model: nn.Module, written: str | Sequence[str]) -> LayerNames:
    """Find the modules that names and patterns stand for: "embed, blocks.*, norm, head" or "auto".

    A `*` matches dots, too. Of nested modules that one pattern matches, the outermost are layers.
    """
    entries = (
        [one.strip() for one in written.split(",")] if isinstance(written, str) else list(written)
    )
    if entries == ["auto"]:
        return LayerNames(tuple((name, (name,)) for name in choose_layers(model)), ordered=False)
    modules = {name: module for name, module in model.named_modules() if name}
    matches = tuple((entry, tuple(_match_entry(entry, modules))) for entry in entries)
    entry_of = dict[str, str]()
    for entry, names in matches:
        for name in names:
            if name in entry_of:
                raise UsageError(
                    f"{name} is named twice, by {entry_of[name]!r} and by {entry!r}; "
                    "name each layer once"
                )
            entry_of[name] = entry
    for name, entry in entry_of.items():
        # A layer must not lie inside of another one: look at all prefixes of its path.
        steps = name.split(".")
        if outer := next(
            (one for count in range(1, len(steps)) if (one := ".".join(steps[:count])) in entry_of),
            None,
        ):
            raise UsageError(
                f"{name} (named by {entry!r}) lies inside {outer} (named by {entry_of[outer]!r}); "
                "name one of the two"
            )
    return LayerNames(matches)


def _match_entry(entry: str, modules: dict[str, nn.Module]) -> Iterator[str]:
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
                f"{name} is a {type(modules[name]).__name__}, "
                f"which is never called itself; {instead}"
            )
        yield name


def choose_layers(model: nn.Module) -> Iterator[str]:
    """Yield the names of layers for "auto".

    They are the members of containers with most of the parameters, and the modules around these.
    """
    names = list(
        _walk_layers(model, "", _count_parameters(model), inside=isinstance(model, CONTAINERS))
    )
    if len(names) < 2:
        raise UsageError(
            f'"auto" finds no layers in {type(model).__name__}: most of its parameters are in no '
            "nn.Sequential and no nn.ModuleList; "
            'name its layers, such as "embed, blocks.*, head"'
        )
    yield from names


def _walk_layers(module: nn.Module, prefix: str, whole: int, *, inside: bool) -> Iterator[str]:
    """Yield the names of layers in a module.

    A child that is never called is taken apart. So is one with a container that has more than a
    tenth of the `whole` number of parameters; or more than half, if the child itself lies in a
    container (`inside`) and is no sequence.
    """
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        # A sequence can always be taken apart, other forwards rarely.
        most = 2 if inside and not isinstance(child, nn.Sequential) else 10
        if not _is_called(child) or most * max(_container_sizes(child), default=0) > whole:
            yield from _walk_layers(
                child, f"{name}.", whole, inside=inside or isinstance(child, CONTAINERS)
            )
        elif _count_parameters(child):
            yield name


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; lists and dicts of modules or parameters have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _container_sizes(module: nn.Module) -> Iterator[int]:
    """Yield the number of parameters of each container that is this module or lies in it."""
    return (
        _count_parameters(inner)
        for inner in module.modules()
        if isinstance(inner, CONTAINERS)
        and sum(map(bool, map(_count_parameters, inner.children()))) > 1
    )


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
