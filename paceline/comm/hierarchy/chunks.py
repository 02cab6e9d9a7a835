"""The chunks of a tensor that follow each other through the stages of an exchange over hosts."""

from __future__ import annotations

from itertools import pairwise

NARROW, WIDE = 128 << 10, 512 << 10  # elements that go through the stages together: at both ends, and between


def cut(numel: int) -> list[tuple[int, int]]:
    """Cut into (start, stop) of chunks: narrow at both ends, where one stage works alone; wide between, as every chunk costs some waits."""
    if not numel:
        return []
    width, front, back = NARROW, [0], [numel]
    while width < WIDE and back[-1] - front[-1] > 4 * width:
        front.append(front[-1] + width)
        back.append(back[-1] - width)
        width *= 2
    edges = [*front, *range(front[-1] + width, back[-1], width), *reversed(back)]
    return list(pairwise(edges))
