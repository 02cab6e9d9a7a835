"""What each worker held, beside what was predicted."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import memory_section
from tests.harness.finished_runs import finished
from tests.harness.page_runs import whole
from tests.harness.pages import tree


def test_rows(tmp_path: Path) -> None:
    made = tree(f"<div>{memory_section.draw_memory(make_page_data(whole(tmp_path)))}</div>")
    rows = [["".join(cell.itertext()) for cell in row] for row in made.iter("tr")]
    assert rows[1] == [
        "rank 0 (shard 0)",
        "1.0 KB",
        "1.0 KB",
        "1.0 KB",
        "1.0 KB",
        "2.0 KB",
        "–",
        "300.0 MB",
    ]


def test_where_it_is_not_known(tmp_path: Path) -> None:
    assert memory_section.draw_memory(make_page_data(finished(tmp_path))) is None


def test_many_workers(tmp_path: Path) -> None:
    held = {
        "measured": {"parameters": 1, "gradients": 1, "optimizer": 1},
        "predicted": {},
        "peak": 1,
    }
    held["predicted"] = {"parameters": 1, "gradients": 1, "optimizer": 1}
    text = memory_section.draw_memory(
        make_page_data(finished(tmp_path, memory=[held] * 100, workers=100))
    )
    assert (
        text is not None
        and "These are the first 64 of 100 workers." in text
        and text.count('class="bar"') == 64
    )
