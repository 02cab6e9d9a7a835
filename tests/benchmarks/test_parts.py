"""A benchmark writes its own part of the page of results, from the data that is checked in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import page as learning
from benchmarks.parts import write_part
from benchmarks.peers import page as peers
from tests.harness.documents import DOCS


def test_a_part_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("# Results\n\nBefore.\n")
    write_part(tmp_path, "one", "make one", "first")
    write_part(tmp_path, "two", "make two", "other")
    write_part(tmp_path, "one", "make one", "second\n")
    text = page.read_text()
    assert "first" not in text and text.index("Before.") < text.index("second") < text.index(
        "other"
    )
    assert text.count("<!-- begin one: made by `make one`") == text.count("<!-- end one -->") == 1


def test_a_page_that_is_missing_is_made(tmp_path: Path) -> None:
    assert (
        write_part(tmp_path, "one", "make one", "first")
        .read_text()
        .startswith("# Results\n\n<!-- begin one")
    )


DATA = [("benchmarks.json", peers), ("learning.json", learning)]


@pytest.mark.parametrize(("data", "generator"), DATA)
def test_the_page_has_what_the_data_says(data: str, generator: Any) -> None:
    found = json.loads((DOCS / "pictures" / data).read_text())
    page = (DOCS / "results.md").read_text()
    assert generator.text(found).strip() in page, "write the part again with `report`"
