"""What layers take and return, as nested values: torch's pytrees, and besides them dataclasses and
subclasses of dict, list and tuple.

torch takes a dataclass for a leaf, and so would miss the tensors in it. These functions have the
names and arguments of torch's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

# nothing is looked for in these
PLAIN = (Tensor, bool, int, float, str, bytes, type, nn.Module, type(None))
DEEPEST = 3  # objects of unknown classes in each other that are looked into


def tree_leaves(value: Any, inside: tuple[int, ...] = ()) -> list[Any]:
    """Return all that isn't a container, in order.

    `inside`: the ids of the containers around, as one may hold itself.
    """
    found = list[Any]()
    for leaf in _pytree.tree_leaves(value):
        parts = _open(leaf, inside)
        found += [leaf] if parts is None else tree_leaves(list(parts.values()), (*inside, id(leaf)))
    return found


def tree_map(change: Callable[[Any], Any], value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Return copies of the containers with each leaf changed; one of which nothing changes may
    be the one that was given.
    """

    def change_leaf(leaf: Any) -> Any:
        if (parts := _open(leaf, inside)) is None:
            return change(leaf)
        changed = {key: tree_map(change, part, (*inside, id(leaf))) for key, part in parts.items()}
        return (
            leaf
            if all(changed[key] is part for key, part in parts.items())
            else _remake(leaf, changed)
        )

    return _pytree.tree_map(change_leaf, value)


def tree_map_only(kind: Any, change: Callable[[Any], Any], value: Any) -> Any:
    """Return copies of the containers with each leaf of a type (or one of several) changed."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, kind) else leaf, value)


def hidden_tensors(value: Any, depth: int = DEEPEST) -> Iterator[Tensor]:
    """Yield the tensors in the attributes of those leaves that are objects of unknown classes,
    such as distributions.
    """
    for leaf in tree_leaves(value) if depth else ():
        if isinstance(leaf, PLAIN) or callable(leaf):
            continue
        slots = {
            name: getattr(leaf, name, None)
            for kind in type(leaf).__mro__
            for name in getattr(kind, "__slots__", ())
        }
        inner = list({**slots, **getattr(leaf, "__dict__", {})}.values())
        yield from (part for part in tree_leaves(inner) if isinstance(part, Tensor))
        yield from hidden_tensors(inner, depth - 1)


def _open(leaf: Any, inside: tuple[int, ...]) -> Mapping[Any, Any] | None:
    """Return what a container that torch doesn't know holds; None for anything else, and for one
    that holds itself.
    """
    if isinstance(leaf, PLAIN) or id(leaf) in inside:
        return None
    if dataclasses.is_dataclass(leaf):
        return {
            field.name: getattr(leaf, field.name)
            for field in dataclasses.fields(leaf)
            if hasattr(leaf, field.name)
        }
    if isinstance(leaf, Mapping):
        return dict(leaf)
    return dict(enumerate(leaf)) if isinstance(leaf, list | tuple) else None


def _remake(container: Any, parts: Mapping[Any, Any]) -> Any:
    if isinstance(container, tuple):
        return type(container)(parts.values())
    remade = copy.copy(container)
    for key, part in parts.items():
        if dataclasses.is_dataclass(container):
            object.__setattr__(remade, key, part)  # of a frozen one, too
        else:
            remade[key] = part
    return remade
