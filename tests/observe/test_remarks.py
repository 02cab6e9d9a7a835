"""A gain is said as what it is: known or not, about or at most, of a step or of the run."""

from __future__ import annotations

from paceline.observe.remarks import Remark


def test_gains_in_words() -> None:
    assert Remark("x").saving_in_words == ""
    assert Remark("x", 0.123).saving_in_words == "saves about 12% of a step"
    assert Remark("x", 0.4, most=True, of="run").saving_in_words == "saves at most 40% of the run"
