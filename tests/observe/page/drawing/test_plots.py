"""Plots have a line for each unbroken piece of a curve, and words for who can't see them."""

from __future__ import annotations

import json

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.plots import HIGH, WIDE, Curve, Mark, Plot, draw, finite
from tests.harness.pages import tree


def plot(*curves: Curve, **changes: object) -> Plot:
    return Plot("loss over steps", curves, scales.scale(0, 4, scales.plain), scales.scale(0, 2, scales.plain), **changes)  # type: ignore[arg-type]


def test_a_curve() -> None:
    text = draw(plot(Curve("loss", [0, 2, 4], [2, 1, 0])))
    assert f'd="M0.0,0.0 {WIDE / 2},{HIGH / 2} {WIDE}.0,{HIGH}.0"' in text
    assert "<title>loss over steps</title>" in text
    assert "legend" not in text


def test_a_curve_with_a_hole() -> None:
    made = tree(draw(plot(Curve("loss", [0, 1, 2, 3, 4], [1, 1, None, 1, None]))))
    assert [path.get("d", "").count(",") for path in made.iter("path")] == [2, 2]


def test_a_band() -> None:
    made = tree(draw(plot(Curve("loss", [0, 4], [1, 1], [0, 0], [2, 2]))))
    band, line = made.iter("path")
    assert band.get("d") == f"M0.0,{HIGH}.0 {WIDE}.0,{HIGH}.0 {WIDE}.0,0.0 0.0,0.0Z"
    assert "line" in line.get("class", "")


def test_several_curves_have_a_legend_and_different_lines() -> None:
    made = tree(draw(plot(Curve("a", [0], [1], kind=0), Curve("b", [0], [1], kind=1))))
    assert [key.get("class") for key in made.iter("span")] == ["key", "key"]
    assert {path.get("class") for path in made.iter("path")} == {"line c0", "line c1"}


def test_marks_and_numbers_for_read_outs() -> None:
    made = tree(draw(plot(Curve("loss", [0, 4], [1, None]), marks=[Mark(2, "a loss", "loss")], unit="step")))
    (mark,) = (line for line in made.iter("line") if "mark" in line.get("class", ""))
    assert mark.get("x1") == "50.00%" and mark[0].text == "a loss"
    (sheet,) = (found for found in made.iter("div") if found.get("data-points"))
    assert json.loads(sheet.get("data-points", "")) == {"x": [0, 4], "unit": "step", "curves": {"loss": [1, None]}}


def test_finite() -> None:
    assert finite([[1.0, None], [float("inf"), 2.0]]) == [1.0, 2.0]
