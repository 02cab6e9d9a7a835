"""The dtypes that can be measured are known by their names alone."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.unequal.probe.dtypes import POSSIBLE, USUAL, check_dtypes


def test_all_of_them_are_torchs() -> None:
    assert all(getattr(torch, name).is_floating_point for name in POSSIBLE)
    assert check_dtypes(USUAL) == USUAL and check_dtypes(["float64"]) == ("float64",)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["flaot32"], "'flaot32' can't be measured; .*did you mean float32"),
        (["int8"], "'int8' can't be measured"),
        (["float32", "float32"], "name each one once"),
        ([], "none at all"),
    ],
)
def test_others_are_refused(names: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_dtypes(names)
