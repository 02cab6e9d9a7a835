"""Layers as data: sizes between measured ones, activation checkpoints, several processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.planner.candidates import list_candidates
from paceline.planner.cuts.layer_profile import (
    choose_checkpointed,
    join_layers,
    predict_layers,
    recompute_layers,
    sum_seconds,
)
from paceline.planner.model_profile import format_profile, parse_profile
from paceline.planner.planned_cluster import describe_this_host
from paceline.planner.search import choose_best, price_candidates
from tests.harness.cut_plans import LAYERS, SAMPLE_SECONDS, make_cut_profile, make_layers
from tests.harness.plans import BATCH

PROFILE = make_cut_profile()


@pytest.mark.parametrize("samples", [2, 4, 8, 16, 32])
def test_sizes_between_measured_ones(samples: int) -> None:
    costs = predict_layers((make_layers(4), make_layers(16)), samples)
    assert sum_seconds(costs) == pytest.approx(SAMPLE_SECONDS * samples)
    assert [cost.kept for cost in costs] == [200 * samples] * LAYERS
    assert costs[0].parameters == make_layers(4).costs[0].parameters


def test_a_checkpointed_layer_keeps_its_input_and_runs_again() -> None:
    costs = make_layers(10).costs
    changed = recompute_layers(costs, ("blocks.0", "blocks.1"))
    assert [cost.kept for cost in changed] == [0, 500, 2000, 2000]
    assert changed[1].backward_seconds == costs[1].backward_seconds + costs[1].forward_seconds
    assert changed[2:] == costs[2:]


def test_small_layers_and_the_last_one_are_not_checkpointed() -> None:
    costs = list(make_layers(10).costs)
    costs[0] = replace(costs[0], kept=10)
    assert choose_checkpointed(costs) == ("blocks.1", "blocks.2")
    assert choose_checkpointed([replace(cost, kept=0) for cost in costs]) == ()


def test_processes_are_joined_by_medians() -> None:
    one, two, three = (
        make_layers(4),
        replace(make_layers(4), costs=make_layers(8).costs),
        replace(make_layers(4), costs=make_layers(100).costs),
    )
    (joined,) = join_layers([[one], [two], [three]])
    assert sum_seconds(joined.costs) == pytest.approx(sum_seconds(two.costs))
    assert joined.costs[0].kept == one.costs[0].kept


def test_checkpoints_are_a_row_and_never_the_answer() -> None:
    """Whatever they save: a plan can't put them into the script."""
    candidates = list(
        list_candidates(describe_this_host(2, 2), lossy=False, cuts=PROFILE.possible_cuts)
    )
    priced = price_candidates(PROFILE, candidates)
    alone = {
        each.candidate.recompute: each for each in priced if each.candidate.cluster.workers == 1
    }
    # Three of four layers go forward again, with the two threads of a worker alone.
    again = SAMPLE_SECONDS * BATCH / 3 * 3 / 4 / 2
    assert alone[True].step.seconds == pytest.approx(alone[False].step.seconds + again)
    saved = alone[False].activation_bytes - alone[True].activation_bytes
    assert saved == pytest.approx((450 - 200) * BATCH)
    assert not choose_best(priced).candidate.recompute


def test_profiles_with_cuts_are_written_and_read() -> None:
    assert parse_profile(format_profile(PROFILE)) == PROFILE
