"""Tells which tensors of a batch a script still holds after the batch's turn."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

LentTensors = list["weakref.ReferenceType[Any]"]
_ROWS = (Tensor, np.ndarray)
_ITEMS = (list, tuple)


def track_batch(batch: Any) -> LentTensors:
    """Make weak references to the tensors and arrays of a batch that only a caller's list holds.

    Tensors that the data set also keeps are left out.
    """
    # A count above the measured one means that something else holds the batch too, so that it
    # would seem to be held by the script for ever.
    references: LentTensors = []
    if sys.getrefcount(batch) <= _BATCH_REFERENCES:
        _collect_references(batch, references, _TENSOR_REFERENCES)
    return references


def is_alive(batch: LentTensors) -> bool:
    """Whether a tensor of the batch is still held."""
    # This runs in each turn, and a generator costs more than the loop.
    for reference in batch:  # noqa: SIM110
        if reference() is not None:
            return True
    return False


def held_addresses(batch: LentTensors) -> set[int]:
    """Addresses of the batch's tensors that are still held."""
    return set(
        storage_addresses(
            value for value in (reference() for reference in batch) if isinstance(value, Tensor)
        )
    )


def storage_addresses(values: Iterable[Any]) -> Iterator[int]:
    """Yield the addresses of tensors among these values, also inside dicts, lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            # Private: breaks if torch no longer tells tensors without storage (those of vmap).
            if value.layout is torch.strided and value.numel() and torch._C._has_storage(value):
                yield value.untyped_storage().data_ptr()
        elif isinstance(value, Mapping):
            yield from storage_addresses(value.values())
        elif isinstance(value, list | tuple):
            yield from storage_addresses(value)


def _collect_references(value: Any, references: LentTensors, most: int) -> None:
    """Collect references to the values that have at most `most` references of their own."""
    if isinstance(value, _ROWS):
        if sys.getrefcount(value) <= most:
            references.append(weakref.ref(value))
    elif isinstance(value, _ITEMS):
        for part in value:
            _collect_references(part, references, most)
    elif isinstance(value, Mapping):
        for part in value.values():
            _collect_references(part, references, most)
    elif hasattr(value, "__dict__"):
        _collect_references(vars(value), references, most)


def _count_list_references() -> tuple[int, int]:
    """Count the references to a batch that only a list holds, and to a tensor in it.

    Measured with calls like those of `track_batch` and `_collect_references`, as the count depends
    on the version of Python.
    """
    counts: list[int] = []

    def count(value: Any) -> None:
        counts.append(sys.getrefcount(value))

    def walk(batch: list[Tensor]) -> None:
        counts.append(sys.getrefcount(batch))
        for part in batch:
            count(part)

    batches = [[torch.empty(0)]]
    walk(batches[0])
    return counts[0], counts[1]


_BATCH_REFERENCES, _TENSOR_REFERENCES = _count_list_references()
