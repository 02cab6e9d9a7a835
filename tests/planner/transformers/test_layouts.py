"""The search: all layouts, none twice, the best first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.comm.schedule import LinkSpeed
from paceline.errors import UsageError
from paceline.planner.transformers.device import DeviceCluster, find_accelerator
from paceline.planner.transformers.layouts import list_layouts, plan_transformer, score_layout
from paceline.planner.transformers.parallel_layout import ParallelLayout, check_layout
from paceline.planner.transformers.transformer import Transformer

MODEL = Transformer(1024, 8, 8, 512, 32768, global_batch=32, name="small")
CLUSTER = DeviceCluster(find_accelerator("a100-40gb"), 4, 2, LinkSpeed(1e-5, 10e9))


def test_all_layouts_are_possible_and_none_comes_twice() -> None:
    layouts = list(list_layouts(MODEL, 8))
    assert len(set(layouts)) == len(layouts) > 200
    for layout in layouts:
        assert layout.devices == 8
        check_layout(MODEL, layout)
    assert {one.schedule for one in layouts} == {"1f1b", "interleaved", "zero-bubble", "zbv"}
    assert {one.sharding for one in layouts} == {0, 1, 2, 3}
    assert {one.recompute for one in layouts} == {"none", "selective", "full"}
    assert {one.tensor for one in layouts} == {1, 2, 4, 8}


def test_a_given_micro_batch_is_kept() -> None:
    layouts = list(list_layouts(replace(MODEL, micro_batch=4), 8))
    assert {one.micro_batch for one in layouts} == {4}
    assert max(one.data for one in layouts) == 8


def test_the_best_comes_first() -> None:
    scored = plan_transformer(MODEL, CLUSTER)
    seconds = [one.seconds for one in scored if one.fits]
    assert seconds == sorted(seconds)
    best = scored[0]
    assert best.samples_per_second == pytest.approx(32 / best.seconds)
    assert sum(best.shares.values()) == pytest.approx(1)
    # What comes first is priced exactly.
    assert best == score_layout(MODEL, CLUSTER, best.layout)


def test_what_does_not_fit_comes_last_the_smallest_first() -> None:
    little = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=3.2e9))
    scored = plan_transformer(MODEL, little)
    fits = [one.fits for one in scored]
    assert fits == sorted(fits, reverse=True) and set(fits) == {True, False}
    rest = [one.memory.total for one in scored if not one.fits]
    assert rest == sorted(rest)


def test_a_slow_network_keeps_messages_inside_of_hosts() -> None:
    slow = replace(CLUSTER, between=LinkSpeed(1e-4, 0.05e9))
    best, fast_best = plan_transformer(MODEL, slow)[0], plan_transformer(MODEL, CLUSTER)[0]
    assert best.cost.sent_between <= fast_best.cost.sent_between
    assert best.layout.tensor <= 4


def test_some_layouts_can_be_left_out() -> None:
    scored = plan_transformer(MODEL, CLUSTER, keep=lambda layout: layout.pipeline == 2)
    assert {one.layout.pipeline for one in scored} == {2}


def test_nothing_is_possible() -> None:
    with pytest.raises(UsageError, match="8 devices"):
        plan_transformer(replace(MODEL, global_batch=1, heads=1, kv_heads=1, layers=1), CLUSTER)


def test_a_score_has_all_that_a_reader_asks_for() -> None:
    scored = score_layout(MODEL, CLUSTER, ParallelLayout(2, 2, 2, 2, recompute="full"))
    assert set(scored.shares) == {
        "compute",
        "recompute",
        "tensor exchange",
        "waiting for stages",
        "gradient exchange",
        "optimizer",
    }
    assert all(share > 0 for share in scored.shares.values())
    assert 0 < scored.uncertainty < scored.seconds
    assert scored.cost.sent_within > 0 and scored.memory.total > 0
