"""Graphs of gossip as data: a matrix of weights W for each step.

    ring          each with its two neighbours, a third each
                  W = 1/3 on three diagonals
    exponential   each hears one: the rank 1, 2, 4, ... before it, in turn
                  W = 1/2 (I + shift by 2^k)   (Assran et al. 2019)
    matching      random pairs, others in every step, the same for all with the same seed
                  W = 1/2 (I + swaps)          (Boyd et al. 2006)
    full          every worker with every worker
                  W = 1/n
    edges         pairs of ranks of your own, weighted by Metropolis and Hastings
                  W = 1 / (1 + the larger degree)

W is doubly stochastic: rows and columns sum to 1, so the mean of all values never changes. The
spectral gap of W is the speed at which the values of workers come together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.formatting import unknown

Matrix: TypeAlias = NDArray[np.float64]
Graph = Literal["ring", "exponential", "matching", "full"]
Edges: TypeAlias = tuple[tuple[int, int], ...]
SEED = 2006  # of the matchings, the same on every rank
LEAST = 1e-9  # a spectral gap below is none


def weights(graph: str | Edges, size: int, step: int) -> Matrix:
    """Return W of this step: entry (i, j) is what rank i takes of rank j's values."""
    if isinstance(graph, str):
        return GRAPHS[graph](size, step)
    return _edges(graph, size)


def period(graph: str | Edges, size: int) -> int:
    """Return after how many steps the matrices begin again; 0: never."""
    if graph == "matching":
        return 0
    return max(1, math.ceil(math.log2(size))) if graph == "exponential" else 1


def gap(graph: str | Edges, size: int) -> float:
    """Return 1 minus the factor by which a step brings values nearer to their mean, on average; 1
    is at once, 0 is never.

    For "matching" it is that of the mean matrix (Boyd et al. 2006): a matching squared is itself.
    """
    if size == 1:
        return 1.0
    mean = np.full((size, size), 1 / size)
    if graph == "matching":
        pairs = size // 2 * 2
        met = pairs / size / (size - 1)  # how likely a pair is
        expected = np.full((size, size), met / 2) + np.eye(size) * (1 - met / 2 * size)
        return 1 - math.sqrt(max(0.0, float(np.linalg.norm(expected - mean, 2))))
    product, count = np.eye(size), period(graph, size)
    for step in range(count):
        product = weights(graph, size, step) @ product
    left = float(np.linalg.norm(product - mean, 2))
    return 1.0 if left < LEAST else 1 - left ** (1 / count)


def check(graph: str | Edges) -> None:
    """Raise `UsageError` for anything that is no graph."""
    if isinstance(graph, str):
        if wrong := unknown("graph", graph, Graph):
            raise UsageError(f"{wrong}; or pairs of ranks, such as ((0, 1), (1, 2))")
        return
    good = (
        isinstance(graph, tuple)
        and graph
        and all(isinstance(edge, tuple) and len(edge) == 2 for edge in graph)
    )
    if (
        not good
        or any(not isinstance(rank, int) or rank < 0 for edge in graph for rank in edge)
        or any(a == b for a, b in graph)
    ):
        raise UsageError(
            f"graph={graph!r} is no graph; give a name, or pairs of different ranks, "
            "such as ((0, 1), (1, 2))"
        )


def prove(graph: str | Edges, size: int) -> float:
    """Return the spectral gap, after a check that W is doubly stochastic and mixes.

    Raises `UsageError` where it doesn't.
    """
    if not isinstance(graph, str) and max(rank for edge in graph for rank in edge) >= size:
        raise UsageError(
            f"graph={graph!r} has rank {max(rank for edge in graph for rank in edge)}, and there "
            f"are {size} workers"
        )
    for step in range(period(graph, size) or 2 * size):
        w = weights(graph, size, step)
        assert (w >= 0).all() and np.allclose(w.sum(0), 1) and np.allclose(w.sum(1), 1), (
            "W is doubly stochastic"
        )
    found = gap(graph, size)
    if found < LEAST:
        apart = _component(graph, size) if not isinstance(graph, str) else []
        raise UsageError(
            f"graph={graph!r} never mixes: ranks {apart} hear nothing of the others among {size}; "
            "join them by a pair"
        )
    return found


def _ring(size: int, step: int) -> Matrix:
    return _edges(
        tuple((rank, (rank + 1) % size) for rank in range(size if size > 2 else size - 1)), size
    )


def _exponential(size: int, step: int) -> Matrix:
    shift = 1 << step % max(1, math.ceil(math.log2(size)))
    w = np.eye(size) / 2
    for rank in range(size):
        w[rank, (rank - shift) % size] += 0.5
    return w


def _matching(size: int, step: int) -> Matrix:
    ranks = list(range(size))
    random.Random(SEED + step).shuffle(ranks)
    w = np.eye(size)
    for a, b in zip(ranks[::2], ranks[1::2], strict=False):
        w[a, a] = w[b, b] = w[a, b] = w[b, a] = 0.5
    return w


def _full(size: int, step: int) -> Matrix:
    return np.full((size, size), 1 / size)


def _edges(edges: Edges, size: int) -> Matrix:
    pairs = {(min(a, b), max(a, b)) for a, b in edges}
    degree = [sum(rank in pair for pair in pairs) for rank in range(size)]
    w = np.zeros((size, size))
    for a, b in pairs:
        w[a, b] = w[b, a] = 1 / (1 + max(degree[a], degree[b]))
    return w + np.diag(1 - w.sum(1))


def _component(edges: Edges, size: int) -> list[int]:
    """Return the smallest set of ranks that no other rank is joined to."""
    sets: list[set[int]] = [{rank} for rank in range(size)]
    for a, b in edges:
        joined = next(s for s in sets if a in s) | next(s for s in sets if b in s)
        sets = [s for s in sets if not s & joined] + [joined]
    sets.sort(key=lambda ranks: (len(ranks), min(ranks)))
    return sorted(sets[0])


GRAPHS: dict[str, Callable[[int, int], Matrix]] = {
    "ring": _ring,
    "exponential": _exponential,
    "matching": _matching,
    "full": _full,
}
