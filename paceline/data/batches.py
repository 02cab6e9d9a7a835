"""Batches as nested structures: counting rows, cutting rows out, and counting labels."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError

IGNORED_LABEL = -100  # default `ignore_index` of torch's losses
ADVICE = "give the rows as tensors in dicts, lists, tuples, named tuples or dataclasses"


def count_rows(batch: Any, *, missing: int | None = None) -> int:
    """Count the rows of a batch: the size of dim 0 that all its tensors share.

    Args:
        batch: The batch.
        missing: Result if there is no such size. Default: raises `DataError`.
    """
    sizes = {leaf.shape[0] for leaf in _walk_leaves(batch) if leaf.ndim > 0}
    if len(sizes) != 1:
        if missing is not None:
            return missing
        contents = "no tensor with rows" if not sizes else f"tensors of {sorted(sizes)} rows"
        raise DataError(
            f"a batch has {contents} in it, and can't be cut along dim 0: {ADVICE}, all with the "
            "same number of rows"
        )
    return int(sizes.pop())


def cut_rows(batch: Any, start: int, stop: int, count: int) -> Any:
    """Cut rows `start` to `stop` out of a batch of `count` rows.

    Tensors, arrays, lists of `count` plain values and tuples of `count` strings are cut. Other
    values are kept as they are.
    """

    # A value of another length has no row per sample, so each worker gets all of it.
    def cut_leaf(value: Any) -> Any:
        if isinstance(value, Tensor | np.ndarray):
            return value[start:stop] if value.ndim > 0 and value.shape[0] == count else value
        return value[start:stop] if _is_column(value) and len(value) == count else value

    return _map_leaves(batch, cut_leaf)


def _is_column(value: Any) -> bool:
    """Whether a list or tuple has one plain value per row.

    Torch's collate function makes such tuples of strings only.
    """
    plain = (str, bytes, int, float, bool, type(None)) if type(value) is list else (str, bytes)
    return type(value) in (list, tuple) and all(isinstance(item, plain) for item in value)


def attributes_of(batch: Any) -> dict[str, Any] | None:
    """Attributes of an object of a script's own class; None for other values."""
    if isinstance(batch, str | bytes | type) or not hasattr(batch, "__dict__"):
        return None
    return {name: value for name, value in vars(batch).items() if not callable(value)}


def tokens(
    key: str | int, *, ignore: int = -100, shift: bool | None = None
) -> Callable[[Any], float]:
    """Weight each batch by its number of labels, for a loss that is a mean over labels.

    >>> by_tokens = pl.tokens("labels")  # loader = run.prepare(loader, weigh=by_tokens)

    The loss of a padded language model is such a mean. If batches were weighted by samples, the
    result would depend on the number of workers.

    Args:
        key: Place of the labels in a batch: name of an item or attribute, or index in a tuple.
        ignore: Label that the loss leaves out (its `ignore_index`). Default: -100.
        shift: Whether the loss also leaves out the first label of each row, as it compares each
            output with the next label. None (default): it does if the labels equal the batch's
            `input_ids`, as for causal language models of transformers.

    Returns:
        A function for `weigh=` of `run.prepare`. It raises `DataError` for a batch without integer
        labels at `key`.
    """

    def weigh(batch: Any) -> float:
        parts = dict(_direct_items(batch))
        labels = parts[key] if key in parts else getattr(batch, str(key), None)
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            has = f"a {type(batch).__qualname__} with {', '.join(map(repr, parts)) or 'no parts'}"
            raise DataError(
                f"pl.tokens({key!r}) found no tensor of integers at {key!r} "
                f"in a batch, which is {has}: say at which name or place it has its labels"
            )
        counted, inputs = labels != ignore, parts.get("input_ids")
        # Causal language models of transformers get their input as labels, and shift them.
        shifted = shift
        if shifted is None and isinstance(inputs, Tensor) and inputs.shape == labels.shape:
            shifted = bool(((inputs == labels) | ~counted).all())
        return float((counted[..., 1:] if shifted else counted).sum())

    return weigh


def find_unevenly_ignored(batch: Any) -> Any | None:
    """Find labels with different numbers of ignored ones per sample. Returns their key, or None."""
    for key, value in _direct_items(batch):
        if (
            isinstance(value, Tensor)
            and value.dtype == torch.int64
            and value.ndim
            and value.numel()
        ):
            ignored = value == IGNORED_LABEL
            counts = ignored.reshape(len(value), -1).sum(1)
            # One sample alone doesn't show that all samples have as many.
            alike = len(counts) > 1 and bool((counts == counts[0]).all())
            if bool(counts.any()) and not alike and torch.equal(value < 0, ignored):
                return key
    return None


def _direct_items(batch: Any) -> Iterable[tuple[Any, Any]]:
    """Direct contents of a batch, each with its name or place."""
    if isinstance(batch, Mapping):
        return batch.items()
    return (
        enumerate(batch)
        if isinstance(batch, list | tuple)
        else (attributes_of(batch) or {}).items()
    )


def _map_leaves(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """Copy a batch, with the result of `leaf` in place of each tensor, array and column."""
    if isinstance(batch, Tensor | np.ndarray) or _is_column(batch):
        return leaf(batch)
    if type(batch) is dict:
        return {key: _map_leaves(value, leaf) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_leaves(value, leaf) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map_leaves(value, leaf) for value in batch)
    # Objects of a script's own class. Its `__setattr__` may refuse, as a frozen dataclass does.
    fields = attributes_of(batch)
    if fields is not None:
        other = copy.copy(batch)
        for name, value in fields.items():
            object.__setattr__(other, name, _map_leaves(value, leaf))
        return other
    if isinstance(batch, Mapping) or dataclasses.is_dataclass(batch):
        raise DataError(f"a batch holds a {type(batch).__qualname__}, which can't be cut: {ADVICE}")
    return batch


def _walk_leaves(batch: Any) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    if isinstance(batch, Tensor | np.ndarray):
        yield batch
        return
    inner = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, list | tuple)
        else (attributes_of(batch) or {}).values()
    )
    for value in inner:
        yield from _walk_leaves(value)
