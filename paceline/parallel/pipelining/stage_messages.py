"""Values between stages of a pipeline as messages: nested tensors, numbers, strings, Nones.

{"x": Tensor, "skip": (Tensor, None), "length": 7}
  head      the nesting, 7, and which tensors need gradients        tensors   two

Both ends of a message have the same version of torch, which writes trees as text in its own way.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.torch_pytree import (
    TreeSpec,
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

Values = dict[str, Any]
PLAIN = (bool, int, float, str)


def pack_values(values: Mapping[str, Any], what: str) -> tuple[dict[str, Any], list[Tensor]]:
    """Make the head and tensors of a message. Raises `UsageError` for values that can't be sent.

    `what` has made the values, for the error.
    """
    leaves, spec = tree_flatten(dict(values))
    tensors, plain, needing = list[Tensor](), list[Any](), list[int]()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                needing.append(len(tensors))
            plain.append({})  # stands for a tensor
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


def unpack_values(
    head: Mapping[str, Any], tensors: Sequence[Tensor]
) -> tuple[Values, list[Tensor]]:
    """Read the values of a message, and list its tensors that need gradients.

    These are leaves of this stage's graph. Without gradients, there are none.
    """
    needing, coming = (
        set(head["needing"]) if torch.is_grad_enabled() else set[int](),
        iter(enumerate(tensors)),
    )
    leaves, entries = list[Any](), list[Tensor]()
    for value in head["plain"]:
        if value != {}:
            leaves.append(value)
            continue
        index, tensor = next(coming)
        if index in needing:
            tensor = tensor.detach().requires_grad_()
            entries.append(tensor)
        leaves.append(tensor)
    values: Values = tree_unflatten(leaves, _load_spec(head["tree"]))
    return values, entries


def find_differentiable(values: Mapping[str, Any]) -> list[Tensor]:
    """List tensors that need gradients, in the order of `unpack_values` on the other side."""
    return [
        leaf
        for leaf in tree_flatten(dict(values))[0]
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]


@functools.lru_cache(maxsize=64)
def _load_spec(text: str) -> TreeSpec:
    return treespec_loads(text)


def pack_gradients(grads: Sequence[Tensor | None]) -> tuple[dict[str, Any], list[Tensor]]:
    """Make the head and the tensors of a message with gradients; None for missing ones."""
    return {"there": [grad is not None for grad in grads]}, [
        grad for grad in grads if grad is not None
    ]


def unpack_gradients(head: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Read the gradients of a message."""
    coming = iter(tensors)
    return [next(coming) if is_present else None for is_present in head["there"]]
