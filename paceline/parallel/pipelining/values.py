"""Values that go from one stage of a pipeline to the next, as messages: nested tensors, numbers and
Nones under their names.

{"x": Tensor, "skip": (Tensor, None), "length": 7}
  head      the nesting, 7, and which tensors need gradients        tensors   two
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from paceline.errors import UsageError

Values = dict[str, Any]
PLAIN = (bool, int, float, str)


def pack(values: Mapping[str, Any], what: str) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the head and the tensors of a message with these values.

    Raises `UsageError` for one that can't travel; `what` made it.
    """
    leaves, spec = tree_flatten(dict(values))
    tensors, plain, needing = list[Tensor](), list[Any](), list[int]()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                needing.append(len(tensors))
            plain.append({})  # in its place
            tensors.append(leaf.detach())
        elif leaf is None or isinstance(leaf, PLAIN):
            plain.append(leaf)
        else:
            raise UsageError(
                f"{what} gives a {type(leaf).__qualname__}, and stages of a pipeline send each "
                "other tensors, numbers, texts and None, in "
                "dicts, lists and tuples: return those (and no cache: use_cache=False)"
            )
    return {"tree": treespec_dumps(spec), "plain": plain, "needing": needing}, tensors


def unpack(head: Mapping[str, Any], tensors: Sequence[Tensor]) -> tuple[Values, list[Tensor]]:
    """Return the values of a message, and those of its tensors that need gradients: leaves of
    the graph, where gradients are on.
    """
    needing, coming = (
        set(head["needing"]) if torch.is_grad_enabled() else set[int](),
        iter(enumerate(tensors)),
    )
    found, entries = list[Any](), list[Tensor]()
    for value in head["plain"]:
        if value != {}:
            found.append(value)
            continue
        number, tensor = next(coming)
        if number in needing:
            tensor = tensor.detach().requires_grad_()
            entries.append(tensor)
        found.append(tensor)
    values: Values = tree_unflatten(found, _spec(head["tree"]))
    return values, entries


def tensors_needing(values: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among values that need gradients, in the order in which the stage that
    gets them has them.
    """
    return [
        leaf
        for leaf in tree_flatten(dict(values))[0]
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]


@functools.lru_cache(maxsize=64)
def _spec(text: str) -> TreeSpec:
    return treespec_loads(text)


def pack_gradients(grads: Sequence[Tensor | None]) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the head and the tensors of a message with gradients, some of which are None."""
    return {"there": [grad is not None for grad in grads]}, [
        grad for grad in grads if grad is not None
    ]


def unpack_gradients(head: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of a message."""
    coming = iter(tensors)
    return [next(coming) if there else None for there in head["there"]]
