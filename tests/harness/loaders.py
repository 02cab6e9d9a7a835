"""Loaders dealt to threads, and what each rank saw."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.comm.agreement import Agreement
from paceline.data.loader import Turn, deal_loader
from tests.harness.thread_groups import spawn


class Numbers(Dataset):
    """`count` samples; a sample is its index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(int(index))


Seen = list[tuple[Turn, list[int]]]


def walk(loader, epochs=1, ids=torch.Tensor.tolist) -> list[Seen]:
    """What each epoch gave: the turn, and the ids of the batch."""
    return [[(replace(loader.turn), ids(batch)) for batch in loader] for _ in range(epochs)]


def run(size, make, epochs=1, ids=torch.Tensor.tolist, **options) -> list[list[Seen]]:
    """`walk` on `size` threads; `make()` gives each its own DataLoader."""

    def body(group):
        kinds = {
            key: value(group.rank) if key == "say" else value for key, value in options.items()
        }
        return walk(deal_loader(make(), Agreement(group), **kinds), epochs, ids)

    return spawn(size, body)


def steps(ranks: list[list[Seen]], epoch: int = 0) -> list[list[int]]:
    """The ids of each global batch, in rank order, ghosts left out."""
    merged: list[list[int]] = []
    count = len(ranks[0][epoch])
    assert all(len(rank[epoch]) == count for rank in ranks)
    for turn in range(count):
        parts = [rank[epoch][turn] for rank in ranks]
        assert len({(at.index, at.global_batch, at.total) for at, _ in parts}) == 1
        for at, ids in parts:
            assert len(ids) == (at.share if not at.ghost or not at.train else 1)
        merged.append([one for at, ids in parts for one in (ids if at.share else [])])
    return merged


def plain(loader: DataLoader, epochs: int = 1, ids=torch.Tensor.tolist) -> list[list[list[int]]]:
    """What a plain DataLoader gives."""
    return [[ids(batch) for batch in loader] for _ in range(epochs)]
