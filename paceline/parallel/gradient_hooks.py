"""Hooks of scripts on gradients, which torch calls in `torch.autograd.grad` as in backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor


@contextmanager
def without_gradient_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Take off the hooks on these gradients inside of the block, and put them back at its end."""
    # `_backward_hooks` is private to torch: the dict of hooks by handle that `Tensor.register_hook`
    # fills. If torch keeps hooks elsewhere, they are called in the block as well.
    hooks = [
        (own, dict(own))
        for parameter in parameters
        if (own := cast("dict[int, Any] | None", parameter._backward_hooks))
    ]
    for own, _ in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, saved in hooks:
            own.update(saved)
