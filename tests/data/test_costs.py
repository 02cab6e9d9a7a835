from __future__ import annotations

import math
import random
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from paceline.comm.agreement import Agreement
from paceline.data.costs import (
    MAX_EXCESS,
    SampleCosts,
    deal_batch,
    deal_by_cost,
    deal_padded,
    padded,
)
from paceline.data.loader import deal_loader
from paceline.data.shares import fractional_shares, make_policy
from paceline.errors import DataError
from tests.harness.loaders import Numbers, plain, run, walk
from tests.harness.thread_groups import spawn

DRAW = random.Random(11)
LENGTHS = [DRAW.randint(32, 512) for _ in range(203)]


def slowest(costs, dealt, ratios):
    """How many times its part the most loaded rank has."""
    whole, total = sum(ratios), sum(costs)
    return max(
        sum(costs[place] for place in mine) * whole / (total * ratio)
        for mine, ratio in zip(dealt, ratios, strict=True)
        if ratio
    )


# ---- dealing, as plain data


@pytest.mark.parametrize("ratios", [(1, 1), (1, 1, 1), (2, 1), (1, 0, 3), (1,) * 8])
@pytest.mark.parametrize("count", [1, 3, 16, 64, 203])
def test_each_place_is_dealt_once_and_none_to_a_part_of_zero(ratios, count):
    dealt = deal_by_cost(LENGTHS[:count], ratios)
    assert sorted(place for mine in dealt for place in mine) == list(range(count))
    assert all(mine == [] for mine, ratio in zip(dealt, ratios, strict=True) if not ratio)


@pytest.mark.parametrize(
    ("ratios", "count", "most"),
    [((1, 1), 64, 1.02), ((1,) * 8, 64, 1.02), ((3, 1), 64, 1.02), ((1,) * 4, 16, 1.06)],
)
def test_sums_of_costs_are_in_proportion_to_parts(ratios, count, most):
    found = [
        slowest(chosen, deal_by_cost(chosen, ratios), ratios)
        for chosen in (LENGTHS[n : n + count] for n in range(0, 130, 13))
    ]
    assert sum(found) / len(found) <= most


@pytest.mark.parametrize("ratios", [(1, 1), (1,) * 8, (1, 3), (2, 3, 1)])
def test_counts_are_in_proportion_too_so_that_what_a_sample_takes_beside_its_cost_is_even(ratios):
    counts = [
        len(mine) * sum(ratios) / ratio
        for mine, ratio in zip(deal_by_cost(LENGTHS, ratios), ratios, strict=True)
    ]
    assert max(counts) < 1.1 * len(LENGTHS) and min(counts) > 0.9 * len(LENGTHS)


