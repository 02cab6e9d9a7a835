from __future__ import annotations

import pytest
import torch

from paceline.comm.group_protocol import OPS
from paceline.comm.reduction_rules import DTYPES, accumulation_dtype, check_operation, reduce_parts
from paceline.errors import UsageError


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_what_is_admitted_can_be_reduced_and_the_rest_says_what_to_do(
    op: str, dtype: torch.dtype
) -> None:
    parts = [torch.tensor([1, 0, 3]).to(dtype), torch.tensor([2, 5, 1]).to(dtype)]
    exact = dtype.is_floating_point or dtype.is_complex
    countable, ordered = dtype != torch.bool, not dtype.is_complex
    allowed = {
        "sum": countable,
        "product": countable,
        "mean": exact,
        "min": ordered,
        "max": ordered,
    }
    if not allowed[op]:
        with pytest.raises(UsageError, match=r"use op=|convert|absolute"):
            check_operation(op, dtype)
        return
    assert check_operation(op, dtype) == op
    wanted = {
        "sum": [3, 5, 4],
        "product": [2, 0, 3],
        "mean": [1.5, 2.5, 2],
        "min": [1, 0, 1],
        "max": [2, 5, 3],
    }[op]
    found = reduce_parts(op, parts)
    assert found.dtype == dtype and torch.equal(found, torch.tensor(wanted).to(dtype))
    assert parts[0].tolist() == torch.tensor([1, 0, 3]).to(dtype).tolist()


def test_unknown_operations_and_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'median'.*sum, mean"):
        check_operation("median", torch.float32)
    with pytest.raises(UsageError, match="uint16"):
        check_operation("sum", torch.uint16)


def test_only_sums_and_products_of_halves_are_held_wider() -> None:
    assert (
        accumulation_dtype(torch.float16, "sum")
        == accumulation_dtype(torch.bfloat16, "product")
        == torch.float32
    )
    assert (
        accumulation_dtype(torch.float16, "max") == torch.float16
        and accumulation_dtype(torch.float64, "sum") == torch.float64
    )
