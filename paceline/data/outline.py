"""Outlines data sets, so that workers can tell whether all of them have the same data.

It is made without reading a sample: from lengths, indices of a Subset, and names of files. Hosts
may keep the same files in different folders, so only the last part of a path counts.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Sequence
from operator import itemgetter
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

LISTED: Final = 1_000_000  # longest list of indices that is read completely
NAMED: Final = 100_000  # longest list of names that is read completely
SAMPLED: Final = 65_536  # entries read from a longer list, about, at even distances
LETTERS: Final = 255  # letters read from the end of a name
PARTS: Final = 16  # data sets read from a combined one
ENTRIES: Final = 64  # most entries of an outline, which is sent at each epoch
DEPTH: Final = 6  # most levels of data sets inside data sets
FILE: Final = re.compile(r"[^.\s].*\.\w{1,8}", re.DOTALL)
WORD: Final = re.compile(r"\S+")


class Entry(NamedTuple):
    """Checksums of one list of a data set, or its length."""

    contents: int  # of the entries; for names, in any order
    order: int  # of the entries in their order
    decides: bool  # data sets with other contents are different data sets


Outline = dict[str, Entry]  # by expressions, such as `loader.dataset.indices`


def outline_dataset(dataset: Any) -> Outline:
    """Outline a data set by its attributes, without those that may differ between workers."""
    outline: Outline = {}
    _outline_part(dataset, "loader.dataset", outline, set(), DEPTH)
    return outline


def describe_difference(outlines: Sequence[dict[str, Sequence[Any]]]) -> str | None:
    """Describe the first difference between the data sets of workers; None if there is none.

    `outlines` are in rank order. The result is the same on all workers.
    """
    # The first rank that has an entry is the one that others are compared with.
    first: dict[str, tuple[int, Entry]] = {}
    for rank, outline in enumerate(outlines):
        for name, (contents, order, decides) in outline.items():
            other, entry = first.setdefault(name, (rank, Entry(contents, order, decides)))
            if (contents, order) == entry[:2]:
                continue
            if contents == entry.contents:
                return (
                    f"{name} has the same names in another order on "
                    f"rank {rank} than on rank {other}"
                )
            if decides and entry.decides and name.startswith("len("):
                return f"{name} is {contents} on rank {rank} and {entry.contents} on rank {other}"
            if decides and entry.decides:
                return f"{name} has other entries on rank {rank} than on rank {other}"
    return None


def _outline_part(data: Any, path: str, outline: Outline, seen: set[int], depth: int) -> None:
    if id(data) in seen or isinstance(data, IterableDataset):
        return
    seen.add(id(data))
    count = _try_length(data)
    _add_entry(f"len({path})", None if count is None else Entry(count, count, True), outline)
    if isinstance(data, list | tuple):
        _add_entry(path, _outline_names(data, of_samples=True), outline)
        return
    for name, value in list(getattr(data, "__dict__", {}).items()):
        where = f"{path}.{name}"
        # Data sets inside this one: parts of a combined one, a Subset's, a wrapped one of the same
        # length. Other attributes count if they are lists.
        if isinstance(data, ConcatDataset | StackDataset) and name == "datasets":
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            for key, part in list(parts)[:PARTS] if depth else []:
                _outline_part(part, f"{where}[{key!r}]", outline, seen, depth - 1)
        elif isinstance(data, Subset) and name == "dataset":
            if depth:
                _outline_part(value, where, outline, seen, depth - 1)
        elif isinstance(value, Dataset):
            if (
                depth
                and not isinstance(value, IterableDataset)
                and count is not None
                and _try_length(value) == count
            ):
                _outline_part(value, where, outline, seen, depth - 1)
        elif id(value) not in seen and isinstance(
            value, list | tuple | range | np.ndarray | Tensor
        ):
            seen.add(id(value))
            _add_entry(where, _outline_attribute(name, value, count, data), outline)


def _add_entry(where: str, entry: Entry | None, outline: Outline) -> None:
    if entry is not None and len(outline) < ENTRIES:
        outline[where] = entry


def _outline_attribute(name: str, values: Any, count: int | None, data: Any) -> Entry | None:
    """Outline an attribute that identifies a data set's samples; None for other attributes."""
    if isinstance(values, np.ndarray | Tensor) and values.ndim != 1:
        return None
    of_samples = len(values) == count
    if (name == "indices" and (of_samples or isinstance(data, Subset))) or (
        name == "cumulative_sizes" and isinstance(data, ConcatDataset)
    ):
        entry = _outline_numbers(values)
        if entry is not None:
            return entry
    if isinstance(values, np.ndarray):
        values = values.tolist() if values.dtype.kind == "U" else []
    return (
        _outline_names(values, of_samples=of_samples) if isinstance(values, list | tuple) else None
    )


