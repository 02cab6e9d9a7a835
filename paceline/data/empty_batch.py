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

from paceline.data.batches import ADVICE, attributes_of
from paceline.errors import DataError

Collate = Callable[[Any], Any]
PLAIN = (str, bytes, int, float, complex, bool, type(None))


def empty_rows(one: Any, two: Any, *, surely: bool = True) -> Any:
    """Remove all rows from `one`, a batch of one sample; `two` is a batch of twice that sample.

    Values that grow between the two have rows. Raises `DataError` for values that have changed
    otherwise, naming their type, and if nothing has grown; without `surely`, that returns `one`.
    """
    emptier = _Emptier()
    try:
        empty = emptier.empty_value(one, two)
        if not emptier.grown:
            raise _make_error(one)
    except DataError:
        if surely:
            raise
        return one
    return empty


def collate_empty(collate: Collate, sample: Any, *, surely: bool = True) -> Any:
    """Derive the batch that `collate` would make of no samples, from copies of this sample.

    Copies are used because `collate` may change its samples.
    """
    return empty_rows(
        collate([copy.copy(sample)]), collate([copy.copy(sample), copy.copy(sample)]), surely=surely
    )


def _make_error(value: Any) -> DataError:
    return DataError(
        "a worker has an empty share of an evaluation batch, and a batch without rows can't be "
        f"made from a {type(value).__qualname__}: "
        f"{ADVICE}; let every batch have at least one sample per worker; "
        "or say prepare(..., pad=True), and such a worker gets the first sample of the batch"
    )


class _Emptier:
    """Removes the rows of a batch: recursion over `one` and `two`, side by side."""

    def __init__(self) -> None:
        self.grown = 0  # number of tensors and lists with rows

    def empty_value(self, one: Any, two: Any) -> Any:
        if type(one) is not type(two) or isinstance(one, PackedSequence | set):
            raise _make_error(one)
        if isinstance(one, Tensor | np.ndarray):
            return self._empty_tensor(one, two)
        if isinstance(one, dict):
            return self._empty_mapping(one, two)
        if isinstance(one, list | tuple):
            return self._empty_items(one, two)
        if isinstance(one, PLAIN) or one is two:
            return _empty_plain(one, two)
        return self._empty_object(one, two)

    def _empty_tensor(self, one: Any, two: Any) -> Any:
        if isinstance(one, Tensor) and (one.is_nested or one.layout is not torch.strided):
            raise _make_error(one)
        # The dim of the rows is the one that has grown.
        grown_dims = [
            dim for dim, (a, b) in enumerate(zip(one.shape, two.shape, strict=False)) if a != b
        ]
        if one.ndim != two.ndim or len(grown_dims) > 1:
            raise _make_error(one)
        if not grown_dims:
            return _keep_same(one, two)
        dim = grown_dims[0]
        return one[
            (slice(None),) * dim
            + (slice(self._length_without_rows(one, one.shape[dim], two.shape[dim])),)
        ]

    def _length_without_rows(self, value: Any, one: int, two: int) -> int:
        """Length without rows: 0, or 1 for the bounds between rows, which are one more."""
        length = 2 * one - two
        if length < 0:
            raise _make_error(value)
        self.grown += 1
        return length

    def _empty_mapping(self, one: dict[Any, Any], two: dict[Any, Any]) -> Any:
        if one.keys() != two.keys():
            raise _make_error(one)
        other = copy.copy(one)
        other.update({key: self.empty_value(value, two[key]) for key, value in one.items()})
        return other

    def _empty_items(self, one: Sequence[Any], two: Sequence[Any]) -> Any:
        kind: Any = type(one)
        if len(one) != len(two):
            return kind(one[: self._length_without_rows(one, len(one), len(two))])
        inner = [self.empty_value(a, b) for a, b in zip(one, two, strict=True)]
        return kind(*inner) if hasattr(one, "_fields") else kind(inner)

    def _empty_object(self, one: Any, two: Any) -> Any:
        fields, fields_of_two = attributes_of(one), attributes_of(two)
        if fields is None or fields_of_two is None or fields.keys() != fields_of_two.keys():
            if fields is None and bool(one == two):
                return one
            raise _make_error(one)
        # A frozen dataclass refuses the usual assignment.
        empty = copy.copy(one)
        for name, value in fields.items():
            object.__setattr__(empty, name, self.empty_value(value, fields_of_two[name]))
        return empty


def _keep_same(one: Any, two: Any) -> Any:
    """Keep a value that is no row, if it is the same for one sample and two."""
    a, b = torch.as_tensor(one), torch.as_tensor(two)
    if a.dtype != b.dtype or not torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True):
        raise _make_error(one)
    return one


def _empty_plain(one: Any, two: Any) -> Any:
    # A NaN doesn't equal itself, but its text does.
    if one == two or repr(one) == repr(two):
        return one
    # A count, or a sum over samples.
    if type(one) in (int, float):
        return 2 * one - two
    raise _make_error(one)