def test_samples_of_equal_costs_are_dealt_by_count_and_in_order():
    assert deal_by_cost([1.0] * 8, (1, 1)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert list(map(len, deal_by_cost([0.0] * 8, (1, 3)))) == [2, 6]


def test_one_huge_sample_leaves_no_worker_without_any():
    dealt = deal_by_cost([100, 1, 1, 1], (1, 1, 1, 1))
    assert sorted(map(len, dealt)) == [1, 1, 1, 1]


@pytest.mark.parametrize("huge", [[10_000.0], [10_000.0, 3_000.0, 500.0]], ids=len)
def test_what_huge_samples_leave_is_level_among_the_others(huge):
    draw = random.Random(1)
    costs = [1 + draw.random() for _ in range(511)] + huge
    dealt = deal_by_cost(costs, (1.0,) * 16)
    assert sorted(place for mine in dealt for place in mine) == list(range(len(costs)))
    rest = [mine for mine in dealt if not any(place >= 511 for place in mine)]
    assert (
        len(rest) == 16 - len(huge)
        and slowest([*costs[:511]], rest, (1.0,) * len(rest)) <= MAX_EXCESS
    )


def test_samples_without_cost_are_dealt_too():
    dealt = deal_by_cost([0, 5, 0, 5, 0], (1, 1))
    assert sorted(place for mine in dealt for place in mine) == [0, 1, 2, 3, 4]
    assert sorted(sum([0, 5, 0, 5, 0][place] for place in mine) for mine in dealt) == [5, 5]
    assert sorted(map(len, dealt)) == [2, 3]


# ---- dealing what is padded, as plain data


def longest(costs, dealt, ratios):
    """The most that a rank has of count times largest cost, over its ratio."""
    work = [len(mine) * max((costs[place] for place in mine), default=0) for mine in dealt]
    return max(of / ratio for of, ratio in zip(work, ratios, strict=True) if ratio)


@pytest.mark.parametrize("ratios", [(1, 1), (1, 1, 1), (2, 1), (1, 0, 3), (1,) * 8])
@pytest.mark.parametrize("count", [0, 1, 3, 16, 203])
def test_padded_samples_are_dealt_once_at_consecutive_places_of_their_order(ratios, count):
    costs = LENGTHS[:count]
    dealt = deal_padded(costs, ratios)
    assert sorted(place for mine in dealt for place in mine) == list(range(count))
    assert all(mine == [] for mine, ratio in zip(dealt, ratios, strict=True) if not ratio)
    chunks = sorted([costs[place] for place in mine] for mine in dealt if mine)
    assert [cost for chunk in chunks for cost in chunk] == sorted(costs)
    assert sum(map(bool, dealt)) == min(count, sum(map(bool, ratios)))


@pytest.mark.parametrize("ratios", [(1, 1), (1, 2), (1, 1, 1), (3, 1, 2)])
def test_no_other_cut_has_less_of_count_times_longest(ratios):
    by_part = sorted(range(len(ratios)), key=lambda rank: ratios[rank])
    for start in range(0, 190, 9):
        costs = LENGTHS[start : start + 9]
        order = sorted(range(9), key=lambda place: costs[place])
        every = []
        for inner in combinations(range(1, 9), len(ratios) - 1):
            dealt = [[] for _ in ratios]
            for rank, (first, last) in zip(by_part, pairwise([0, *inner, 9]), strict=True):
                dealt[rank] = order[first:last]
            every.append(longest(costs, dealt, ratios))
        assert longest(costs, deal_padded(costs, ratios), ratios) == pytest.approx(min(every))


def test_padding_is_dealt_with_better_than_by_sums_and_by_counts():
    batches = [LENGTHS[start : start + 32] for start in range(0, 160, 32)]
    by_count = sum(
        longest(costs, [range(at, at + 4) for at in range(0, 32, 4)], (1,) * 8) for costs in batches
    )
    by_sum, by_cut = (
        sum(longest(costs, dealing(costs, (1,) * 8), (1,) * 8) for costs in batches)
        for dealing in (deal_by_cost, deal_padded)
    )
    assert by_cut < 0.8 * min(by_sum, by_count)


def test_what_is_padded_says_what_its_samples_are_and_takes_functions_alone():
    assert padded(len)("abc") == 3
    with pytest.raises(
        DataError, match=r"pl\.padded takes a function of a sample, such as len, and not 3"
    ):
        padded(3)


def test_a_batch_without_any_cost_is_dealt_by_count():
    dealt = deal_batch([0, 0, 0, 0], lambda total: (total / 2, total / 2))
    assert dealt.shares == [2, 2] and dealt.costs == [0, 0]
    assert deal_batch([3, 3], lambda total: (total / 2, total / 2)).places == [[0], [1]]


def test_parts_are_those_of_the_policy():
    assert fractional_shares(make_policy([3, 1], 2), 8.0) == pytest.approx((6, 2))
    assert fractional_shares(make_policy(None, 3), 9.0) == pytest.approx((3, 3, 3), rel=1e-3)

    class Curved:
        def __call__(self, batch):
            return (batch, 0)

        def parts(self, total):
            return [total - 1, 1]

    assert fractional_shares(Curved(), 5.0) == (4, 1)


# ---- asking for costs


class Recorded(Numbers):
    """Samples that remember that they were asked for."""

    def __init__(self, count, asked):
        super().__init__(count)
        self.asked = asked

    def __getitem__(self, index):
        self.asked.append(int(index))
        return super().__getitem__(index)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_cost_is_asked_for_once_by_one_worker_and_later_epochs_ask_nothing(size):
    asked = [[] for _ in range(size)]

    def body(group):
        costs, agreement = (
            SampleCosts(lambda sample: LENGTHS[int(sample)], Recorded(50, asked[group.rank])),
            Agreement(group),
        )
        costs.exchange_costs([[4, 2], [7]], agreement)
        costs.exchange_costs([[7, 4, 9]], agreement)
        costs.exchange_costs([list(range(50))], agreement)
        costs.exchange_costs([list(range(50))], agreement)
        return costs.costs_of(np.array([2, 49]))

    assert spawn(size, body) == [[LENGTHS[2], LENGTHS[49]]] * size
    assert sorted(index for mine in asked for index in mine) == list(range(50))
    assert max(map(len, asked)) - min(map(len, asked)) <= 4


def test_a_worker_that_knows_nothing_is_told_what_others_know():
    asked = [[] for _ in range(3)]

    def body(group):
        costs = SampleCosts(lambda sample: 1.5 * int(sample) + 1, Recorded(8, asked[group.rank]))
        if group.rank != 1:
            for key in range(6):
                costs._cost_by_key[key] = 1.5 * key + 1
        costs.exchange_costs([list(range(8))], Agreement(group))
        return costs.costs_of(torch.arange(8))

    assert spawn(3, body) == [[1.5 * key + 1 for key in range(8)]] * 3
    assert sorted(index for mine in asked for index in mine) == [6, 7]


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        (lambda sample: 1 / (3 - int(sample)), "cost= failed on sample 3: ZeroDivisionError"),
        (lambda sample: 2 - int(sample), "cost= gives -1.0 for sample 3"),
        (lambda sample: math.nan if int(sample) == 3 else 1, "cost= gives nan for sample 3"),
        (
            lambda sample: 0 if int(sample) in (2, 3) else 1,
            "cost= gives 0 for all samples of a batch, as for sample 2",
        ),
    ],
)
def test_a_cost_that_is_none_is_refused_by_its_sample(cost, text):
    def body(group):
        with pytest.raises(DataError, match=text):
            walk(deal_loader(DataLoader(Numbers(4), 2), Agreement(group), cost=cost))

    spawn(2, body)


