"""Cuts a tensor into chunks that follow each other through the stages of an exchange over hosts."""

from __future__ import annotations

from itertools import pairwise

WIDTH = 2 << 20  # most elements of a chunk: 8 MB of float32, as each chunk costs some waits


def cut_chunks(numel: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into the (start, stop) of as few chunks as WIDTH allows.

    Their lengths differ by one element at most.
    """
    count = -(-numel // WIDTH)
    edges = [numel * at // count for at in range(count + 1)] if count else []
    return list(pairwise(edges))
