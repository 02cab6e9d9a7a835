"""With whom and along which way a bucket is summed: a name becomes an object once, here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.group import Group, Work
from paceline.errors import ResourceError, UsageError
from paceline.sync.base import Scene
from paceline.wording import choices


class Reducer(Protocol):
    """Sums flat tensors over all workers, in place, one after the other."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """CPU memory that it sums fastest; collective."""
        ...

    def release(self, flat: Tensor) -> None:
        """`flat` (from `empty`) is not used any more."""
        ...

    def all_reduce(self, flat: Tensor, name: str) -> Work[Tensor]:
        """Start summing `flat` in place."""
        ...

    def close(self) -> None:
        """Free threads."""
        ...


class Native:
    """The group's own all-reduce."""

    def __init__(self, group: Group, say: Callable[[str], None]) -> None:
        self._group, self._say = group, say

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Reducer.empty`."""
        try:
            return self._group.empty((numel,), dtype)
        except ResourceError as error:
            self._say(f"gradients travel through a copy (slower by about half): {error}")
            return torch.empty(numel, dtype=dtype)

    def release(self, flat: Tensor) -> None:
        """See `Reducer.release`."""
        release = getattr(self._group, "release", None)
        if release is not None:
            release(flat)

    def all_reduce(self, flat: Tensor, name: str) -> Work[Tensor]:
        """See `Reducer.all_reduce`."""
        return self._group.all_reduce(flat, name=name, out=flat)

    def close(self) -> None:
        """See `Reducer.close`: nothing to free."""


WAYS: dict[str, Callable[[Scene], Reducer]] = {
    "auto": lambda scene: Native(scene.group, scene.say),
}


def reducer(via: str) -> Callable[[Scene], Reducer]:
    """What makes the reducer called `via`; `UsageError` for an unknown name."""
    if via not in WAYS:
        raise UsageError(f"via={via!r} is unknown; {choices(via, WAYS)}")
    return WAYS[via]
