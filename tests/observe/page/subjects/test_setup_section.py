"""Settings are in words, and the mesh is a grid."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import setup_section
from tests.harness.page_runs import whole
from tests.harness.pages import tree


def test_settings(tmp_path: Path) -> None:
    settings = {
        "arguments": ["--lr", "0.1", "--shift", "-1", "--fast", "--name=x y", "a b", "c"],
        "optimizers": [{"name": "SGD", "lr": 0.1}, {"name": "AdamW", "betas": [0.9, 0.99]}],
        "parameters": 1_234_567,
        "min_workers": 2,
    }
    found = setup_section.describe_settings(make_page_data(whole(tmp_path, settings=settings)))
    assert found == {
        "strategy": "AllReduce()",
        "workers": "2 on 2 hosts",
        "mesh": "data=1, shard=2",
        "--lr": "0.1",
        "--shift": "-1",
        "--fast": "yes",
        "--name": "x y",
        "arguments": "'a b' c",
        "optimizer": "SGD(lr=0.1)",
        "optimizer 2": "AdamW(betas=0.9, 0.99)",
        "parameters": "1,234,567",
        "min workers": "2",
        "readers of each worker": "0",
    }


def test_the_mesh(tmp_path: Path) -> None:
    made = tree(f"<div>{setup_section.draw_setup(make_page_data(whole(tmp_path)))}</div>")
    grid = next(div for div in made.iter("div") if div.get("class") == "mesh")
    assert [["".join(cell.itertext()) for cell in row] for row in grid.iter("tr")] == [
        [" ", "shard 0", "shard 1"],
        ["data 0", "rank 0", "rank 1"],
    ]
    assert "Samples of a usual batch" in "".join(made.itertext()) and "auc" in "".join(
        made.itertext()
    )


def test_a_run_under_way_has_none(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "summary.json").unlink()
    assert setup_section.draw_setup(make_page_data(folder)) is None