def _outline_numbers(values: Any) -> Entry | None:
    part = _sample_entries(values, LISTED)
    try:
        if isinstance(part, range):
            numbers = np.arange(part.start, part.stop, part.step)
        elif isinstance(part, list | tuple):
            numbers = np.frombuffer(array("q", part), np.int64)
        else:
            numbers = np.asarray(part.detach().cpu() if isinstance(part, Tensor) else part)
    except (TypeError, OverflowError):
        # These are no indices.
        return None
    if numbers.dtype.kind not in "iu":
        return None
    order = zlib.crc32(numbers.astype(np.int64, copy=False).tobytes(), len(values))
    return Entry(order, order, True)


def _outline_names(values: Sequence[Any], *, of_samples: bool) -> Entry | None:
    part = _sample_entries(values, NAMED)
    rows = _path_names(part) or _name_rows(part)
    if rows is None:
        return None
    # About 256 rows show whether these are names of files.
    sampled_names = [row.partition("\t")[0] for row in rows[:: len(rows) // 256 + 1]]
    files = all(map(FILE.fullmatch, sampled_names))
    if not (files or of_samples):
        return None
    codes = np.fromiter(
        (zlib.crc32(row.encode("utf-8", "surrogatepass")) for row in rows), np.uint32, len(rows)
    )
    # Strings that repeat often are classes or splits, and not names of samples.
    distinct = 2 * len(np.unique(codes)) > len(codes)
    decides = of_samples and distinct and (files or all(map(WORD.fullmatch, sampled_names)))
    return Entry(
        zlib.crc32(np.sort(codes).tobytes(), len(values)),
        zlib.crc32(codes.tobytes(), len(values)),
        decides,
    )


def _name_rows(values: Sequence[Any]) -> list[str] | None:
    """Join rows that begin with a name, such as the (file, class) of an ImageFolder.

    None for other lists.
    """
    if not values or not all(issubclass(kind, list | tuple) for kind in set(map(type, values))):
        return None
    widths = set(map(len, values))
    if widths not in ({1}, {2}, {3}, {4}) or not isinstance(values[0][0], str | PurePath):
        return None
    columns: list[list[str]] = []
    for position in range(widths.pop()):
        column = list(map(itemgetter(position), values))
        try:
            columns.append(_path_names(column) or list(map(str, array("q", column))))
        except (TypeError, OverflowError):
            # Neither names nor numbers.
            return None
    return ["\t".join(row) for row in zip(*columns, strict=True)]


def _path_names(values: Sequence[Any]) -> list[str] | None:
    """Last parts of paths; None if these aren't strings or paths."""
    kinds = set(map(type, values))
    if kinds and all(issubclass(kind, str) for kind in kinds):
        return [value[-LETTERS:].rpartition("/")[2] for value in values]
    if kinds and all(issubclass(kind, str | PurePath) for kind in kinds):
        return [str(value)[-LETTERS:].rpartition("/")[2] for value in values]
    return None


def _sample_entries(values: Any, most: int) -> Any:
    """Select all entries, or some at even distances if there are more than `most`."""
    return values if len(values) <= most else values[:: -(-len(values) // SAMPLED)]


def _try_length(data: Any) -> int | None:
    try:
        return len(data)
    except Exception:  # noqa: BLE001  a script's data set may raise anything
        return None