# ---- loaders


def lengths(sample):
    return LENGTHS[int(sample) % len(LENGTHS)]


def shuffled(count=203, batch=32, **options):
    return lambda: DataLoader(
        Numbers(count), batch, shuffle=True, generator=torch.Generator().manual_seed(7), **options
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("size", "readers", "options"),
    [
        (2, 0, {}),
        (3, 2, {}),
        (3, 0, {"shares": [3, 2, 1]}),
        (2, 0, {"shares": [0, 1]}),
        (2, 2, {"shares": [0, 1]}),
        (5, 0, {}),
        (2, 0, {"weigh": len}),
        (3, 0, {"shares": [3, 2, 1], "cost": padded(lengths)}),
        (3, 1, {"shares": [3, 2, 1], "cost": padded(lengths)}),
    ],
)
def test_each_global_batch_has_the_samples_of_one_process(size, readers, options):
    pads = "cost" in options
    wanted = plain(shuffled()(), 2)
    seen = run(size, shuffled(num_workers=readers), epochs=2, **({"cost": lengths} | options))
    for epoch in range(2):
        for step, batch in enumerate(wanted[epoch]):
            turns = [rank[epoch][step] for rank in seen]
            rows = [turn.rows for turn, _ in turns]
            assert all(each == rows[0] for each in rows)
            mine = {
                place: one
                for at, (turn, ids) in enumerate(turns)
                if turn.share
                for place, one in zip(rows[0][at], ids, strict=True)
            }
            assert [mine[place] for place in range(len(batch))] == batch
            units = [
                len(ids) * max(map(lengths, ids)) if pads else sum(map(lengths, ids))
                for _, ids in turns
            ]
            assert all(
                turn.units == of for (turn, _), of in zip(turns, units, strict=True) if turn.share
            )
            assert sum(turn.share for turn, _ in turns) == len(batch)
            assert sum(turn.scale for turn, _ in turns) == pytest.approx(1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("readers", [0, 2])
def test_each_global_batch_is_dealt_once(readers, monkeypatch):
    dealt = []
    monkeypatch.setattr(
        "paceline.data.spec.deal_batch",
        lambda *given, **how: (dealt.append(1), deal_batch(*given, **how))[1],
    )
    run(2, shuffled(num_workers=readers), cost=lengths)
    assert len(dealt) == 2 * 7


def test_units_are_in_proportion_to_shares():
    for ratios in ([1, 1, 1], [1, 3, 2]):
        seen = run(3, shuffled(), cost=lengths, shares=ratios)
        for turns in zip(*(rank[0] for rank in seen), strict=True):
            if turns[0][0].global_batch == 32:
                whole = sum(turn.units for turn, _ in turns)
                assert all(
                    turn.units / whole == pytest.approx(ratio / sum(ratios), rel=0.1)
                    for (turn, _), ratio in zip(turns, ratios, strict=True)
                )


def test_one_worker_gets_its_batches_as_they_are_and_no_cost_is_asked_for():
    asked = []
    assert [
        ids for _, ids in run(1, shuffled(), cost=lambda sample: asked.append(sample) or 1)[0][0]
    ] == plain(shuffled()())[0]
    assert not asked


def test_a_worker_without_samples_gets_a_ghost_in_training_and_no_rows_in_evaluation():
    seen = run(3, lambda: DataLoader(Numbers(2), 2), cost=lengths)
    ghosts = [turn for rank in seen for turn, _ in rank[0] if turn.ghost]
    assert len(ghosts) == 1 and ghosts[0].weight == 0 and ghosts[0].units == 0
    assert {turn.source for rank in seen for turn, _ in rank[0]} == {
        next(at for at, rank in enumerate(seen) if rank[0][0][0].share)
    }
    dark = run(3, lambda: DataLoader(Numbers(2), 2), cost=lengths, train=False)
    assert sorted(ids for rank in dark for _, ids in rank[0]) == [[], [0], [1]]


def test_a_batch_sampler_of_the_scripts_own_is_dealt_by_cost():
    batches = [[3, 1, 4], [10, 5, 9, 2], [6]]
    seen = run(2, lambda: DataLoader(Numbers(20), batch_sampler=batches), cost=lengths)
    assert [
        sorted(one for rank in seen if rank[0][step][0].share for one in rank[0][step][1])
        for step in range(3)
    ] == [sorted(batch) for batch in batches]


def test_an_epoch_goes_on_from_a_saved_place_with_other_workers():
    def first(group):
        loader = deal_loader(shuffled()(), Agreement(group), cost=lengths)
        kept = []
        for batch in loader:
            kept.append(batch.tolist())
            if len(kept) == 3:
                return kept, loader.state_dict()
        raise AssertionError

    def second(state):
        def body(group):
            loader = deal_loader(shuffled()(), Agreement(group), cost=lengths)
            loader.load_state_dict(state)
            return [batch.tolist() for batch in loader]

        return body

    begun = spawn(2, first)
    after = spawn(3, second(begun[0][1]))
    wanted = plain(shuffled()())[0]
    assert [sorted(one for kept, _ in begun for one in kept[step]) for step in range(3)] == [
        sorted(batch) for batch in wanted[:3]
    ]
    assert [
        sorted(one for mine in after for one in mine[step]) for step in range(len(wanted) - 3)
    ] == [sorted(batch) for batch in wanted[3:]]


def test_other_shares_hold_from_the_next_step_on():
    def body(group):
        loader = deal_loader(shuffled()(), Agreement(group), cost=lengths)
        seen = []
        for batch in loader:
            seen.append((batch.tolist(), loader.turn.units))
            if len(seen) == 2:
                loader.reshare([1, 4])
        return seen

    one, two = spawn(2, body)
    wanted = plain(shuffled()())[0]
    assert [sorted(a[0] + b[0]) for a, b in zip(one, two, strict=True)] == [
        sorted(batch) for batch in wanted
    ]
    assert two[1][1] / one[1][1] == pytest.approx(1, rel=0.1) and two[2][1] / one[2][
        1
    ] == pytest.approx(4, rel=0.2)


class Drawn(Numbers):
    def __getitem__(self, index):
        torch.rand(1)
        return super().__getitem__(index)


def test_asking_for_costs_draws_no_random_numbers():
    def body(group):
        loader = deal_loader(DataLoader(Drawn(8), 4), Agreement(group), cost=lambda sample: 1)
        before = torch.get_rng_state()
        loader.terms.costs.exchange_costs([[0, 1, 2, 3]], loader.terms.agreement)
        return torch.equal(before, torch.get_rng_state())

    assert spawn(1, body) == [True]


def test_workers_whose_costs_add_up_in_other_ways_are_told():
    def body(group):
        loader = deal_loader(
            DataLoader(Numbers(8), 4),
            Agreement(group),
            cost=lengths if group.rank else padded(lengths),
        )
        with pytest.raises(DataError, match="cost= is sums on rank 1 and padded on rank 0"):
            walk(loader)

    spawn(2, body)
