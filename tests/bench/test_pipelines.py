"""What `paceline bench pipeline` prints, what it refuses, and that the pages show just that."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.bench.pipelines import show_schedules
from paceline.cli import app
from paceline.errors import UsageError
from paceline.parallel.pipelining.schedules import SCHEDULES

PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()


def printed(asked: str, times: tuple[float, float, float] = (1, 2, 0), width: int = 120) -> str:
    out = io.StringIO()
    show_schedules(asked, times, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn(name: str) -> None:
    text = printed(f"{name}:3x4")
    assert text.startswith(f"{name}: 3 ranks, 4 micro-batches") and text.endswith("\n")
    assert all(f"rank {rank} " in text for rank in range(3))


def test_chunks_and_times_count() -> None:
    assert "3 stages on each" in printed("interleaved:2x4x3")
    assert (
        "time 12," in printed("gpipe:2x3")
        and "time 16," in printed("gpipe:2x3", (1, 3, 0))
        and "time 13," in printed("gpipe:2x3", (1, 2, 0.5))
    )


def test_all_are_compared() -> None:
    text = printed("all")
    assert text.startswith("4 ranks, 8 micro-batches; forward 1, backward 2, transfer 0")
    rows = {
        line.split()[0]: line.split()[1:4]
        for line in text.splitlines()[1:]
        if line.strip().startswith(SCHEDULES)
    }
    assert list(rows) == list(SCHEDULES) and rows["interleaved"] == ["2", "28.5", "15.8"]
    assert any(
        line.split()[:3] == ["interleaved", "3", "27"] for line in printed("all:4x8x3").splitlines()
    )


def test_what_cant_be_compared_is_said() -> None:
    text = printed("all:4x3")
    assert (
        "zero-bubble" in text
        and "interleaved with micro_batches=3 on 4 ranks" in text.splitlines()[-1]
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "1f1b",
        "1f1b:",
        "1f1b:4",
        "1f1b:4x",
        "1f1b:0x4",
        "1f1b:4x0",
        "1f1b:65x2",
        "1f1b:2x257",
        "interleaved:2x4x9",
        "all:",
        "1f1b:²x4",
    ],
)
def test_sizes_that_make_no_sense(wrong: str) -> None:
    with pytest.raises(
        UsageError,
        match=f"{re.escape(wrong)}: after the colon go ranks x micro-batches, as in 1f1b:4x8",
    ):
        printed(wrong)


@pytest.mark.parametrize(
    "times", [(0, 2, 0), (1, -1, 0), (1, 2, -1), (1, 2, float("inf")), (float("nan"), 2, 0)]
)
def test_times_that_make_no_sense(times: tuple[float, float, float]) -> None:
    with pytest.raises(
        UsageError,
        match=r"--forward .* --backward .* --transfer .*: give the first two more than 0",
    ):
        printed("1f1b:2x2", times)


def test_what_a_schedule_refuses() -> None:
    with pytest.raises(UsageError, match="1f1b with chunks=2"):
        printed("1f1b:2x4x2")
    with pytest.raises(UsageError, match="give it micro_batches=4 or more"):
        printed("interleaved:4x3")
    with pytest.raises(
        UsageError, match=r"1f2b is not a schedule of pipelines; .*did you mean 1f1b?"
    ):
        printed("1f2b:2x4")


@pytest.mark.parametrize(
    ("line", "shown"),
    re.findall(
        r"^```console\n\$ paceline (bench pipeline[^\n]*)\n(.*?)^```",
        PAGE,
        re.MULTILINE | re.DOTALL,
    ),
)
def test_the_page_shows_what_is_printed(line: str, shown: str) -> None:
    answer = CliRunner().invoke(app, shlex.split(line))
    assert "\n".join(row.rstrip() for row in answer.stdout.splitlines()).strip("\n") == shown.strip(
        "\n"
    )


def test_the_page_shows_each_schedule() -> None:
    assert set(re.findall(r"--draw ([\w-]+):", PAGE)) >= {*SCHEDULES, "all"}
