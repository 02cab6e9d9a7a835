"""Groups the batches of all processes into global batches, from any position on.

per process: 2 samples     0 1 | 2 3 | 4 5 | 6 7 | 8
2 processes                0 1   2 3 | 4 5   6 7 | 8            global batches, which are dealt
3 processes, offset 4                | 4 5   6 7   8
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset


class GlobalBatches(BatchSampler):
    """A batch sampler that gives the batches of all processes as one.

    Attributes:
        offset: Units that are left out at the start of an epoch. A unit is a sample, or a batch if
            the script's loader has a batch sampler of its own.
        group: Units in a global batch.

    Args:
        loader: The script's loader.
        processes: Number of its batches in a global batch.
    """

    def __init__(self, loader: DataLoader[Any], processes: int) -> None:
        given: Any = loader.batch_sampler
        plain = type(given) is BatchSampler
        self.sampler: Any = given.sampler if plain else given
        self.drop_last = loader.drop_last
        self.offset = 0
        self._of_samples = plain
        self.group = processes * (given.batch_size if plain else 1)

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Units in a global batch."""
        return self.group

    def __iter__(self) -> Iterator[list[Any]]:
        units: Iterator[Any] = islice(iter(self.sampler), self.offset, None)
        while batch := list(islice(units, self.group)):
            if self.drop_last and len(batch) < self.group:
                return
            yield batch if self._of_samples else list(chain.from_iterable(batch))

    def __len__(self) -> int:
        return self.count_batches(self.offset)

    def count_batches(self, offset: int) -> int:
        """Count the global batches from this unit to the end of an epoch."""
        left = max(0, len(self.sampler) - offset) / self.group
        return math.floor(left) if self.drop_last else math.ceil(left)

    def begin_at(self, offset: int) -> None:
        """Leave out the units before this one, until another one is set."""
        self.offset = offset

    def replace_sampler(self, sampler: Any) -> None:
        """Take units from another sampler."""
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Tell the script's samplers the number of the epoch."""
        samplers: tuple[Any, ...] = (self.sampler, getattr(self.sampler, "sampler", None))
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


def make_global_loader(loader: DataLoader[Any], processes: int) -> DataLoader[Any]:
    """Make a loader of global batches with the options of a script's loader.

    Args:
        loader: The script's loader.
        processes: Number of its batches in a global batch; 1 if its batches are global already.
    """
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
            *("multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order"),
        )
    }
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        size = None if loader.batch_size is None else loader.batch_size * processes
        return DataLoader(loader.dataset, size, drop_last=loader.drop_last, **options)
    return DataLoader(loader.dataset, batch_sampler=GlobalBatches(loader, processes), **options)
