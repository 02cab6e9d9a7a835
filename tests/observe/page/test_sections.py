"""Sections have their ids, are left out where there is nothing to show, and have no number that
the summary hasn't.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.observe.page.data import make_page_data
from paceline.observe.page.sections import COMPARISON_SECTIONS, RUN_SECTIONS, sections
from tests.harness.finished_runs import finished
from tests.harness.page_runs import whole
from tests.harness.pages import Tags, compare_figures


def test_a_whole_run_has_all_but_pipelines(tmp_path: Path) -> None:
    found = sections([make_page_data(whole(tmp_path))])
    assert list(found) == [name for name in RUN_SECTIONS if name != "pipelines"]
    assert all(
        html.startswith(f'<section id="{name}">') and html.endswith("</section>")
        for name, html in found.items()
    )


def test_what_there_is_nothing_of_is_left_out(tmp_path: Path) -> None:
    assert list(sections([make_page_data(finished(tmp_path))])) == [
        "overview",
        "throughput",
        "time",
        "traffic",
        "setup",
    ]


def test_every_number_is_that_of_the_summary(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert compare_figures("".join(sections([make_page_data(folder)]).values()), [summary]) > 80


def test_a_number_that_is_another_one_is_noticed(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    text = "".join(sections([make_page_data(folder)]).values())
    changed = summary | {"step_seconds": summary["step_seconds"] | {"wait": 0.5}}
    with pytest.raises(AssertionError):
        compare_figures(text, [changed])


def test_several_runs(tmp_path: Path) -> None:
    folders = [whole(tmp_path / "a"), whole(tmp_path / "b", sync="LocalSGD(8)", loss=0.5)]
    found = sections([make_page_data(folder) for folder in folders])
    assert list(found) == list(COMPARISON_SECTIONS)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert compare_figures("".join(found.values()), summaries) > 15


def test_nothing_that_a_run_has_named_becomes_markup(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    settings = {
        "script": bad,
        "arguments": [f"--{bad}", bad],
        "optimizers": [{"name": bad}],
        bad: bad,
    }
    changes: dict[str, Any] = {
        "sync": bad,
        "settings": settings,
        "codecs": [{"words": bad}],
        "results": {bad: bad},
    }
    folder = whole(tmp_path, **changes, events=[{"time": 1.0, "what": bad}])
    lines = [
        json.loads(line) | {bad: 1.0}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = make_page_data(folder) | {"name": bad}
    for html in (*sections([data]).values(), *sections([data, data]).values()):
        assert not {"script", "img"} & set(Tags(html).names)


def spoil(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["summary"].update({key: value})


@pytest.mark.parametrize(
    "change",
    [
        spoil("members", [1]),
        spoil("links", ["x"]),
        spoil("settings", [3]),
        spoil("mesh", 5),
        spoil("places", [1, 2]),
    ],
)
def test_a_field_of_another_version_is_said_in_a_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    data = make_page_data(whole(tmp_path))
    change(data)
    with pytest.raises(
        UsageError, match="the summary of run has a field that this version of paceline can't draw"
    ):
        sections([data])
