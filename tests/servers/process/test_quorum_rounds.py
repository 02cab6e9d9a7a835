"""Rounds that close by a quorum: who is in which, and that they are those of a plain reference."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import Mismatch
from paceline.servers.process.quorum_rounds import QuorumRounds, RoundChange
from paceline.sync.localsgd.outer import Outer, average, nesterov

ALL = {0, 1, 2}


def make_rounds(
    outer: Outer | None = None, *, quorum: float = 0.6, grace: float = 5.0, value: float = 0.0
) -> QuorumRounds:
    values = [torch.full((2,), value, dtype=torch.float64)]
    outer = average() if outer is None else outer
    memories = [outer.begin(each) for each in values]
    return QuorumRounds(values, memories, outer, quorum=quorum, grace_seconds=grace)


def change(amount: float, *, number: int = 1, weight: float = 1.0, final: bool = False):
    return RoundChange(number, weight, [torch.full((2,), amount, dtype=torch.float64)], final)


def test_a_round_closes_at_once_when_all_have_come_and_is_weighted_by_samples() -> None:
    rounds = make_rounds()
    for worker, (amount, weight) in enumerate([(1.0, 1.0), (2.0, 3.0), (5.0, 0.0)]):
        assert rounds.close_if_due(ALL, ALL, 0.0) == []
        rounds.submit(worker, change(amount, weight=weight))
    assert rounds.close_if_due(ALL, ALL, 0.0) == [0, 1, 2]
    assert rounds.values[0].tolist() == [1.75, 1.75]  # (1 * 1 + 3 * 2 + 0 * 5) / 4


def test_a_quorum_waits_for_the_grace_window_alone() -> None:
    rounds = make_rounds()  # two of three
    rounds.submit(0, change(1.0))
    assert rounds.close_if_due(ALL, ALL, 100.0) == [] and rounds.next_check == math.inf
    rounds.submit(2, change(3.0))
    assert rounds.close_if_due(ALL, ALL, 101.0) == [] and rounds.next_check == 106.0
    assert rounds.close_if_due(ALL, ALL, 105.9) == []
    assert rounds.close_if_due(ALL, ALL, 106.0) == [0, 2]
    assert rounds.values[0].tolist() == [2.0, 2.0]
    assert rounds.next_check == math.inf and not rounds.has_answer(1, 1)


def test_who_comes_in_the_grace_window_is_in_the_round() -> None:
    rounds = make_rounds()
    for worker in (0, 1):
        rounds.submit(worker, change(1.0))
    assert rounds.close_if_due(ALL, ALL, 0.0) == []
    rounds.submit(2, change(4.0))
    assert rounds.close_if_due(ALL, ALL, 1.0) == [0, 1, 2]
    assert rounds.values[0].tolist() == [2.0, 2.0]


def test_a_late_change_is_in_the_next_round_once() -> None:
    rounds = make_rounds(grace=0.0)
    for worker in (0, 1):
        rounds.submit(worker, change(1.0))
    assert rounds.close_if_due(ALL, ALL, 0.0) == [0, 1]
    rounds.submit(2, change(9.0))
    assert rounds.close_if_due(ALL, ALL, 1.0) == []  # one of three is no quorum
    rounds.submit(0, change(1.0, number=2))
    assert rounds.close_if_due(ALL, ALL, 1.0) == [0, 2]
    assert rounds.values[0].tolist() == [6.0, 6.0]  # 1, then the mean of 1 and 9
    # A request that is repeated after a loss is answered, and doesn't count again.
    rounds.submit(2, change(9.0))
    assert rounds.has_answer(2, 1) and rounds.close_if_due(ALL, ALL, 9.0) == []
    assert rounds.summarize_rounds() == {"count": 2, "by_workers": {"2": 2}, "late": 1}


def test_the_quorum_is_of_running_workers() -> None:
    """Workers that have no more steps to make, or were lost, hold nobody up."""
    rounds = make_rounds(quorum=1.0)
    rounds.submit(0, change(1.0))
    assert rounds.close_if_due(ALL, ALL, 0.0) == []
    assert rounds.close_if_due({0}, ALL, 0.0) == [0]
    rounds.submit(0, change(1.0, number=2))
    rounds.submit(1, change(5.0))
    rounds.remove_lost_workers({0, 2})
    assert rounds.close_if_due({0}, {0, 2}, 0.0) == [0]
    assert rounds.values[0].tolist() == [2.0, 2.0]  # the change of the lost worker isn't in it


@pytest.mark.parametrize(("part", "size", "needed"), [(0.7, 10, 7), (0.8, 3, 3), (0.34, 3, 2)])
def test_the_number_that_makes_a_quorum(part: float, size: int, needed: int) -> None:
    rounds, everybody = make_rounds(quorum=part, grace=0.0), set(range(size))
    for worker in range(needed):
        assert rounds.close_if_due(everybody, everybody, 0.0) == []
        rounds.submit(worker, change(1.0))
    assert rounds.close_if_due(everybody, everybody, 0.0) == list(range(needed))


def test_a_final_round_waits_for_all_and_an_empty_one_moves_nothing() -> None:
    rounds = make_rounds(nesterov(), quorum=0.1, grace=0.0, value=3.0)
    for worker in (0, 1):
        rounds.submit(worker, change(0.0, weight=0.0, final=True))
        assert rounds.close_if_due(set(), ALL, 1e9) == []
    rounds.submit(2, change(0.0, weight=0.0, final=True))
    assert rounds.close_if_due(set(), ALL, 0.0) == [0, 1, 2]
    assert rounds.values[0].tolist() == [3.0, 3.0] and rounds.count == 0


def test_what_does_not_fit_is_refused() -> None:
    rounds = make_rounds()
    with pytest.raises(Mismatch, match="skips a round: 2"):
        rounds.submit(0, change(1.0, number=2))
    with pytest.raises(Mismatch, match="changes of another model"):
        rounds.submit(0, RoundChange(1, 1.0, [torch.zeros(3)], False))
    for weight in (math.nan, -1.0, math.inf):
        with pytest.raises(Mismatch, match="a change of weight"):
            rounds.submit(0, change(1.0, weight=weight))


# ---- a whole training with scripted delays, beside a plain reference


class Visit(NamedTuple):
    """A worker comes with its change at a time, after some steps on its own samples."""

    time: float
    worker: int
    samples: int


def make_delays(generator: random.Random, workers: int, visits: int) -> list[list[Visit]]:
    """Script how long each worker takes from its new values to its next change."""
    pace = [generator.choice([1.0, 1.3, 4.0]) for _ in range(workers)]
    return [
        [
            Visit(pace[worker] * generator.uniform(0.5, 1.5), worker, generator.randint(1, 9))
            for _ in range(visits)
        ]
        for worker in range(workers)
    ]


def compute_gradient(values: Tensor, worker: int, visit: int) -> Tensor:
    """Gradient of a worker's own loss: a bowl around another point for each worker and visit."""
    generator = torch.Generator().manual_seed(100 * worker + visit)
    return values - torch.randn(3, generator=generator, dtype=torch.float64) - worker


