"""Checksums of tensors: a 64-bit number in which any flipped bit shows, at a few times the cost of
reading the memory.

    words    x0 x1 x2 ... x2047 | x2048 ...    the bytes in order, eight to a word, with zeros at
                                               the end
    mixed    y = x ^ (x >>> 32)                so that the upper bits count twice: alone they would
                                               fall out of a sum modulo 2**64
    rows     sum of w y modulo 2**64           each place in a row has an odd weight of its own
    again    over the rows, with other weights, until one number is left

Each line is one-to-one in each single word (an odd number can be divided by modulo 2**64), so a
change of one word shows for certain; any other change, such as two blocks that have changed places,
goes unnoticed once in about 2**33 cases at worst, in 2**64 mostly.

On one core of a Xeon 400 microseconds per MB, from memory (250 from the cache), where SHA-256 takes
700; and 30 microseconds per tensor, 3 for those of less than 16 KB.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

ROW: Final = 2048  # words
# rows at once: what is mixed stays in a core's cache, or takes 16 MB of a GPU's memory
PIECE, PIECE_ON_GPU = 32, 1024


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Compute the number of each tensor: equal where all bits are, whatever the strides and the
    device; dtype and shape are not part of it.

    Dense tensors of any dtype. What is on a device comes to the host in one copy. Small ones that
    are alike are summed up together.
    """
    by_device: dict[torch.device, dict[Any, list[int]]] = {}
    for place, tensor in enumerate(tensors):
        alike = (tensor.dtype, tensor.shape) if 0 < tensor.nbytes <= 8 * ROW else place
        by_device.setdefault(tensor.device, {}).setdefault(alike, []).append(place)
    sums = [0] * len(tensors)
    for device, groups in by_device.items():
        most = max(tensors[places[0]].nbytes * len(places) for places in groups.values())
        rows = min(PIECE if device.type == "cpu" else PIECE_ON_GPU, 1 + most // (8 * ROW))
        room = torch.empty(rows * ROW, dtype=torch.int64, device=device)
        numbers = [
            _together([tensors[place] for place in places], room)
            if isinstance(alike, tuple)
            else _number(tensors[alike], room)
            for alike, places in groups.items()
        ]
        order = [place for places in groups.values() for place in places]
        for place, number in zip(order, torch.cat(numbers).tolist(), strict=True):
            sums[place] = number
    return sums


def flat(x: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in order, 1-D uint8, on its device; not copied if they
    lie so already.
    """
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    # a view keeps the stride of a single element, whatever it is
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _together(tensors: Sequence[Tensor], room: Tensor) -> Tensor:
    """Sum up tensors of one dtype and shape, none of more than a row: one int64 of each on their
    device; `room` is for mixed words.
    """
    width, sums = -(-tensors[0].nbytes // 8), []
    for start in range(0, len(tensors), room.numel() // width):
        some = torch.stack(
            [tensor.detach() for tensor in tensors[start : start + room.numel() // width]]
        )
        data = flat(some).view(len(some), -1)
        rows = nn.functional.pad(data, (0, 8 * width - data.shape[1])).view(torch.int64)
        sums.append(
            weighted(
                _mixed(rows, room[: rows.numel()].view(rows.shape)),
                _weights(0, rows.device)[:width],
            )
        )
    return torch.cat(sums)


def _number(x: Tensor, room: Tensor) -> Tensor:
    """Sum up one large tensor, or an empty one."""
    data = flat(x)
    whole = data.numel() // 8 * 8
    head, rest = data[:whole], data[whole:]
    if head.storage_offset() % 8:
        head = head.clone()  # torch views words where they are aligned only
    words, last = head.view(torch.int64), head.new_empty(0, dtype=torch.int64)
    if rest.numel():
        last = torch.cat([rest, rest.new_zeros(8 - rest.numel())]).view(torch.int64)
    level = 0
    rows = _rows(words, last, level, room)
    while rows.numel() > 1:
        level += 1
        rows = _rows(rows, rows[:0], level, room)
    return rows if rows.numel() else rows.new_zeros(1)


def _rows(words: Tensor, last: Tensor, level: int, room: Tensor) -> Tensor:
    """Compute the weighted sum of each row; `last` are words behind the others."""
    weights, step = _weights(level, words.device), room.numel()
    whole = words.numel() // ROW * ROW
    pieces = [
        words[start : min(start + step, whole)].view(-1, ROW) for start in range(0, whole, step)
    ]
    rest = words[whole:]
    if last.numel():
        rest = torch.cat([rest, last])
    if rest.numel():
        pieces.append(rest.view(1, -1))
    sums = [
        weighted(_mixed(piece, room[: piece.numel()].view(piece.shape)), weights[: piece.shape[1]])
        for piece in pieces
    ]
    return torch.cat(sums) if sums else words


def _mixed(words: Tensor, room: Tensor) -> Tensor:
    """Compute x ^ (x >>> 32), into `room`; torch shifts the sign in, which is masked."""
    torch.bitwise_right_shift(words, 32, out=room)
    return room.bitwise_and_(0xFFFFFFFF).bitwise_xor_(words)


def weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Multiply a matrix with a vector, modulo 2**64; CUDA has no such product for integers."""
    return torch.mv(rows, weights) if rows.device.type == "cpu" else elementwise(rows, weights)


def elementwise(rows: Tensor, weights: Tensor) -> Tensor:
    """Multiply a matrix with a vector element by element, on any device; slower on processors."""
    return (rows * weights).sum(1)


@lru_cache(maxsize=64)
def _weights(level: int, device: torch.device) -> Tensor:
    """Make odd numbers by SplitMix64 (Steele, Lea, Flood 2014), the same on all machines and for
    all time.
    """
    z = (np.arange(1, ROW + 1, dtype=np.uint64) + np.uint64(level * ROW)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)
