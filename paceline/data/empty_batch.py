"""A batch without rows, derived from a collate function's batches of one sample and of two.

    one sample     {"image": [1, 3, 8], "boxes": [[4, 4]],         "name": ("a",),     "n": 1}
    twice          {"image": [2, 3, 8], "boxes": [[4, 4], [4, 4]], "name": ("a", "a"), "n": 2}
    no rows        {"image": [0, 3, 8], "boxes": [],               "name": (),         "n": 0}

A value such as "anchors": [9, 4] doesn't grow with the samples, so it stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from paceline.data.batches import ADVICE, attributes
from paceline.errors import DataError

Collate = Callable[[Any], Any]
PLAIN = (str, bytes, int, float, complex, bool, type(None))


def emptied(one: Any, two: Any, *, surely: bool = True) -> Any:
    """Remove all rows from `one`, a batch of one sample; `two` is a batch of twice that sample.

    Values that grow between the two have rows. Raises `DataError` for values that have changed
    otherwise, naming their type, and if nothing has grown; without `surely`, that returns `one`.
    """
    emptier = _Emptier()
    try:
        empty = emptier.walk(one, two)
        if not emptier.grown:
            raise _unable(one)
    except DataError:
        if surely:
            raise
        return one
    return empty


def collated_empty(collate: Collate, sample: Any, *, surely: bool = True) -> Any:
    """Derive the batch that `collate` would make of no samples, from copies of this sample.

    Copies are used because `collate` may change its samples.
    """
    return emptied(
        collate([copy.copy(sample)]), collate([copy.copy(sample), copy.copy(sample)]), surely=surely
    )


def _unable(value: Any) -> DataError:
    return DataError(
        "a worker has an empty share of an evaluation batch, and a batch of no rows can't be made "
        f"of a {type(value).__qualname__}: "
        f"{ADVICE}; let every batch have at least one sample per worker; "
        "or say prepare(..., pad=True), and such a worker gets the first sample of the batch"
    )


class _Emptier:
    def __init__(self) -> None:
        self.grown = 0  # how many tensors and lists have rows

    def walk(self, one: Any, two: Any) -> Any:
        if type(one) is not type(two) or isinstance(one, PackedSequence | set):
            raise _unable(one)
        if isinstance(one, Tensor | np.ndarray):
            return self._tensor(one, two)
        if isinstance(one, dict):
            return self._mapping(one, two)
        if isinstance(one, list | tuple):
            return self._items(one, two)
        if isinstance(one, PLAIN) or one is two:
            return _plain(one, two)
        return self._object(one, two)

    def _tensor(self, one: Any, two: Any) -> Any:
        if isinstance(one, Tensor) and (one.is_nested or one.layout is not torch.strided):
            raise _unable(one)
        differ = [
            dim for dim, (a, b) in enumerate(zip(one.shape, two.shape, strict=False)) if a != b
        ]
        if one.ndim != two.ndim or len(differ) > 1:
            raise _unable(one)
        if not differ:
            return _same(one, two)
        dim = differ[0]
        return one[(slice(None),) * dim + (slice(self._left(one, one.shape[dim], two.shape[dim])),)]

    def _left(self, value: Any, one: int, two: int) -> int:
        """Length without rows: rows leave nothing, and edges between rows leave one."""
        left = 2 * one - two
        if left < 0:
            raise _unable(value)
        self.grown += 1
        return left

    def _mapping(self, one: dict[Any, Any], two: dict[Any, Any]) -> Any:
        if one.keys() != two.keys():
            raise _unable(one)
        other = copy.copy(one)
        other.update({key: self.walk(value, two[key]) for key, value in one.items()})
        return other

    def _items(self, one: Sequence[Any], two: Sequence[Any]) -> Any:
        kind: Any = type(one)
        if len(one) != len(two):
            return kind(one[: self._left(one, len(one), len(two))])
        inner = [self.walk(a, b) for a, b in zip(one, two, strict=True)]
        return kind(*inner) if hasattr(one, "_fields") else kind(inner)

    def _object(self, one: Any, two: Any) -> Any:
        mine, others = attributes(one), attributes(two)
        if mine is None or others is None or mine.keys() != others.keys():
            if mine is None and bool(one == two):
                return one
            raise _unable(one)
        other = copy.copy(one)
        for name, value in mine.items():
            object.__setattr__(other, name, self.walk(value, others[name]))
        return other


def _same(one: Any, two: Any) -> Any:
    """Keep a value that is no row, if it is the same for one sample and two."""
    a, b = torch.as_tensor(one), torch.as_tensor(two)
    if a.dtype != b.dtype or not torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True):
        raise _unable(one)
    return one


def _plain(one: Any, two: Any) -> Any:
    if one == two or repr(one) == repr(two):  # a NaN doesn't equal itself
        return one
    if type(one) in (int, float):
        return 2 * one - two  # a count, or a sum over samples
    raise _unable(one)
