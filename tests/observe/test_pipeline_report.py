"""The report on pipelines: what stages take, a picture, and advice that pays by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.report import format_report
from paceline.record.pipeline_profile import combine_workers
from paceline.record.timeline import ClockOffset
from tests.harness.finished_runs import finished
from tests.harness.pipeline_profiles import measured


def reported(
    tmp_path: Path, name: str, forwards: Sequence[float], *, replicas: int = 1, **terms: Any
) -> str:
    """The report on a run of such a pipeline, or of several, each twice as slow as the one
    before.
    """
    ranks = terms.get("ranks") or len(forwards)
    profiles = []
    for replica in range(replicas):
        slower = [each * 2**replica for each in forwards]
        found = combine_workers(
            measured(name, slower, **terms),
            range(replica * ranks, (replica + 1) * ranks),
            [ClockOffset()] * ranks,
        )
        assert found is not None
        profiles.append(found.to_fields())
    places = [
        {"data": replica, "stage": stage} for replica in range(replicas) for stage in range(ranks)
    ]
    mesh = {"mesh": {"data": replicas, "stage": ranks}, "places": places}
    return format_report(finished(tmp_path, workers=replicas * ranks, pipelines=profiles, **mesh))


def test_a_pipeline_is_described(tmp_path: Path) -> None:
    text = reported(tmp_path, "1f1b", [0.01, 0.01], layers=[3, 1], micro_batches=3, transfer=0.001)
    assert (
        "Pipeline: 1f1b, 2 stages, 3 micro-batches; a step took 124.0 ms (the median of 3), with a "
        "bubble of 27.4%" in text
    )
    rows = [line.split("  ") for line in text.splitlines() if line.startswith(("  0 ", "  1 "))]
    assert [[cell.strip() for cell in row if cell] for row in rows] == [
        [
            "0",
            "rank 0 (stage 0)",
            "layer0 to layer2",
            "10.0 ms",
            "20.0 ms",
            "34.0 ms",
            "34.0 ms",
            "100 bytes",
        ],
        [
            "1",
            "rank 1 (stage 1)",
            "layer3",
            "10.0 ms",
            "20.0 ms",
            "13.0 ms",
            "34.0 ms",
            "100 bytes",
        ],
    ]
    assert "  rank 0   F0" in text and "time 124, bubble 27.4 %" in text


def test_halves_of_backwards_have_columns(tmp_path: Path) -> None:
    text = reported(tmp_path, "zero-bubble", [0.01, 0.01])
    assert "forward    input   weight" in text and "10.0 ms  10.0 ms  10.0 ms" in text


def test_the_slowest_replica_is_described(tmp_path: Path) -> None:
    text = reported(tmp_path, "1f1b", [0.01, 0.01], replicas=2)
    assert "The slowest of 2 pipelines: 1f1b" in text
    assert "rank 2 (data 1, stage 0)" in text and "20.0 ms   40.0 ms" in text


def test_a_better_split_is_named_with_its_gain(tmp_path: Path) -> None:
    text = reported(tmp_path, "1f1b", [0.03, 0.01], layers=[6, 2])
    assert (
        "Stage 0 (layer0 to layer5, on rank 0 (stage 0)) holds the pipeline up: "
        "a micro-batch takes 90.0 ms there, and 60.0 ms" in text
    )
    assert (
        "split=[4, 4], where it is [6, 2] now, takes 540.0 ms for a "
        "step in the place of 720.0 ms (25% less)" in text
    )


def test_a_layer_that_cant_be_split_is_named(tmp_path: Path) -> None:
    text = reported(tmp_path, "1f1b", [0.03, 0.01])
    assert "Stage 0 (layer0, on rank 0 (stage 0)) holds the pipeline up" in text
    assert (
        "no other split of these 2 layers is faster: name smaller layers, or make that one cheaper"
        in text
    )


def test_equal_stages_get_no_advice_on_their_split(tmp_path: Path) -> None:
    text = reported(tmp_path, "1f1b", [0.01] * 3, layers=[2, 2, 2])
    assert "holds the pipeline up" not in text


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            [1] * 4,
            (
                "schedule='zero-bubble' in the place of '1f1b' takes 270.0 ms for a step in the "
                "place of 330.0 ms (18% less) by simulation"
            ),
        ),
        (
            [2] * 4,
            (
                "schedule='zbv' with split=[1, 1, 1, 1, 1, 1, 1, "
                "1] in the place of '1f1b' takes 255.0 ms"
            ),
        ),
    ],
)
def test_a_better_schedule_is_named_with_its_gain(
    tmp_path: Path, layers: list[int], words: str
) -> None:
    assert words in reported(tmp_path, "1f1b", [0.01] * 4, layers=layers)


def test_memory_that_a_schedule_takes_is_said(tmp_path: Path) -> None:
    text = reported(tmp_path, "1f1b", [0.01] * 4, layers=[2] * 4, transfer=0.01)
    # gpipe waits for fewer messages
    assert "a worker keeps 8 micro-batches at once at most then, 4 now" in text


def test_the_best_schedule_gets_no_advice(tmp_path: Path) -> None:
    text = reported(tmp_path, "zbv", [0.01] * 4, ranks=2)
    assert "schedule=" not in text and "micro_batches=" not in text


def test_more_micro_batches_are_proposed_for_a_large_bubble(tmp_path: Path) -> None:
    text = reported(tmp_path, "1f1b", [0.01] * 4, micro_batches=4)
    assert (
        "The bubble is 43% with 4 micro-batches. micro_batches=8 takes 165.0 ms for a step in the "
        "place of 210.0 ms (21% less)" in text
    )
    assert "with 1 micro-batch." in reported(tmp_path / "one", "gpipe", [0.01] * 2, micro_batches=1)


def test_waits_that_no_schedule_explains_are_told(tmp_path: Path) -> None:
    told = measured("1f1b", [0.01, 0.01])
    for worker in told:
        # everything is late by turns, and the medians don't see it
        for number, step in enumerate(worker["steps"]):
            late = 0
            for place, times in enumerate(step[2]):
                late += 40_000_000 if place % 4 == number else 0
                times[:] = [at + late for at in times]
    found = combine_workers(told, (0, 1), [ClockOffset()] * 2)
    assert found is not None
    text = format_report(finished(tmp_path, pipelines=[found.to_fields()]))
    assert "actions of one kind take different times" in text


def test_a_run_without_stages_has_no_word_on_them(tmp_path: Path) -> None:
    assert "ipeline" not in format_report(finished(tmp_path))


def test_exchange_along_stages_is_left_to_the_pipeline(tmp_path: Path) -> None:
    parts = {"compute": 0.05, "exchange": 0.05, "wait": 0.0, "data": 0.0}
    text = format_report(
        finished(tmp_path, parts, axes={"stage": {"seconds": 0.05, "within": 1.0, "between": 0.0}})
    )
    assert "Exchange takes" not in text
