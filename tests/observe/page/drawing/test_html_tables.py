"""Tables name their rows and columns."""

from __future__ import annotations

from paceline.observe.page.drawing.html_tables import fold_content, make_table
from tests.harness.pages import tree


def test_heads() -> None:
    made = tree(
        fold_content("As a table", make_table(("worker", "a"), [("rank 0", "<1>")], "Who did what"))
    )
    assert made.tag == "details" and made[0].text == "As a table"
    assert [
        (cell.tag, cell.get("scope"), cell.text) for row in made.iter("tr") for cell in row
    ] == [
        ("th", "col", "worker"),
        ("th", "col", "a"),
        ("th", "row", "rank 0"),
        ("td", None, "<1>"),
    ]
    assert next(made.iter("caption")).text == "Who did what"
