"""Takes a few samples from a loader, to measure a model's layers before the loader is dealt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import UsageError
from paceline.parallel.initialise import preserve_randomness

INSTEAD = "say split=[layers of each stage], or split='even'"


def sample_batch(loaders: Sequence[DataLoader[Any]], parts: int) -> tuple[Any, ...]:
    """Collate a batch from the first samples of the first loader. Draws no random numbers.

    Args:
        loaders: Loaders of the script.
        parts: The batch has 1/parts of a global batch's samples, and at least one.

    Returns:
        Inputs and target.

    Raises:
        UsageError: There is no loader, its data set has no indices, or its batch isn't a tuple or
            list that ends with the target.
    """
    if not loaders:
        raise UsageError(
            "split='auto' measures layers on samples of a loader: give one to the same prepare, "
            f"or {INSTEAD}"
        )
    loader = loaders[0]
    if (
        isinstance(loader.dataset, IterableDataset)
        or not hasattr(loader.dataset, "__len__")
        or loader.batch_size is None
    ):
        raise UsageError(
            "split='auto' measures layers on samples of a data set with indices, and this loader "
            f"has none: {INSTEAD}"
        )
    dataset: Any = loader.dataset
    # Reading samples may draw random numbers, as for augmentation. Training must draw the same.
    with preserve_randomness():
        batch = loader.collate_fn(
            [
                dataset[index]
                for index in range(min(len(dataset), max(1, loader.batch_size // parts)))
            ]
        )
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise UsageError(
            "split='auto' needs a loader that gives (inputs, target), and this one gives a "
            f"{type(batch).__qualname__}: {INSTEAD}"
        )
    return tuple(batch)
