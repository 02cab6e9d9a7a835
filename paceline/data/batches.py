"""Batches as nested structures: how many rows one has, and some of its rows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from paceline.errors import DataError

ADVICE = "give the rows as tensors in dicts, lists, tuples, named tuples or dataclasses"


def rows(batch: Any, *, missing: int | None = None) -> int:
    """Return the size of dim 0 that all tensors of `batch` share; if there is none, `missing`. Raises `DataError` without that."""
    sizes = {leaf.shape[0] for leaf in _leaves(batch) if leaf.ndim > 0}
    if len(sizes) != 1:
        if missing is not None:
            return missing
        said = "no tensor with rows" if not sizes else f"tensors of {sorted(sizes)} rows"
        raise DataError(f"a batch has {said} in it, and can't be cut along dim 0: {ADVICE}, all with the same number of rows")
    return int(sizes.pop())


def cut(batch: Any, start: int, stop: int, count: int) -> Any:
    """Return rows `start` to `stop` of a batch of `count` rows.

    Tensors, arrays, lists of `count` plain values and tuples of `count` strings are cut; all else is kept."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor | np.ndarray):
            return value[start:stop] if value.ndim > 0 and value.shape[0] == count else value
        return value[start:stop] if _is_column(value) and len(value) == count else value

    return _mapped(batch, leaf)


def _is_column(value: Any) -> bool:
    """Whether these are values of one kind, by row: lists are, and tuples of strings, as torch's own collate function makes them."""
    plain = (str, bytes, int, float, bool, type(None)) if type(value) is list else (str, bytes)
    return type(value) in (list, tuple) and all(isinstance(item, plain) for item in value)


def attributes(batch: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of a class of the user's; None where it is not one."""
    if isinstance(batch, str | bytes | type) or not hasattr(batch, "__dict__"):
        return None
    return {name: value for name, value in vars(batch).items() if not callable(value)}


def _mapped(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Tensor | np.ndarray) or _is_column(batch):
        return leaf(batch)
    if type(batch) is dict:
        return {key: _mapped(value, leaf) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, leaf) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(value, leaf) for value in batch)
    fields = attributes(batch)
    if fields is not None:
        other = copy.copy(batch)
        for name, value in fields.items():
            object.__setattr__(other, name, _mapped(value, leaf))
        return other
    if isinstance(batch, Mapping) or dataclasses.is_dataclass(batch):
        raise DataError(f"a batch holds a {type(batch).__qualname__}, which can't be cut: {ADVICE}")
    return batch


def _leaves(batch: Any) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    if isinstance(batch, Tensor | np.ndarray):
        yield batch
        return
    inner = (
        batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else (attributes(batch) or {}).values()
    )
    for value in inner:
        yield from _leaves(value)
