"""Shares are cut into micro-batches whose losses add up to that of the share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.pipelining.batches import BatchShare, cut_batch


def share(rows: int = 7, **terms: Any) -> BatchShare:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, generator=numbers, dtype=torch.float64, requires_grad=True)
    y = torch.randint(-1, 3, (rows,), generator=numbers)
    return BatchShare(
        (x,),
        {"flag": True},
        y,
        **{
            "loss": lambda out, y: F.cross_entropy(out, y, ignore_index=-1, reduction="sum"),
            **terms,
        },
    )


def bind(args: tuple[Any, ...], options: Any) -> dict[str, Any]:
    return {"x": args[0], **options}


@pytest.mark.parametrize("rows", [7, 3, 1])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_rows_are_cut_evenly_and_count_by_number(rows: int, count: int) -> None:
    whole = share(rows)
    found = cut_batch(whole, count, bind)
    assert len(found) == count and sum(batch.rows for batch in found) == rows
    assert abs(sum(batch.part for batch in found) - 1) < 1e-12
    assert torch.equal(
        torch.cat([batch.inputs["x"] for batch in found if batch.part]), whole.inputs[0]
    )
    assert all(batch.inputs["flag"] is True for batch in found)
    # copies, which count nothing
    assert [batch.rows == 0 for batch in found] == [batch.part == 0 for batch in found]


def test_means_over_tokens_add_up() -> None:
    def mean(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y, ignore_index=-1)

    whole = share(9, loss=mean, weigh=lambda batch: int((batch[-1] >= 0).sum()))
    wanted = mean(whole.inputs[0], whole.target)
    found = 0.0
    for batch in cut_batch(whole, 4, bind):
        root, value = whole.compute_loss(batch.inputs["x"], batch)
        root.backward()  # type: ignore[no-untyped-call]
        found += value * whole.loss_weight(batch)
    assert abs(found - float(wanted.detach())) < 1e-12
    given, again = whole.inputs[0].grad.clone(), torch.autograd.grad(wanted, whole.inputs[0])[0]
    assert torch.allclose(given, again, atol=1e-14, rtol=0)


def test_a_part_without_weight_gives_zeros_and_no_nan() -> None:
    whole = share(2, loss=lambda out, y: out.sum() / 0, weigh=lambda batch: 0.0)
    (batch,) = cut_batch(whole, 1, bind)
    root, value = whole.compute_loss(batch.inputs["x"], batch)
    root.backward()  # type: ignore[no-untyped-call]
    assert value == 0.0 and torch.equal(whole.inputs[0].grad, torch.zeros_like(whole.inputs[0]))


def test_a_sum_counts_each_part_whole() -> None:
    whole = share(5, reduction="sum", scale=8.0)
    parts = [whole.compute_loss(batch.inputs["x"], batch) for batch in cut_batch(whole, 2, bind)]
    assert (
        abs(
            sum(value for _, value in parts)
            - float(whole.loss(whole.inputs[0], whole.target).detach())
        )
        < 1e-12
    )  # type: ignore[misc]
    assert all(abs(float(root.detach()) - 8 * value) < 1e-9 for root, value in parts)


def test_a_sum_leaves_out_copies() -> None:
    whole = share(3, reduction="sum")
    found = cut_batch(whole, 5, bind)
    for batch in found:
        whole.compute_loss(batch.inputs["x"], batch)[0].backward()  # type: ignore[no-untyped-call]
    given = whole.inputs[0].grad.clone()
    wanted = torch.autograd.grad(whole.loss(whole.inputs[0], whole.target), whole.inputs[0])[0]  # type: ignore[misc]
    assert torch.allclose(given, wanted, atol=1e-14, rtol=0)
    assert [whole.loss_weight(batch) for batch in found] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_weigh_of_other_batches_is_refused() -> None:
    whole = share(6, weigh=lambda batch: 2.0, weight=5.0)
    with pytest.raises(UsageError, match=r"gives 5 for the batch, and 6 for its micro-batches"):
        cut_batch(whole, 3, bind)


def test_rows_that_differ_are_refused() -> None:
    with pytest.raises(UsageError, match="3 and 4 rows"):
        _ = BatchShare((torch.zeros(3, 1), torch.zeros(4, 1)), {}, None, None).rows


@dataclass(frozen=True)
class Row:
    x: Tensor
    name: str = "row"


def test_dataclasses_are_cut_and_put_together_by_rows() -> None:
    x = torch.arange(7.0)
    whole = BatchShare((Row(x),), {}, x, None)
    assert whole.rows == 7
    parts = [
        batch.inputs["x"] for batch in cut_batch(whole, 3, lambda args, options: {"x": args[0]})
    ]
    assert [len(part.x) for part in parts] == [3, 2, 2]
    assert torch.equal(whole.join_outputs(parts).x, x) and whole.join_outputs(parts).name == "row"
