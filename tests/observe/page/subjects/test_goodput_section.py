"""Where the time of all workers went, with the words of the report."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import goodput_section
from tests.harness.finished_runs import finished
from tests.harness.page_runs import whole
from tests.harness.pages import tree


def test_rows(tmp_path: Path) -> None:
    made = tree(f"<div>{goodput_section.draw_goodput(make_page_data(whole(tmp_path)))}</div>")
    rows = [["".join(cell.itertext()) for cell in row] for row in made.iter("tr")]
    # Parts that took nothing have no row.
    assert [row[:2] for row in rows[1:]] == [
        ["useful", "75.0%"],
        ["start", "5.0%"],
        ["repeated", "20.0%"],
    ]
    assert rows[2][3] == "until training began"
    assert "is 20.00 s." in "".join(made.itertext())


def test_where_it_is_not_known(tmp_path: Path) -> None:
    assert goodput_section.draw_goodput(make_page_data(finished(tmp_path))) is None
