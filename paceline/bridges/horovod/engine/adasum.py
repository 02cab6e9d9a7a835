"""Adasum: a sum of gradients that is a mean for parallel ones and a sum for orthogonal ones.

    ranks 0   1   2   3
          +---+   +---+         round 1: each pair exchanges and combines its vectors
          +-------+             round 2: each pair of pairs
              +-------+

Maleki and others, "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.group_protocol import Group


def reduce_adasum(group: Group, x: Tensor) -> Tensor:
    """Reduce `x` over all ranks of `group`, whose number is a power of two. Collective."""
    total = x.detach().clone()
    distance = 1
    while distance < group.size:
        other_rank = group.rank ^ distance
        other = torch.empty_like(total)
        group.exchange([(other_rank, total)], [(other_rank, other)], tag=distance).wait()
        # both ranks of a pair combine in the same order, so that they get the same bits
        pair = (total, other) if group.rank < other_rank else (other, total)
        total = combine_pair(*pair)
        distance *= 2
    return total


def combine_pair(a: Tensor, b: Tensor) -> Tensor:
    """Combine two vectors: (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b."""
    wide_a, wide_b = a.double(), b.double()
    dot = torch.sum(wide_a * wide_b)
    # a vector of zeros adds nothing, and its factor must not be NaN
    square_a = torch.sum(wide_a * wide_a).clamp_min(1e-300)
    square_b = torch.sum(wide_b * wide_b).clamp_min(1e-300)
    combined = (1 - dot / (2 * square_a)) * wide_a + (1 - dot / (2 * square_b)) * wide_b
    return combined.to(a.dtype)
