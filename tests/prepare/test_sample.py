"""Samples for measuring are read without drawing anything."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline.prepare.sample import sample_batch


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3), index


def test_a_part_of_a_global_batch_is_read() -> None:
    x, more, y = torch.arange(40.0).view(20, 2), torch.arange(20), torch.zeros(20)
    loader = DataLoader(TensorDataset(x, more, y), batch_size=12, shuffle=True)
    assert [part.tolist() for part in sample_batch([loader], 4)] == [
        x[:3].tolist(),
        more[:3].tolist(),
        [0.0] * 3,
    ]
    assert len(sample_batch([loader], 100)[0]) == 1


def test_nothing_is_drawn() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    sample_batch([DataLoader(Noisy(), batch_size=4)], 1)
    assert torch.equal(torch.rand(2), wanted)
