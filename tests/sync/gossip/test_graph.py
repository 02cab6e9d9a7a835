from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.sync.gossip.graph import (
    GRAPHS,
    Edges,
    build_weights,
    check_graph,
    compute_spectral_gap,
    count_period,
    prove_mixing,
)

STAR: Edges = tuple((0, rank) for rank in range(1, 5))


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_every_graph_is_proved_for_any_size(name: str, size: int) -> None:
    found = prove_mixing(name, size)
    assert 0 < found <= 1
    for step in range(2 * size):
        w = build_weights(name, size, step)
        assert w.shape == (size, size) and (w >= 0).all()
        np.testing.assert_allclose([w.sum(0), w.sum(1)], 1)


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_values_come_together_as_the_gap_says(name: str) -> None:
    size, steps = 7, 60
    x = np.random.default_rng(0).normal(size=(size, 500))
    mean, far = x.mean(0), []
    for step in range(steps):
        x = build_weights(name, size, step) @ x
        far.append(float(np.linalg.norm(x - mean)))
        np.testing.assert_allclose(x.mean(0), mean, atol=1e-12)
    assert far[-1] < 1e-3
    rate = (far[40] / far[0]) ** (1 / 40) if far[40] > 1e-9 else 0.0
    assert rate <= 1 - compute_spectral_gap(name, size) + 0.05


def test_an_exponential_graph_of_a_power_of_two_mixes_completely_in_its_period() -> None:
    for size in (2, 4, 8, 16):
        assert (
            count_period("exponential", size) == math.log2(size)
            and compute_spectral_gap("exponential", size) == 1.0
        )
        product = np.eye(size)
        for step in range(count_period("exponential", size)):
            w = build_weights("exponential", size, step)
            assert ((w > 0).sum(1) == 2).all()  # itself and one other
            product = w @ product
        np.testing.assert_allclose(product, 1 / size)
    assert compute_spectral_gap("full", 5) == 1.0 and compute_spectral_gap("ring", 3) == 1.0


def test_the_gap_of_a_ring_is_what_is_known() -> None:
    for size in (5, 9, 16):
        assert compute_spectral_gap("ring", size) == pytest.approx(
            2 / 3 - 2 / 3 * math.cos(2 * math.pi / size)
        )


def test_matchings_are_pairs_others_each_time_and_the_same_for_all() -> None:
    seen = set()
    for step in range(50):
        w = build_weights("matching", 6, step)
        assert (
            ((w > 0).sum(1) == 2).all()
            and np.array_equal(w, w.T)
            and np.array_equal(w, build_weights("matching", 6, step))
        )
        seen.add(w.tobytes())
    assert len(seen) > 10
    assert ((build_weights("matching", 5, 3) > 0).sum(1) == 1).sum() == 1  # one sits out


def test_edges() -> None:
    w = build_weights(STAR, 5, 0)
    assert (
        w[0, 1] == w[1, 0] == pytest.approx(1 / 5)
        and w[1, 1] == pytest.approx(4 / 5)
        and w[1, 2] == 0
    )
    assert 0 < prove_mixing(STAR, 5) < 1
    assert np.array_equal(
        build_weights(((0, 1), (1, 0), (0, 1)), 2, 0), build_weights(((1, 0),), 2, 0)
    )


@pytest.mark.parametrize(
    ("graph", "size", "says"),
    [
        (((0, 1), (2, 3)), 4, r"never mixes: ranks \[0, 1\] hear nothing of the others among 4"),
        (((0, 1),), 3, r"never mixes: ranks \[2\] hear nothing"),
        (((0, 5),), 3, "has rank 5, but there are 3 workers"),
        ("star", 3, "graph='star' is unknown; possible: exponential, full, matching, ring"),
        (((0, 0),), 3, "is no graph"),
        ((), 3, "is no graph"),
        (((0, 1, 2),), 3, "is no graph"),
    ],
)
def test_what_does_not_mix_is_refused(graph: Edges, size: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_graph(graph)
        prove_mixing(graph, size)
