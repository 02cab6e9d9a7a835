"""Hooks on the gradients of parameters, which `torch.autograd.grad` calls as well as a backward
pass does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor


@contextmanager
def without_gradient_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Take off the hooks that scripts have registered on these gradients, and put them back at
    the end.
    """
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
        for own, before in hooks:
            own.update(before)
