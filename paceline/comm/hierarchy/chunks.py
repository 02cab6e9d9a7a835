"""The chunks of a tensor that follow each other through the stages of an exchange over hosts."""

from __future__ import annotations

from itertools import pairwise

# elements that go through the stages together, at most: a bucket of 8 MB is one, as every chunk
# costs some waits
WIDTH = 2 << 20


def cut(numel: int) -> list[tuple[int, int]]:
    """Cut into (start, stop) of as few chunks as WIDTH allows, whose lengths differ by one
    element at most.
    """
    count = -(-numel // WIDTH)
    edges = [numel * at // count for at in range(count + 1)] if count else []
    return list(pairwise(edges))
