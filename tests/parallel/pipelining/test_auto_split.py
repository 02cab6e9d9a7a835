"""All workers find the same split, though each has measured something else."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.parallel.pipelining.auto_split import agree_problem
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.split import LayerCost, find_best_split
from tests.harness.thread_groups import ThreadGroup, spawn

pytestmark = pytest.mark.unit


def measured(by: float, layers: int = 12) -> list[LayerCost]:
    """What a worker measures that takes `by` times as long as another."""
    return [LayerCost(f"layer {at}", by, 2 * by, 100, 100, 10, 5, 5) for at in range(layers)]


def test_a_slow_worker_gets_fewer_layers_and_all_agree() -> None:
    def body(group: ThreadGroup) -> list[int]:
        own = measured([0.01, 0.021][group.rank])
        return find_best_split(agree_problem(group, group.rank, make_schedule("1f1b", 2, 16), own))

    assert spawn(2, body) == [[8, 4]] * 2


def test_a_place_is_as_slow_as_the_slowest_replica_there_and_as_small_as_the_smallest() -> None:
    """Two replicas of two stages: ranks 0 and 1 are one, 2 and 3 the other."""

    def body(group: ThreadGroup) -> tuple[list[float], object, list[int]]:
        own, memory = (
            measured([1.0, 1.0, 2.0, 1.0][group.rank]),
            [9000.0, 5000.0, 8000.0, 2000.0][group.rank],
        )
        problem = agree_problem(
            group, group.rank % 2, make_schedule("1f1b", 2, 4), own, memory=memory
        )
        return list(problem.speeds), problem.memory, find_best_split(problem)

    found = spawn(4, body)
    assert found == [found[0]] * 4
    speeds, memory, split = found[0]
    assert speeds == pytest.approx([0.5, 1.0]) and memory == [8000.0, 2000.0]
    assert split == [8, 4]  # 4 layers of 400 bytes and their activations are what fits into 2000


def test_who_says_nothing_of_memory_has_enough() -> None:
    def body(group: ThreadGroup) -> tuple[object, list[int]]:
        memory = 2000.0 if group.rank == 1 else None
        problem = agree_problem(
            group, group.rank, make_schedule("1f1b", 2, 4), measured(1.0), memory=memory
        )
        return problem.memory, find_best_split(problem)

    assert spawn(2, body) == [([float("inf"), 2000.0], [8, 4])] * 2


def test_other_models_are_refused_on_all() -> None:
    def body(group: ThreadGroup) -> str:
        with pytest.raises(
            UsageError, match="ranks 0 and 1 have models with other layers"
        ) as caught:
            agree_problem(
                group, group.rank, make_schedule("1f1b", 2, 4), measured(1.0, 4 + group.rank)
            )
        return str(caught.value)

    assert len(set(spawn(2, body))) == 1


def test_a_place_without_a_worker_is_refused() -> None:
    def body(group: ThreadGroup) -> None:
        with pytest.raises(UsageError, match="no worker is at place 2 of the 3"):
            agree_problem(group, group.rank, make_schedule("1f1b", 3, 4), measured(1.0))

    spawn(2, body)
