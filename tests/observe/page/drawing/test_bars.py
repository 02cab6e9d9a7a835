"""Bars are on one scale, and their parts are told apart without colours."""

from __future__ import annotations

from paceline.observe.page.drawing.bars import Bar, define_hatchings, draw_bars
from tests.harness.pages import tree

WORDS = {"compute": "compute", "wait": "waits", "data": "data"}


def test_sizes() -> None:
    made = tree(
        draw_bars(
            "A step",
            [
                Bar("rank 0", {"compute": 3, "wait": 1}, "4 s", "note"),
                Bar("rank 1", {"compute": 2, "wait": 0}),
            ],
            WORDS,
        )
    )
    fills = [
        rect
        for rect in made.iter("rect")
        if "fill" in rect.get("class", "") and "%" in rect.get("width", "")
    ]
    assert [(rect.get("x"), rect.get("width")) for rect in fills] == [
        ("0.000%", "75.000%"),
        ("75.000%", "25.000%"),
        ("0.000%", "50.000%"),
    ]
    assert [title.text for title in made.iter("title")] == [
        "A step, rank 0: compute 75%, waits 25% of the longest",
        "A step, rank 1: compute 50% of the longest",
    ]
    keys = [span for span in made.iter("span") if span.get("class") == "key"]
    assert [span[0].tail for span in keys] == ["compute", "waits"]  # of data there is none


def test_each_part_has_its_own_hatching() -> None:
    ids = {pattern.get("id") for pattern in tree(define_hatchings()).iter("pattern")}
    made = tree(draw_bars("A step", [Bar("x", {"compute": 1, "wait": 1, "data": 1})], WORDS))
    used = {rect.get("fill", "")[5:-1] for rect in made.iter("rect") if rect.get("fill")}
    assert len(used) == 3 and used <= ids


def test_a_least_scale_and_nothing_at_all() -> None:
    made = tree(draw_bars("x", [Bar("a", {"compute": 1})], WORDS, least=2.0))
    assert [rect.get("width") for rect in made.iter("rect") if rect.get("class")] == ["50.000%"]
    assert "nothing of the longest" in draw_bars("x", [Bar("a", {"compute": 0})], WORDS)
