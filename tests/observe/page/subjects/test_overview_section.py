"""The verdict comes first, and advice with the largest gain that is sure."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import overview_section
from paceline.record.folder import RunFolder
from paceline.record.live import LiveRecord
from tests.harness.finished_runs import finished
from tests.harness.live_runs import facts
from tests.harness.page_runs import whole
from tests.harness.pages import tree


def test_verdict_and_advice(tmp_path: Path) -> None:
    data = make_page_data(whole(tmp_path))
    made = tree(f"<div>{overview_section.draw_overview(data)}</div>")
    assert [p.text for p in made.iter("p")] == [" ".join(data["verdict"])] and len(
        data["verdict"]
    ) == 3
    gains = [span.text for span in made.iter("span") if span.get("class") == "gain"]
    # by the link, whose gain was predicted
    assert gains[0] == "saves about 23% of a step" and len(gains) == len(data["advice"])


def test_code_in_advice(tmp_path: Path) -> None:
    parts = {"compute": 0.06, "exchange": 0.04, "wait": 0.0, "data": 0.0}
    axes = {"tensor": {"seconds": 0.03, "within": 1.0, "between": 0.0}}
    assert "<code>tensor</code>" in overview_section.draw_overview(
        make_page_data(finished(tmp_path, parts, axes=axes))
    )


def test_a_quiet_run_has_none(tmp_path: Path) -> None:
    assert "What to do" not in overview_section.draw_overview(make_page_data(finished(tmp_path)))


def test_a_run_that_has_failed(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    live = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    assert ">has not ended<" in overview_section.draw_overview(make_page_data(folder))
    for state, badge, words in (
        ("failed", "failed", "failed at step 40: ValueError: &lt;no&gt;"),
        ("running", "running", ""),
    ):
        record = LiveRecord(
            RunFolder(folder), lambda: True, lambda: facts(**live, live={"step": 40}), print
        )
        record.update_file() if state == "running" else record.record_failure(
            ValueError, ValueError("<no>")
        )
        text = overview_section.draw_overview(make_page_data(folder))
        assert f">{badge}<" in text and words in text and "has not ended" not in text


def test_what_the_moment_of_a_live_page_says_is_not_said_again(tmp_path: Path) -> None:
    data = make_page_data(whole(tmp_path))
    text = overview_section.draw_overview({**data, "beside_now": True})
    assert (
        data["verdict"][0] in text.replace("&#x27;", "'")
        and "tiles" not in text
        and "<h1" not in text
    )
