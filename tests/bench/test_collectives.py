"""`paceline bench collectives`: sizes, ways, a measurement that checks its result, and the
table.
"""

from __future__ import annotations

import pytest
import torch

from paceline.bench.collectives import Timing, format_timings, make_calls, measure_call
from paceline.comm.group_protocol import FinishedWork, Group
from paceline.comm.schedule import SCHEDULES
from paceline.errors import PacelineError, UsageError
from tests.harness.thread_groups import spawn


def test_every_way_is_measured_and_right() -> None:
    def body(group: Group) -> dict[str, float]:
        ways = make_calls(",".join(["native", *SCHEDULES]), group, [0] * group.size)
        return {
            via: measure_call(call, torch.empty(103), group, 1e-4) for via, call in ways.items()
        }

    for timings in spawn(3, body):
        assert set(timings) == {"native", *SCHEDULES} and all(
            seconds > 0 for seconds in timings.values()
        )


def test_a_wrong_result_is_found() -> None:
    def body(group: Group) -> None:
        measure_call(lambda x: FinishedWork(x.mul_(2)), torch.empty(8), group, 1e-4)

    with pytest.raises(PacelineError, match="the exchange is broken"):
        spawn(2, body)


def test_unknown_way() -> None:
    def body(group: Group) -> None:
        make_calls("native,rnig", group, [0])

    with pytest.raises(UsageError, match=r"--via rnig: possible: .*; did you mean ring\?"):
        spawn(1, body)


def test_words() -> None:
    said = format_timings(
        [Timing(1_000_000, "ring", "ordinary", 0.002), Timing(4_000, "native", "registered", 4e-5)],
        3,
    ).splitlines()
    assert "3 workers" in said[0]
    assert said[2].split() == ["1", "MB", "ring", "ordinary", "2.000", "0.50"]
    assert said[3].split() == ["4", "KB", "native", "registered", "0.040", "0.10"]
