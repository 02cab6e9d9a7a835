"""Graphs of gossip as data: a matrix of weights W for each step.

    ring          each rank with its two neighbours
                  W = 1/3 on three diagonals
    exponential   each rank hears from one other: the rank 1, 2, 4, ... before it, in turn
                  W = 1/2 (I + shift by 2^k)   (Assran et al. 2019)
    matching      random pairs, which change in every step and are the same on all ranks
                  W = 1/2 (I + swaps)          (Boyd et al. 2006)
    full          each rank with all others
                  W = 1/n
    edges         given pairs of ranks, with Metropolis-Hastings weights
                  W = 1 / (1 + the larger degree)

W is doubly stochastic: rows and columns sum to 1, so the mean of all values never changes. The
larger the spectral gap of W, the faster the values of all workers approach their mean.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice

Matrix: TypeAlias = NDArray[np.float64]
Graph = Literal["ring", "exponential", "matching", "full"]
Edges: TypeAlias = tuple[tuple[int, int], ...]
MATCHING_SEED = 2006  # of the matchings, the same on all ranks
SMALLEST_GAP = 1e-9  # a smaller spectral gap counts as 0


def build_weights(graph: str | Edges, size: int, step: int) -> Matrix:
    """Build W of a step: entry (i, j) is the weight of rank j's values on rank i."""
    if isinstance(graph, str):
        return GRAPHS[graph](size, step)
    return _build_from_edges(graph, size)


def count_period(graph: str | Edges, size: int) -> int:
    """Number of steps after which the matrices repeat; 0 if they never do."""
    if graph == "matching":
        return 0
    return max(1, math.ceil(math.log2(size))) if graph == "exponential" else 1


def compute_spectral_gap(graph: str | Edges, size: int) -> float:
    """Compute the spectral gap: 1 - the factor by which a step shrinks distances to the mean.

    1: all values are equal after one period. 0: values never become equal. For "matching" the
    factor follows from the expected matrix (Boyd et al. 2006), as a matching is its own square.
    """
    if size == 1:
        return 1.0
    mean = np.full((size, size), 1 / size)
    if graph == "matching":
        pairs = size // 2 * 2
        pair_probability = pairs / size / (size - 1)
        expected = np.full((size, size), pair_probability / 2)
        expected += np.eye(size) * (1 - pair_probability / 2 * size)
        return 1 - math.sqrt(max(0.0, float(np.linalg.norm(expected - mean, 2))))
    # The largest factor of a whole period, then its mean per step.
    product, count = np.eye(size), count_period(graph, size)
    for step in range(count):
        product = build_weights(graph, size, step) @ product
    factor = float(np.linalg.norm(product - mean, 2))
    return 1.0 if factor < SMALLEST_GAP else 1 - factor ** (1 / count)


def check_graph(graph: str | Edges) -> None:
    """Raise `UsageError` if this is neither the name of a graph nor pairs of ranks."""
    if isinstance(graph, str):
        if wrong := describe_unknown_choice("graph", graph, Graph):
            raise UsageError(f"{wrong}; or pairs of ranks, such as ((0, 1), (1, 2))")
        return
    is_pairs = (
        isinstance(graph, tuple)
        and graph
        and all(isinstance(edge, tuple) and len(edge) == 2 for edge in graph)
    )
    if (
        not is_pairs
        or any(not isinstance(rank, int) or rank < 0 for edge in graph for rank in edge)
        or any(first == second for first, second in graph)
    ):
        raise UsageError(
            f"graph={graph!r} is no graph; give a name, or pairs of different ranks, "
            "such as ((0, 1), (1, 2))"
        )


def prove_mixing(graph: str | Edges, size: int) -> float:
    """Check that W is doubly stochastic and mixes; return its spectral gap.

    Raises `UsageError` if the graph has other ranks, or isn't connected.
    """
    if not isinstance(graph, str) and max(rank for edge in graph for rank in edge) >= size:
        raise UsageError(
            f"graph={graph!r} has rank {max(rank for edge in graph for rank in edge)}, but there "
            f"are {size} workers; name ranks 0 to {size - 1}"
        )
    for step in range(count_period(graph, size) or 2 * size):
        matrix = build_weights(graph, size, step)
        assert (
            (matrix >= 0).all() and np.allclose(matrix.sum(0), 1) and np.allclose(matrix.sum(1), 1)
        ), "W is doubly stochastic"
    spectral_gap = compute_spectral_gap(graph, size)
    if spectral_gap < SMALLEST_GAP:
        apart = _find_component(graph, size) if not isinstance(graph, str) else []
        raise UsageError(
            f"graph={graph!r} never mixes: ranks {apart} hear nothing of the others among {size}; "
            "join them by a pair"
        )
    return spectral_gap


def _build_ring(size: int, step: int) -> Matrix:
    return _build_from_edges(
        tuple((rank, (rank + 1) % size) for rank in range(size if size > 2 else size - 1)), size
    )


def _build_exponential(size: int, step: int) -> Matrix:
    shift = 1 << step % max(1, math.ceil(math.log2(size)))
    matrix = np.eye(size) / 2
    for rank in range(size):
        matrix[rank, (rank - shift) % size] += 0.5
    return matrix


def _build_matching(size: int, step: int) -> Matrix:
    ranks = list(range(size))
    random.Random(MATCHING_SEED + step).shuffle(ranks)
    matrix = np.eye(size)
    for first, second in zip(ranks[::2], ranks[1::2], strict=False):
        matrix[first, first] = matrix[second, second] = matrix[first, second] = matrix[
            second, first
        ] = 0.5
    return matrix


def _build_full(size: int, step: int) -> Matrix:
    return np.full((size, size), 1 / size)


def _build_from_edges(edges: Edges, size: int) -> Matrix:
    pairs = {(min(first, second), max(first, second)) for first, second in edges}
    degree = [sum(rank in pair for pair in pairs) for rank in range(size)]
    matrix = np.zeros((size, size))
    for first, second in pairs:
        matrix[first, second] = matrix[second, first] = 1 / (1 + max(degree[first], degree[second]))
    return matrix + np.diag(1 - matrix.sum(1))


def _find_component(edges: Edges, size: int) -> list[int]:
    """Find the smallest connected component, as sorted ranks."""
    components: list[set[int]] = [{rank} for rank in range(size)]
    for first, second in edges:
        joined = next(ranks for ranks in components if first in ranks)
        joined = joined | next(ranks for ranks in components if second in ranks)
        components = [ranks for ranks in components if not ranks & joined] + [joined]
    components.sort(key=lambda ranks: (len(ranks), min(ranks)))
    return sorted(components[0])


GRAPHS: dict[str, Callable[[int, int], Matrix]] = {
    "ring": _build_ring,
    "exponential": _build_exponential,
    "matching": _build_matching,
    "full": _build_full,
}
