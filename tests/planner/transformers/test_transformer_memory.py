"""Bytes against the formulas and figures of papers, and against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.comm.schedule import LinkSpeed
from paceline.planner.transformers.device import DeviceCluster, find_accelerator
from paceline.planner.transformers.parallel_layout import ParallelLayout
from paceline.planner.transformers.transformer import Transformer
from paceline.planner.transformers.transformer_memory import (
    DeviceMemory,
    StateBytes,
    count_activations,
    count_buffers,
    count_device_memory,
    count_layer_activations,
    count_stage_parameters,
    count_state_bytes,
    fits_cluster,
)

MODEL = Transformer(6144, 48, 64, 2048, 51200, global_batch=64)


@pytest.mark.parametrize(
    ("sharding", "gigabytes"), [(0, 120.0), (1, 31.40625), (2, 16.640625), (3, 1.875)]
)
def test_states_are_those_of_zero(sharding: int, gigabytes: float) -> None:
    assert sum(count_state_bytes(7.5e9, 64, sharding)) == gigabytes * 1e9


def test_states_of_other_precisions() -> None:
    assert count_state_bytes(10, 1, 0, StateBytes(2, 4, 12)) == (20, 40, 120)


def test_activations_of_a_layer_are_those_of_korthikanti() -> None:
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    layout = ParallelLayout(tensor=t, micro_batch=b)
    parallel = replace(layout, sequence_parallel=True)
    sbh = s * b * h
    for chosen, recompute, factor in (
        (layout, "none", 10 + 24 / t + 5 * a * s / (h * t)),
        (layout, "selective", 10 + 24 / t),
        (layout, "full", 2),
        (parallel, "none", 34 / t + 5 * a * s / (h * t)),
        (parallel, "selective", 34 / t),
        (parallel, "full", 2 / t),
    ):
        found = count_layer_activations(MODEL, replace(chosen, recompute=recompute))
        assert found == pytest.approx(sbh * factor), (chosen, recompute)


def test_flash_attention_keeps_no_scores() -> None:
    layout = ParallelLayout(8, micro_batch=4)
    assert count_layer_activations(
        replace(MODEL, attention="flash"), layout
    ) == count_layer_activations(MODEL, replace(layout, recompute="selective"))


def test_a_pipeline_keeps_what_its_schedule_keeps() -> None:
    layer = count_layer_activations(MODEL, ParallelLayout(8))
    n = MODEL.global_batch
    plain = ParallelLayout(8, 8)
    assert count_activations(MODEL, plain) == pytest.approx(48 * layer)
    assert count_activations(MODEL, plain, 7) == pytest.approx(6 * layer)
    # Korthikanti et al. 2022, section 4.2: L (1 + (p - 1) / pm).
    interleaved = ParallelLayout(8, 8, schedule="interleaved", chunks=3)
    assert count_activations(MODEL, interleaved) == pytest.approx(48 * layer * (1 + 7 / 24))
    assert count_activations(MODEL, replace(plain, schedule="gpipe")) == pytest.approx(
        6 * n * layer
    )


def test_parameters_of_stages_add_up() -> None:
    for layout in (
        ParallelLayout(2, 8),
        ParallelLayout(2, 8, schedule="interleaved", chunks=3),
        ParallelLayout(2, 8, schedule="zbv", chunks=2),
    ):
        held = sum(count_stage_parameters(MODEL, layout, rank) for rank in range(8))
        # The first and the last rank each have the tied matrix, but for a V, where it is one rank.
        copies = 0 if layout.schedule == "zbv" else 1
        expected = MODEL.parameters - 2 * MODEL.hidden + copies * MODEL.head_parameters
        assert held * 2 == pytest.approx(expected)


def test_buffers_hold_the_logits_or_a_layer() -> None:
    tokens = 2048
    assert count_buffers(MODEL, ParallelLayout(8)) >= 4 * tokens * 51200 / 8
    small = replace(MODEL, vocabulary=10)
    assert count_buffers(small, ParallelLayout(8, recompute="full")) > count_layer_activations(
        small, ParallelLayout(8)
    )


def test_the_device_with_the_most_counts() -> None:
    memory = count_device_memory(MODEL, ParallelLayout(8, 2))
    assert memory.activations == count_activations(MODEL, ParallelLayout(8, 2), 0)
    assert memory.total == sum(
        (
            memory.parameters,
            memory.gradients,
            memory.optimizer,
            memory.activations,
            memory.buffers,
        )
    )


@pytest.mark.parametrize("sharding", [0, 1, 2])
def test_more_sharding_and_recomputation_need_less(sharding: int) -> None:
    layout = ParallelLayout(2, 1, 4, sharding=sharding)
    less = replace(layout, sharding=sharding + 1)
    assert count_device_memory(MODEL, less).total < count_device_memory(MODEL, layout).total
    order = [
        count_device_memory(MODEL, replace(layout, recompute=recompute)).activations
        for recompute in ("full", "selective", "none")
    ]
    assert order == sorted(order)


def test_what_fits() -> None:
    cluster = DeviceCluster(find_accelerator("a100-80gb"), 8, 1, LinkSpeed(0.0, 1e9))
    assert fits_cluster(DeviceMemory(2e10, 2e10, 1e10, 1e10, 1e10), cluster)
    assert not fits_cluster(DeviceMemory(2e10, 2e10, 2e10, 2e10, 0.5e10), cluster)
