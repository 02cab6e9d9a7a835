"""What was logged has a curve each, and a table; what was no number is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import loss_section
from tests.harness.finished_runs import finished
from tests.harness.page_runs import whole
from tests.harness.pages import tree


def made(data: Any) -> Any:
    return tree(f"<div>{loss_section.draw_loss(data)}</div>")


def test_curves(tmp_path: Path) -> None:
    found = made(make_page_data(whole(tmp_path)))
    assert [each.text for each in found.iter("h3")] == ["val/accuracy"]
    assert [path.get("class") for path in found.iter("path")] == [
        # without a band: each point is a step; then smoothed, over a faint one
        *("line c0 d0", "line c0 d0 faint", "line c0 d0"),
        "line c0 d0",
    ]
    rows = [[cell.text for cell in row] for row in found.iter("tr")]
    assert (
        rows[0] == ["step", "time", "loss", "val/accuracy"]
        and rows[-1] == ["60", "6 s", "0.3873", "0.9833"]
        and len(rows) == 21
    )


def test_a_band_where_a_point_is_many_steps(tmp_path: Path) -> None:
    data = make_page_data(whole(tmp_path))
    data["values"]["loss"]["high"] = [value + 1 for value in data["values"]["loss"]["high"]]
    assert "band c0" in [path.get("class") for path in made(data).iter("path")]


def test_nothing_but_nan(tmp_path: Path) -> None:
    data = make_page_data(whole(tmp_path))
    none = [None] * 60
    data["values"] = {
        "loss": data["values"]["loss"] | {"mean": none, "low": none, "high": none, "bad": [1] * 60}
    }
    found = made(data)
    assert not [*found.iter("path")]
    assert "loss was no finite number 60 times, for the first time by step 1." in [
        p.text for p in found.iter("p")
    ]


def test_nothing_logged(tmp_path: Path) -> None:
    assert loss_section.draw_loss(make_page_data(finished(tmp_path))) is None
