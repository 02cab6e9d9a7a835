from __future__ import annotations

import random

import torch

from paceline.comm.shm.window_messages import _cut_stretch, flatten_values, is_plain


def test_stretches_are_cut_at_windows() -> None:
    dice = random.Random(3)
    for _ in range(50):
        width, at, nbytes = dice.randrange(1, 40), dice.randrange(100), dice.randrange(200)
        stretches = list(_cut_stretch(width, 7, at, 1000, nbytes))
        covered = [
            (s.window * width + s.offset + i, s.address + i)
            for s in stretches
            for i in range(s.nbytes)
        ]
        assert covered == [(at + i, 1000 + i) for i in range(nbytes)]
        assert all(
            s.rank == 7 and s.offset >= 0 and s.offset + s.nbytes <= width and s.nbytes
            for s in stretches
        )


def test_flat_gives_values_not_bytes() -> None:
    x = torch.tensor([[1 + 2j, 3 - 1j], [5j, -6]])
    assert is_plain(x) and flatten_values(x).data_ptr() == x.data_ptr()
    for y in (x.conj(), x.t(), x.conj().t(), x.imag, x.conj().imag, x[:, 1], x[0, 0], x[:0]):
        assert torch.equal(
            flatten_values(y), y.clone().resolve_conj().resolve_neg().reshape(-1)
        ) and is_plain(flatten_values(y))
    assert (
        not is_plain(x.conj())
        and not is_plain(x.t())
        and not is_plain(torch.zeros(3).to(torch.complex64).conj().imag)
    )
