"""Sections have their ids, and are left out where there is nothing to show."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.page.data import page_data
from paceline.observe.page.sections import sections
from tests.harness.finished_runs import finished


def test_ids(tmp_path: Path) -> None:
    data = page_data(finished(tmp_path))
    data["values"] = {"loss": {"step": [1, 2], "time": [1, 2], "mean": [2.0, 1.0], "low": [2.0, 1.0], "high": [2.0, 1.0], "bad": [0, 0]}}
    found = sections([data])
    assert all(html.startswith(f'<section id="{name}">') and html.endswith("</section>") for name, html in found.items())
    assert "loss" in found
    assert "loss" not in sections([{**data, "values": {}}])
