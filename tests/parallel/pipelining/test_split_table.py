"""The table that describes a split."""

from __future__ import annotations

import pytest

from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.split import LayerCost, SplitProblem
from paceline.parallel.pipelining.split_table import describe_split

pytestmark = pytest.mark.unit

COSTS = [LayerCost(f"blocks.{at}", 1.0, 2.0, 1000, 1000, 100, 50, 50) for at in range(5)] + [
    LayerCost("head", 0.5, 0.5, 9000, 9000)
]


def test_a_split_in_words() -> None:
    problem = SplitProblem(
        COSTS, make_schedule("1f1b", 2, 4), [1.0, 0.5], memory=[20000.0, 60000.0]
    )
    text = describe_split(problem, [4, 2])
    assert text.splitlines() == [
        "stage  worker  layers                       time  share  parameters",
        "0      0       blocks.0 to blocks.3 (4)  12.00 s    60%      4.0 KB",
        "1      1       blocks.4 to head (2)       8.00 s    40%     10.0 KB",
        "memory: worker 0 16.8 KB of 20.0 KB, worker 1 40.1 KB of 60.0 KB",
        (
            "predicted: 52.00 s for a step of 4 micro-batches, 23% of it idle; "
            "with as many layers each, [3, 3], 65.00 s, 1.25 times as long"
        ),
    ]


def test_nothing_to_compare_with_and_no_memory_given() -> None:
    problem = SplitProblem(COSTS, make_schedule("1f1b", 2, 4), [1.0, 1.0])
    *_, memory, step = describe_split(problem, [3, 3]).splitlines()
    assert memory == "memory: worker 0 12.6 KB, worker 1 44.2 KB"
    assert step.startswith("predicted: ") and step.endswith("% of it idle")
