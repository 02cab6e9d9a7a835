"""A sampler that deals what is left of an epoch again when the ranks change."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from paceline.bridges.horovod.common.basics import rank, size


class ElasticSampler(Sampler[int]):
    """Deals the indices of a data set to ranks, and remembers how many have been used.

    Args:
        dataset: The data set. Its length stays the same.
        shuffle: Whether each epoch has another order. Default: True.
        seed: Seed of the order, equal on all ranks. Default: 0.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. Call it at the end of the one before."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch as used, on all ranks."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of `state_dict`, and deal again."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the indices that are not used yet to the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        indices = [*range(len(self.dataset))]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # all ranks get the same number: some indices are dealt twice, as in Horovod
        missing = self.total_size - len(self.remaining_indices)
        padded = [*self.remaining_indices, *self.remaining_indices[:missing]]
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
