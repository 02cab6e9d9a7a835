"""Prices of layouts: parts that add up, and which way they must change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.comm.schedule import LinkSpeed
from paceline.errors import UsageError
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.simulate import StageTimes, simulate_schedule
from paceline.planner.transformers.device import DeviceCluster, find_accelerator
from paceline.planner.transformers.parallel_layout import ParallelLayout
from paceline.planner.transformers.transformer import Transformer
from paceline.planner.transformers.transformer_cost import (
    FrameworkTraits,
    StepCost,
    price_layout,
    time_stages,
)
from paceline.planner.transformers.transformer_memory import StateBytes

MODEL = Transformer(2048, 24, 16, 1024, 51200, global_batch=64)
CLUSTER = DeviceCluster(find_accelerator("a100-80gb"), 8, 4, LinkSpeed(1e-5, 50e9))
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(data=32, micro_batch=2),
    ParallelLayout(8, 1, 4, 4, recompute="full"),
    ParallelLayout(8, 1, 4, 4, recompute="full", sequence_parallel=True, sharding=1),
    ParallelLayout(2, 4, 4, 1, "1f1b"),
    ParallelLayout(2, 4, 4, 1, "interleaved", 3, "selective"),
    ParallelLayout(1, 8, 4, 2, "zero-bubble"),
    ParallelLayout(1, 8, 4, 1, "zbv", 2, sharding=1),
    ParallelLayout(1, 1, 32, 1, sharding=2),
    ParallelLayout(1, 1, 32, 2, sharding=3),
]


def parts(cost: StepCost) -> list[float]:
    return [cost.compute, cost.again, cost.tensor, cost.bubble, cost.gradients, cost.optimizer]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_add_up_and_none_is_below_zero(layout: ParallelLayout) -> None:
    cost = price_layout(MODEL, CLUSTER, layout)
    assert sum(parts(cost)) == pytest.approx(cost.seconds)
    assert min(parts(cost)) >= -1e-12
    assert 0 <= cost.bubble_share < 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_faster_links_and_devices_are_never_slower(layout: ParallelLayout) -> None:
    seconds = price_layout(MODEL, CLUSTER, layout).seconds
    between = replace(CLUSTER, between=LinkSpeed(1e-5, 500e9))
    device = replace(CLUSTER.device, peak_flops=2 * CLUSTER.device.peak_flops)
    within = replace(CLUSTER.device, within=LinkSpeed(6e-6, 500e9))
    for cluster in (
        between,
        replace(CLUSTER, device=device),
        replace(CLUSTER, device=within),
    ):
        assert price_layout(MODEL, cluster, layout).seconds <= seconds + 1e-12


def test_a_step_takes_longer_than_its_operations_at_the_peak() -> None:
    for layout in LAYOUTS:
        ideal = MODEL.count_model_flops() / layout.devices / CLUSTER.device.peak_flops
        assert price_layout(MODEL, CLUSTER, layout).seconds > ideal


@pytest.mark.parametrize(
    "layout", [one for one in LAYOUTS if one.pipeline > 1], ids=lambda one: one.schedule
)
def test_a_pipeline_takes_what_the_simulator_says(layout: ParallelLayout) -> None:
    times = time_stages(MODEL, CLUSTER, layout)
    n = layout.count_micro_batches(MODEL)
    chunks = layout.chunks if layout.schedule == "interleaved" else None
    schedule = make_schedule(layout.schedule, layout.pipeline, n, chunks)
    between = schedule.stages - 1
    timeline = simulate_schedule(
        schedule,
        StageTimes(
            times.forwards,
            [a + b for a, b in zip(times.inputs, times.weights, strict=True)],
            times.inputs,
            times.weights,
            sends=[times.transfer] * between,
            links=[LinkSpeed(0.0, 1.0)] * between,
        ),
    )
    cost = price_layout(MODEL, CLUSTER, layout)
    in_pipeline = cost.seconds - cost.gradients - cost.optimizer
    assert in_pipeline == pytest.approx(timeline.makespan)
    assert cost.bubble_share == pytest.approx(timeline.bubble)


def test_work_is_conserved_between_layouts_without_messages() -> None:
    one = price_layout(MODEL, CLUSTER, ParallelLayout(micro_batch=2))
    eight = price_layout(MODEL, CLUSTER, ParallelLayout(data=8, micro_batch=2))
    assert eight.compute * 8 == pytest.approx(one.compute)
    stages = price_layout(MODEL, CLUSTER, ParallelLayout(pipeline=4, micro_batch=2))
    whole = 4 * (stages.seconds - stages.gradients - stages.optimizer) * (1 - stages.bubble_share)
    assert whole == pytest.approx(one.compute)


def test_traits_change_the_price() -> None:
    base = FrameworkTraits(overlap=0.0)
    layout = ParallelLayout(2, 4, 4, 1, "interleaved", 2)

    def price(**changes: object) -> float:
        return price_layout(MODEL, CLUSTER, layout, replace(base, **changes)).seconds  # type: ignore[arg-type]

    seconds = price()
    assert price(overlap=0.9) < seconds
    assert price(overlap_tensor=0.5) < seconds
    assert price(overlap_sends=False) > seconds
    assert price(message_seconds=1e-3) > seconds
    assert price(accumulation_bytes=0.0) < seconds
    assert price(optimizer_bytes=88.0) > seconds
    assert price(loss_bytes=100.0) > seconds
    assert price(states=StateBytes(gradients=4)) > seconds


@pytest.mark.parametrize(
    ("layout", "sends"),
    [
        (ParallelLayout(1, 4, 8), 3),
        (ParallelLayout(1, 4, 8, 1, "interleaved", 2), 7),
        (ParallelLayout(1, 4, 8, 1, "zbv", 2), 6),  # the tip of the V sends to itself
    ],
    ids=lambda one: getattr(one, "schedule", ""),
)
def test_sends_that_are_waited_for(layout: ParallelLayout, sends: int) -> None:
    waiting = time_stages(MODEL, CLUSTER, layout, FrameworkTraits(overlap_sends=False))
    beside = time_stages(MODEL, CLUSTER, layout)
    assert waiting.transfer == 0 < beside.transfer
    for row in ("forwards", "inputs"):
        more = sum(getattr(waiting, row)) - sum(getattr(beside, row))
        assert more == pytest.approx(sends * beside.transfer)


def test_bytes_sent() -> None:
    nbytes = 2 * MODEL.sequence * MODEL.hidden * 4
    alone = price_layout(MODEL, CLUSTER, ParallelLayout(8, 1, 1, 4))
    sums = 4 * MODEL.layers * 16
    assert alone.sent_within == pytest.approx(sums * 2 * 7 / 8 * nbytes)
    assert alone.sent_between == 0
    copies = price_layout(MODEL, CLUSTER, ParallelLayout(8, 1, 4, 4))
    held = (MODEL.parameters - 2 * MODEL.hidden) / 8
    assert copies.sent_between == pytest.approx(2 * 3 / 4 * 2 * held)


def test_tied_matrices_are_summed_between_the_ends() -> None:
    layout = ParallelLayout(8, 4)
    tied = price_layout(MODEL, CLUSTER, layout)
    assert tied.gradients > price_layout(replace(MODEL, tied=False), CLUSTER, layout).gradients == 0


def test_sharding_divides_the_optimizer() -> None:
    whole = price_layout(MODEL, CLUSTER, ParallelLayout(data=8, micro_batch=4))
    shared = price_layout(MODEL, CLUSTER, ParallelLayout(data=8, micro_batch=4, sharding=1))
    assert shared.optimizer * 8 == pytest.approx(whole.optimizer)


def test_parameters_that_are_sharded_are_gathered_layer_by_layer() -> None:
    layout = ParallelLayout(data=32, micro_batch=2, sharding=3)
    late = replace(CLUSTER, between=LinkSpeed(1e-3, 50e9))
    none = FrameworkTraits(overlap=0.0)
    more = (
        price_layout(MODEL, late, layout, none).gradients
        - price_layout(MODEL, CLUSTER, layout, none).gradients
    )
    # Twice parameters and once gradients, in as many parts as there are layers, over four hosts.
    assert more == pytest.approx(3 * MODEL.layers * 4 * (1e-3 - 1e-5))


def test_an_impossible_layout_is_refused() -> None:
    with pytest.raises(UsageError, match="heads"):
        price_layout(MODEL, CLUSTER, ParallelLayout(32))
