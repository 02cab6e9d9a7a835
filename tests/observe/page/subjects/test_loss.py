"""What was logged has a curve each."""

from __future__ import annotations

from paceline.observe.page.subjects import loss
from tests.harness.pages import tree

FLAT = {"step": [1.0, 2.0], "time": [0.1, 0.2], "mean": [2.0, 2.0], "low": [2.0, 2.0], "high": [2.0, 2.0], "bad": [0, 0]}
NONE = FLAT | {"mean": [None, None], "low": [None, None], "high": [None, None], "bad": [1, 1]}


def test_curves() -> None:
    made = tree(loss.of_one({"values": {"loss": FLAT, "accuracy": FLAT}}))
    assert [each.text for each in made.iter("h3")] == ["loss", "accuracy"]


def test_nothing_but_nan() -> None:
    assert not [*tree(loss.of_one({"values": {"loss": NONE}})).iter("path")]


def test_nothing_logged() -> None:
    assert loss.of_one({"values": {}}) is None
