"""Nested values of layers: torch's pytrees, and containers that torch takes for leaves.

torch takes dataclasses and subclasses of dict, list and tuple for leaves, and so would miss the
tensors in them. These functions have the names and arguments of torch's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.parallel import torch_pytree

PLAIN = (Tensor, bool, int, float, str, bytes, type, nn.Module, type(None))  # never searched
# Levels of objects of unknown classes that are searched.
DEEPEST = 3


def tree_leaves(value: Any, inside: tuple[int, ...] = ()) -> list[Any]:
    """List all leaves, in order. `inside`: ids of the containers around, as one may hold itself."""
    leaves = list[Any]()
    for leaf in torch_pytree.tree_leaves(value):
        parts = _read_items(leaf, inside)
        leaves += (
            [leaf] if parts is None else tree_leaves(list(parts.values()), (*inside, id(leaf)))
        )
    return leaves


def tree_map(change: Callable[[Any], Any], value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Copy the containers with each leaf changed; an unchanged container may be the original."""

    def change_leaf(leaf: Any) -> Any:
        if (parts := _read_items(leaf, inside)) is None:
            return change(leaf)
        changed = {key: tree_map(change, part, (*inside, id(leaf))) for key, part in parts.items()}
        return (
            leaf
            if all(changed[key] is part for key, part in parts.items())
            else _copy_with_items(leaf, changed)
        )

    return torch_pytree.tree_map(change_leaf, value)


def tree_map_only(kind: Any, change: Callable[[Any], Any], value: Any) -> Any:
    """Copy the containers with each leaf of a type (or one of several types) changed."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, kind) else leaf, value)


def find_hidden_tensors(value: Any, depth: int = DEEPEST) -> Iterator[Tensor]:
    """Yield tensors in attributes of leaves of unknown classes, such as distributions."""
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
        yield from find_hidden_tensors(inner, depth - 1)


def _read_items(leaf: Any, inside: tuple[int, ...]) -> Mapping[Any, Any] | None:
    """Read the items of a container that torch doesn't know; None for a leaf or a repetition."""
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


def _copy_with_items(container: Any, parts: Mapping[Any, Any]) -> Any:
    if isinstance(container, tuple):
        return type(container)(parts.values())
    remade = copy.copy(container)
    for key, part in parts.items():
        if dataclasses.is_dataclass(container):
            object.__setattr__(remade, key, part)  # works for a frozen dataclass, too
        else:
            remade[key] = part
    return remade
