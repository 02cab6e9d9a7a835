"""Which layouts are possible, and how layers are dealt to stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import UsageError
from paceline.planner.transformers.parallel_layout import (
    ParallelLayout,
    check_layout,
    deal_layers,
    explain_impossible,
    list_rank_stages,
)
from paceline.planner.transformers.transformer import Transformer

MODEL = Transformer(64, 8, 4, 32, 100, global_batch=16)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(),
        ParallelLayout(4, 2, 2, 4),
        ParallelLayout(2, 4, 1, 2, "interleaved", 2, "full", sequence_parallel=True),
        ParallelLayout(1, 4, 2, 1, "zbv", 2, sharding=1),
        ParallelLayout(1, 1, 8, 2, sharding=3),
        ParallelLayout(1, 10),  # two stages have the embedding and the logits alone
    ],
)
def test_possible_layouts(layout: ParallelLayout) -> None:
    check_layout(MODEL, layout)


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        (ParallelLayout(8), "heads"),
        (ParallelLayout(data=3), "global_batch"),
        (ParallelLayout(micro_batch=3), "global_batch"),
        (ParallelLayout(pipeline=11), "layers"),
        (ParallelLayout(sequence_parallel=True), "sequence parallel"),
        (ParallelLayout(pipeline=2, data=2, sharding=2), "pipeline"),
        (ParallelLayout(sharding=1), "data above 1"),
        (ParallelLayout(sharding=4), "sharding"),
        (ParallelLayout(pipeline=2, schedule="interleaved"), "chunks"),
        (ParallelLayout(pipeline=4, micro_batch=8, schedule="interleaved", chunks=2), "needs 4"),
        (ParallelLayout(pipeline=2, schedule="zbv"), "2 stages"),
        (ParallelLayout(pipeline=2, schedule="2f2b"), "unknown"),
        (ParallelLayout(chunks=2), "chunks"),
        (ParallelLayout(tensor=0), "tensor"),
        (ParallelLayout(recompute="some"), "recompute"),  # type: ignore[arg-type]
    ],
)
def test_impossible_layouts(layout: ParallelLayout, word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        check_layout(MODEL, layout)
    assert "\n" not in str(caught.value)


def test_heads_of_keys_are_shared() -> None:
    assert not explain_impossible(replace(MODEL, kv_heads=2), ParallelLayout(4))
    assert explain_impossible(Transformer(60, 8, 12, 32, 100, 16, kv_heads=4), ParallelLayout(6))


@pytest.mark.parametrize("layers", [8, 9, 22, 30, 105])
@pytest.mark.parametrize(("pipeline", "chunks"), [(1, 1), (4, 1), (8, 1), (4, 2)])
def test_layers_are_dealt_evenly(layers: int, pipeline: int, chunks: int) -> None:
    dealt = deal_layers(layers, ParallelLayout(pipeline=pipeline, chunks=chunks))
    assert sum(dealt) == layers and len(dealt) == pipeline * chunks
    assert max(dealt) - min(dealt) <= 1


def test_the_first_and_the_last_stage_have_less() -> None:
    assert deal_layers(22, ParallelLayout(pipeline=8)) == (2, 3, 3, 3, 3, 3, 3, 2)


def test_stages_of_a_rank() -> None:
    assert list_rank_stages(ParallelLayout(pipeline=4, schedule="zbv", chunks=2), 1) == [1, 6]
    assert list_rank_stages(ParallelLayout(pipeline=4, chunks=3), 1) == [1, 5, 9]
    assert list_rank_stages(ParallelLayout(), 0) == [0]


def test_a_description_has_all_parts() -> None:
    layout = ParallelLayout(2, 4, 1, 2, "interleaved", 2, "full", sequence_parallel=True)
    text = layout.describe()
    for word in (
        "tensor 2",
        "stage 4",
        "data 1",
        "micro-batch 2",
        "interleaved 2",
        "full",
        "sequence",
    ):
        assert word in text
    assert "1f1b" not in ParallelLayout(8).describe()
