"""Cuts as they are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.parallel.tensor.styles import column, row, sequence
from paceline.parallel.tensor.tensor_cut import tensor

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tensor({}), "names no layers with styles"),
        (lambda: tensor("automatic"), "names no layers with styles"),  # type: ignore[arg-type]
        (lambda: tensor(["up", "down"]), "names no layers with styles"),  # type: ignore[arg-type]
        (lambda: tensor(3), "names no layers with styles"),  # type: ignore[arg-type]
        (lambda: tensor({"a": "column"}), r"'a' has 'column'; give column\(\)"),  # type: ignore[dict-item]
        (lambda: tensor({"a": column()}, divide="heads"), "is a string; give a list"),
        (lambda: column(parts=0), "a layer has 1 part or more"),
        (lambda: sequence(dim=-1), "count dimensions from the first"),
    ],
)
def test_a_cut_that_makes_no_sense_is_refused_as_it_is_written(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_it_is_written_as_it_is_read() -> None:
    assert repr(tensor({"a": column(parts=3), "b": row()}, divide=["a.heads"])) == (
        "tensor({'a': column(parts=3), 'b': row()}, divide=['a.heads'])"
    )
