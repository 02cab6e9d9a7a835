"""Plots have a line for each unbroken piece of a curve, and words for who can't see them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.plots import (
    PLANE_WIDTH,
    Curve,
    Mark,
    Plot,
    draw_plot,
    finite_values,
    line_classes,
    smooth_plot,
)
from tests.harness.pages import tree

HIGH = 220


def plot(*curves: Curve, **changes: object) -> Plot:
    return Plot(
        "loss over steps",
        curves,
        scales.make_scale(0, 4, scales.format_number),
        scales.make_scale(0, 2, scales.format_number),
        **changes,
    )  # type: ignore[arg-type]


def test_a_curve() -> None:
    text = draw_plot(plot(Curve("loss", [0, 2, 4], [2, 1, 0])))
    assert f'd="M0.0,0.0 {PLANE_WIDTH / 2},{HIGH / 2} {PLANE_WIDTH}.0,{HIGH}.0"' in text
    assert "<title>loss over steps</title>" in text
    assert "legend" not in text


def test_a_curve_with_a_hole() -> None:
    made = tree(draw_plot(plot(Curve("loss", [0, 1, 2, 3, 4], [1, 1, None, 1, None]))))
    assert [path.get("d", "").count(",") for path in made.iter("path")] == [2, 2]


def test_a_band_and_an_area() -> None:
    made = tree(
        draw_plot(
            plot(
                Curve("loss", [0, 4], [1, 1], [0, 0], [2, 2]),
                Curve("part", [0, 4], [1, 1], [0, 0], [1, 1], area="k1"),
            )
        )
    )
    band, middle, area, edge = made.iter("path")
    assert band.get("d") == f"M0.0,{HIGH}.0 {PLANE_WIDTH}.0,{HIGH}.0 {PLANE_WIDTH}.0,0.0 0.0,0.0Z"
    assert (band.get("class"), middle.get("class"), area.get("class"), edge.get("class")) == (
        "band c0",
        "line c0 d0",
        "fill k1",
        "edge",
    )


def test_several_curves_have_a_legend_and_different_lines() -> None:
    made = tree(draw_plot(plot(Curve("a", [0], [1], kind=0), Curve("b", [0], [1], kind=1))))
    assert [span.get("class") for span in made.iter("span")] == ["key", "key"]
    assert {path.get("class") for path in made.iter("path")} == {"line c0 d0", "line c1 d1"}
    assert len({line_classes(kind) for kind in range(36)}) == 36  # colours and dashes together


def test_what_stands_below_numbers() -> None:
    made = tree(draw_plot(plot(Curve("a", [0], [1]), under=lambda x: f"{x:g} s")))
    under = [
        (text.text, text.get("class"))
        for text in made.iter("text")
        if "under" in text.get("class", "")
    ]
    # a narrow screen has room for each second one
    assert under[:2] == [("0 s", "tick under"), ("1 s", "tick under odd")]


def test_marks_and_numbers_for_read_outs() -> None:
    read = [Curve("told", [0, 2, 4], [5, None, 7])]
    made = tree(
        draw_plot(
            plot(
                Curve("loss", [0, 4], [1, None]),
                marks=[Mark(2, "a loss", "lost")],
                unit="step",
                read=read,
            )
        )
    )
    (mark,) = (found for found in made.iter("line") if "mark" in found.get("class", ""))
    assert mark.get("x1") == "50.00%" and mark[0].text == "a loss"
    (sheet,) = (found for found in made.iter("div") if found.get("data-points"))
    assert json.loads(sheet.get("data-points", "")) == {
        "x": [0, 2, 4],
        "at": [0, 0.5, 1],
        "unit": "step",
        "curves": {"told": [5, None, 7]},
    }


def test_curves_of_other_places_share_their_read_outs() -> None:
    made = tree(draw_plot(plot(Curve("a", [0, 2], [1, 1]), Curve("b", [1, 2], [0, 0]))))
    (sheet,) = (found for found in made.iter("div") if found.get("data-points"))
    assert json.loads(sheet.get("data-points", ""))["curves"] == {
        "a": [1, None, 1],
        "b": [None, 0, 0],
    }


def test_finite() -> None:
    assert finite_values([[1.0, None], [float("inf"), 2.0]]) == [1.0, 2.0]


def test_smoothed_over_faint_curves_on_a_logarithmic_axis() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0], [100.0, 1.0, None, 1.0]
    drawn = plot(Curve("loss", x, y))
    found = smooth_plot(drawn)
    faint, firm = found.curves
    assert list(faint.y) == [2.0, 0.0, None, 0.0] and faint.faint and not firm.faint
    assert firm.y[0] == 2.0 and firm.y[1] == pytest.approx(math.log10(90.1)) and firm.y[2] is None
    assert (
        found.read == drawn.curves
        and (found.y.low, found.y.high) == (0.0, 2.0)
        and found.y.ticks[-1][1] == "100"
    )
    below = smooth_plot(replace(drawn, curves=[Curve("gain", x, [-1.0, 1.0, 1.0, 1.0])]))
    assert (below.y.low, below.y.high) == (-1.0, 1.0)
