"""Pictures of pipelines: they show when each action begins and ends, in lines that are short
enough.
"""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from paceline.parallel.pipelining.drawing import draw_timeline, tabulate_timelines
from paceline.parallel.pipelining.schedules import SCHEDULES, make_schedule
from paceline.parallel.pipelining.simulate import (
    PipelineTimeline,
    StageTimes,
    make_even_times,
    simulate_schedule,
)


def timeline(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None, transfer: float = 0.0
) -> PipelineTimeline:
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    return simulate_schedule(schedule, make_even_times(schedule, 1, 2, transfer))


def rows(text: str, rank: int) -> str:
    """All that a picture shows of a rank, its bands one after another."""
    return "".join(
        f"{line.removeprefix(f'rank {rank}   ')}\n"
        for line in text.splitlines()
        if line.startswith(f"rank {rank} ")
    )


def test_a_picture() -> None:
    text = draw_timeline(timeline("1f1b", 2, 3), 100).plain
    assert text.splitlines() == [
        "1f1b: 2 ranks, 3 micro-batches",
        "F0: forward of micro-batch 0; B0: its backward; .: idle",
        "",
        "rank 0   F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
        "rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- .  .",
        "",
        "time 12, bubble 25.0 %, micro-batches kept at most: 2, 1, rank by rank",
    ]


def test_halves_and_second_stages_have_letters_of_their_own() -> None:
    text = draw_timeline(timeline("zbv", 1, 1), 100).plain
    assert "rank 0   F0 f0 i0 w0 I0 W0\n" in text
    assert (
        "I0: gradients of its inputs; W0: of parameters; f, i, w: in the rank's second stage"
        in text
    )
    assert (
        "f, b: in the rank's second stage"
        in draw_timeline(timeline("interleaved", 2, 2), 100).plain
    )


def test_more_stages_than_two_are_told_apart() -> None:
    assert (
        "rank 0   F0a F0b F0c B0c --- B0b --- B0a ---\n"
        in draw_timeline(timeline("interleaved", 1, 1, 3), 100).plain
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [40, 77, 140])
def test_all_actions_are_there_in_lines_that_are_short_enough(name: str, width: int) -> None:
    shown = timeline(name, 3, 12)
    text = draw_timeline(shown, width).plain
    for rank, spans in enumerate(shown.rows):
        assert all(len(line) + 9 <= width for line in rows(text, rank).splitlines())
        labels = re.findall(r"[A-Za-z]\d+", rows(text, rank))
        kinds = {"f": "forward", "b": "backward", "i": "input", "w": "weight"}
        assert [(kinds[label[0].lower()], int(label[1:])) for label in labels] == [
            (s.action.kind, s.action.micro_batch) for s in spans
        ]


def test_bands_say_when_they_begin() -> None:
    text = draw_timeline(timeline("gpipe", 2, 3), 9 + 3 * 5).plain
    assert [line for line in text.splitlines() if line.startswith(("time  ", "rank 0"))] == [
        "time     0",
        "rank 0   F0 F1 F2 .  .",
        "time     5",
        "rank 0   .  B0 -- B1 --",
        "time     10",
        "rank 0   B2 --",
    ]


def test_what_begins_in_between_is_shown_there() -> None:
    lines = draw_timeline(timeline("gpipe", 2, 1, transfer=0.5), 100).plain.splitlines()
    assert lines[3:5] == [
        "rank 0   F0  .   .   .   .   B0  ---",
        "rank 1   .   . F0  B0  ---   .   .",
    ]
    odd = draw_timeline(timeline("gpipe", 2, 1, transfer=0.37), 100).plain
    assert all(label in odd for label in ("F0", "B0", "time 6.74"))


def test_an_action_too_short_for_its_name_has_its_letter() -> None:
    schedule = make_schedule("gpipe", 2, 1)
    assert (
        "F B0 -- --"
        in draw_timeline(
            simulate_schedule(schedule, StageTimes([6, 1], [6, 8])), 200
        ).plain.splitlines()[4]
    )


def test_no_time_at_all() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    assert (
        "time 0, bubble 0.0 %"
        in draw_timeline(simulate_schedule(schedule, make_even_times(schedule, 0, 0)), 80).plain
    )


def test_memory_of_many_ranks_is_a_span() -> None:
    assert draw_timeline(timeline("1f1b", 9, 9), 80).plain.endswith(
        "micro-batches kept at most: 1 to 9"
    )
    assert draw_timeline(timeline("gpipe", 9, 9), 80).plain.endswith(
        "micro-batches kept at most: 9 on each rank"
    )


def test_colours_follow_the_letters() -> None:
    text = draw_timeline(timeline("zero-bubble", 2, 2), 80)
    styles = {
        text.plain[span.start : span.end].strip()[:1]: str(span.style)
        for span in text.spans
        if text.plain[span.start].isalpha()
    }
    assert styles == {"F": "cyan", "I": "green", "W": "yellow"}


def test_the_table() -> None:
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(
        tabulate_timelines([timeline("1f1b", 4, 8), timeline("interleaved", 4, 8, transfer=0.5)])
    )
    first, second = (
        line.split()
        for line in console.export_text().splitlines()
        if line.strip().startswith(("1f1b", "inter"))
    )
    assert first == ["1f1b", "1", "33", "27.3", "%", "4", "48"]
    assert second[:3] == ["interleaved", "2", "35.5"] and second[-2:] == ["5.5", "112"]