def train_with_rounds(
    delays: Sequence[Sequence[Visit]], outer: Outer, quorum: float, grace: float
) -> tuple[Tensor, list[list[int]]]:
    """The final values, and the workers of each round, by `QuorumRounds`."""
    start = torch.zeros(3, dtype=torch.float64)
    rounds = QuorumRounds([start], [outer.begin(start)], outer, quorum=quorum, grace_seconds=grace)
    values = [start.clone() for _ in delays]
    visits = [0] * len(delays)
    events = [(each[0].time, worker) for worker, each in enumerate(delays)]
    heapq.heapify(events)
    merged: list[list[int]] = []
    running = set(range(len(delays)))

    def close(now: float) -> None:
        for worker in (workers := rounds.close_if_due(running, running, now)):
            values[worker] = rounds.values[0].clone()
            visits[worker] += 1
            if visits[worker] < len(delays[worker]):
                heapq.heappush(events, (now + delays[worker][visits[worker]].time, worker))
            else:
                running.discard(worker)
        if workers:
            merged.append(workers)

    while events or rounds.next_check < math.inf:
        if not events or rounds.next_check <= events[0][0]:
            close(rounds.next_check)
            continue
        now, worker = heapq.heappop(events)
        moved = -0.1 * compute_gradient(values[worker], worker, visits[worker])
        samples = delays[worker][visits[worker]].samples
        rounds.submit(worker, RoundChange(visits[worker] + 1, samples, [moved], False))
        close(now)
        while rounds.close_if_due(running, running, now):
            raise AssertionError("a round closes only once")
    return rounds.values[0], merged


def train_by_reference(
    delays: Sequence[Sequence[Visit]], merged: Sequence[Sequence[int]], outer: Outer
) -> Tensor:
    """The same rounds by torch's own SGD: the gradient is the negative weighted mean change."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    lr, momentum = (outer.lr, outer.momentum) if isinstance(outer, nesterov) else (1.0, 0.0)
    optimizer = torch.optim.SGD([parameter], lr, momentum, nesterov=momentum > 0)
    values = [parameter.detach().clone() for _ in delays]
    visits = [0] * len(delays)
    for workers in merged:
        changes = torch.stack(
            [-0.1 * compute_gradient(values[each], each, visits[each]) for each in workers]
        )
        weights = torch.tensor(
            [delays[each][visits[each]].samples for each in workers], dtype=torch.float64
        )
        parameter.grad = -(changes * weights[:, None]).sum(0) / weights.sum()
        optimizer.step()
        for each in workers:
            values[each] = parameter.detach().clone()
            visits[each] += 1
    return parameter.detach()


@pytest.mark.parametrize("outer", [average(), nesterov(0.7, 0.9)])
@pytest.mark.parametrize("seed", range(50))
def test_rounds_with_scripted_delays_are_those_of_a_reference(outer: Outer, seed: int) -> None:
    """A hundred scripts of delays: each change is in one round, which is that of the reference."""
    generator = random.Random(seed)
    workers, visits = generator.randint(1, 6), 6
    delays = make_delays(generator, workers, visits)
    quorum, grace = generator.choice([0.3, 0.6, 0.8, 1.0]), generator.choice([0.0, 0.5, 3.0])
    values, merged = train_with_rounds(delays, outer, quorum, grace)
    assert sorted(worker for each in merged for worker in each) == sorted(
        [*range(workers)] * visits
    )
    reference = train_by_reference(delays, merged, outer)
    torch.testing.assert_close(values, reference, rtol=1e-12, atol=1e-12)
    if quorum == 1.0:  # rounds of all that still run
        assert merged == [[*range(workers)]] * visits
