"""Runs side by side: losses against steps, seconds and bytes, and the settings that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.formatting import format_bytes
from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import comparison_sections
from paceline.record.folder import RunFolder
from paceline.record.live import LiveRecord
from tests.harness.finished_runs import finished
from tests.harness.live_runs import facts
from tests.harness.page_runs import whole
from tests.harness.pages import tree


def test_losses_against_steps_seconds_and_bytes(tmp_path: Path) -> None:
    datas = [make_page_data(whole(tmp_path / name)) for name in "ab"]
    made = tree(f"<div>{comparison_sections.draw_losses(datas)}</div>")
    assert [title.text for title in made.iter("h3")] == [
        "against steps",
        "against seconds",
        "against bytes that all workers have sent between hosts",
        "val/accuracy against steps",
    ]
    lines = [path.get("class") for path in made.iter("path")]
    pair, faint = ["line c0 d0", "line c1 d1"], ["line c0 d0 faint", "line c1 d1 faint"]
    # by colour and by dashes; smoothed ones over faint ones
    assert lines == [*pair, *faint, *pair, *pair * 2, *pair, *faint, *pair]
    assert datas[0]["values"]["loss"]["between"][-1] == pytest.approx(60 * 400_000)


def test_runs_that_have_nothing_in_common(tmp_path: Path) -> None:
    assert (
        comparison_sections.draw_losses(
            [make_page_data(whole(tmp_path / "a")), make_page_data(finished(tmp_path / "b"))]
        )
        is None
    )


def test_what_differs(tmp_path: Path) -> None:
    settings = {
        "script": "train.py",
        "arguments": ["--lr=0.5", "data"],
        "optimizers": [{"name": "AdamW", "lr": 0.5}],
        "seed": 7,
    }
    datas = [
        make_page_data(whole(tmp_path / "a")),
        make_page_data(whole(tmp_path / "b", settings=settings, sync="LocalSGD(8)")),
    ]
    rows = [
        [cell.text for cell in row]
        for row in tree(comparison_sections.draw_differences(datas)).iter("tr")
    ]
    assert rows == [
        ["setting", "run (1)", "run (2)"],
        ["strategy", "AllReduce()", "LocalSGD(8)"],
        ["--lr", "0.1", "0.5"],
        ["optimizer", "AdamW(lr=0.1)", "AdamW(lr=0.5)"],
    ]
    assert "Their settings are the same." in comparison_sections.draw_differences(
        [datas[0], datas[0]]
    )


def test_a_run_under_way(tmp_path: Path) -> None:
    folder = whole(tmp_path / "a")
    (folder / "summary.json").unlink()
    assert (
        "Settings of run (1) are known once the run has ended."
        in comparison_sections.draw_differences(
            [make_page_data(folder), make_page_data(whole(tmp_path / "b"))]
        )
    )


def test_a_run_that_has_failed_says_so_beside_its_name(tmp_path: Path) -> None:
    folder = whole(tmp_path / "a")
    (folder / "summary.json").unlink()
    LiveRecord(
        RunFolder(folder), lambda: True, lambda: facts(live={"step": 40}), print
    ).record_failure(ValueError, ValueError("no"))
    text = comparison_sections.draw_runs(
        [make_page_data(folder), make_page_data(whole(tmp_path / "b"))]
    )
    assert (
        format_bytes(600_000) in text and "0 bytes" not in text
    )  # sent in a step, as its metrics say
    assert "failed at step 40: ValueError: no" in text and text.count(">failed<") == 1


def test_bytes_of_runs_that_sent_none(tmp_path: Path) -> None:
    data = make_page_data(finished(tmp_path, bytes_sent={"within": 0.0, "between": 0.0}))
    assert comparison_sections.draw_traffics([data, data]) is None
    assert "7.5 MB" in (
        comparison_sections.draw_traffics([make_page_data(finished(tmp_path / "b")), data]) or ""
    )
