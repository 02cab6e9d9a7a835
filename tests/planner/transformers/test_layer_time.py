"""Seconds of a layer: what they must not depend on, and which way they must change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.planner.transformers.device import find_accelerator
from paceline.planner.transformers.layer_time import LayerSeconds, time_edges, time_layer
from paceline.planner.transformers.transformer import Transformer, list_layer_matmuls

MODEL = Transformer(6144, 48, 64, 2048, 51200, 4)
A100 = find_accelerator("a100-80gb")


def total(layer: LayerSeconds) -> float:
    return layer.forward_seconds + layer.input_seconds + layer.weight_seconds


def test_a_layer_takes_longer_than_its_operations_at_the_peak() -> None:
    flops = sum(one.flops for one in list_layer_matmuls(MODEL, 8, 4))
    assert total(time_layer(MODEL, A100, 8, 4)) > 3 * flops / A100.peak_flops


def test_the_backward_takes_about_twice_as_long() -> None:
    layer = time_layer(MODEL, A100, 1, 4)
    assert 1.6 < (layer.input_seconds + layer.weight_seconds) / layer.forward_seconds < 2.4


def test_tensor_parallelism_divides_less_than_by_its_workers() -> None:
    whole, eighth = total(time_layer(MODEL, A100, 1, 4)), total(time_layer(MODEL, A100, 8, 4))
    assert whole / 8 < eighth < whole / 4


def test_recomputation_adds_the_forward_or_the_scores() -> None:
    none = time_layer(MODEL, A100, 8, 4)
    full = time_layer(MODEL, A100, 8, 4, recompute="full")
    selective = time_layer(MODEL, A100, 8, 4, recompute="selective")
    assert none.again_seconds == 0
    assert full.again_seconds == full.forward_seconds == none.forward_seconds
    assert total(full) == pytest.approx(total(none) + none.forward_seconds)
    assert 0 < selective.again_seconds < none.forward_seconds / 3


def test_flash_attention_is_faster_and_computes_scores_only_there() -> None:
    flash = replace(MODEL, attention="flash")
    assert total(time_layer(flash, A100, 8, 4)) < total(time_layer(MODEL, A100, 8, 4))
    assert time_layer(flash, A100, 8, 4, recompute="selective").again_seconds == 0


def test_sequence_parallelism_saves_what_is_not_divided() -> None:
    divided = time_layer(MODEL, A100, 8, 4, sequence_parallel=True)
    assert total(divided) < total(time_layer(MODEL, A100, 8, 4))
    alone = time_layer(MODEL, A100, 1, 4, sequence_parallel=True)
    assert alone == time_layer(MODEL, A100, 1, 4)


def test_small_layers_wait_for_their_launches() -> None:
    small = Transformer(256, 2, 4, 128, 1000, 8)
    assert total(time_layer(small, A100, 1, 1)) == pytest.approx(
        total(time_layer(small, A100, 1, 2)), rel=0.05
    )
    quick = replace(A100, launch_seconds=A100.launch_seconds / 2)
    assert total(time_layer(small, quick, 1, 1)) < 0.6 * total(time_layer(small, A100, 1, 1))


def test_a_faster_memory_is_never_slower() -> None:
    fast = replace(A100, memory_bandwidth=2 * A100.memory_bandwidth)
    assert total(time_layer(MODEL, fast, 8, 4)) < total(time_layer(MODEL, A100, 8, 4))


def test_gradients_that_are_added_take_time() -> None:
    added = time_layer(MODEL, A100, 8, 4, accumulation_bytes=6.0)
    assert (
        added.weight_seconds > time_layer(MODEL, A100, 8, 4, accumulation_bytes=0.0).weight_seconds
    )


def test_logits_depend_on_the_vocabulary() -> None:
    first, last = time_edges(MODEL, A100, 8, 4, 24.0)
    larger = time_edges(replace(MODEL, vocabulary=102400), A100, 8, 4, 24.0)
    assert total(larger[1]) > 1.5 * total(last)
    assert first.input_seconds == 0  # tokens have no gradient
    assert total(time_edges(MODEL, A100, 8, 4, 48.0)[1]) > total(last)
