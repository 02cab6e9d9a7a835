"""The module alone, with a source in memory: it takes what EmbeddingBag takes, and collects what
EmbeddingBag would have as gradient.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.servers.tables.embedding import SparseEmbedding

ROWS, DIM = 20, 3


class Memory:
    """All rows, here; remembers what it was asked for."""

    def __init__(self, rows: Tensor, weight: float = 1.0) -> None:
        self.rows, self.weight, self.asked, self.ahead = (
            rows,
            weight,
            list[tuple[list[int], bool]](),
            list[list[int]](),
        )

    def pull(self, ids: Tensor, *, train: bool) -> Tensor:
        self.asked.append((ids.tolist(), train))
        return self.rows[ids].clone()

    def prefetch(self, ids: Tensor) -> None:
        self.ahead.append(ids.tolist())

    def report_backward(self) -> float:
        return self.weight


def pair(weight: float = 1.0, **options: Any) -> tuple[SparseEmbedding, nn.EmbeddingBag]:
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(ROWS, DIM, **options).double()
    made = SparseEmbedding(ROWS, DIM, dtype=torch.float64, **options)
    made.source = Memory(bag.weight.detach().clone(), weight)
    return made, bag


def whole(made: SparseEmbedding) -> Tensor:
    total = torch.zeros(ROWS, DIM).double()
    for ids, grad in made.gradient() or []:
        total.index_add_(0, ids, grad)
    return total


TWO_DIMS = torch.tensor([[1, 1, 7], [19, 0, 1]])
FLAT = torch.tensor([4, 4, 2, 9, 1], dtype=torch.int32)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, (TWO_DIMS,)),
        ({"padding_idx": 1}, (TWO_DIMS,)),
        ({"padding_idx": -19}, (TWO_DIMS,)),
        ({"padding_idx": 5}, (TWO_DIMS,)),
        ({}, (FLAT, torch.tensor([0, 2, 2], dtype=torch.int32))),
        ({"include_last_offset": True}, (FLAT, torch.tensor([0, 2, 5], dtype=torch.int32))),
        ({}, (torch.empty(0, 3, dtype=torch.int64),)),
        ({}, (torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))),
    ],
)
def test_bags_and_gradients_are_those_of_embedding_bag(mode: str, options: Any, given: Any) -> None:
    made, bag = pair(mode=mode, **options)
    one, other = made(*given), bag(*given)
    assert torch.equal(one, other) and one.requires_grad
    if len(one):
        for y in (one, other):
            (y * torch.arange(1, y.numel() + 1).view_as(y)).sum().backward()
        assert torch.allclose(whole(made), bag.weight.grad, rtol=1e-14)


def test_the_mean_is_the_default_as_in_embedding_bag() -> None:
    assert SparseEmbedding(3, 2).mode == nn.EmbeddingBag(3, 2).mode


def test_each_row_is_asked_for_once() -> None:
    made, _ = pair()
    made(TWO_DIMS)
    with torch.no_grad():
        assert not made(TWO_DIMS[:1]).requires_grad
    made.prefetch(torch.tensor([[3, 3, 2]]))
    assert made.source.asked == [([0, 1, 7, 19], True), ([1, 7], False)] and made.source.ahead == [
        [2, 3]
    ]


def test_backward_passes_add_up_until_zero_grad() -> None:
    made, bag = pair()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    assert made.gradient() is None
    for module in (made, bag):
        y = module(TWO_DIMS)
        y.sum().backward(retain_graph=True)
        (y**2).sum().backward()
        module(TWO_DIMS[1:]).sum().backward()
    assert torch.allclose(whole(made), bag.weight.grad, rtol=1e-14)
    optimizer.zero_grad()
    assert made.gradient() is None
    made(TWO_DIMS).sum().backward()
    assert whole(made).sum() == pytest.approx(2 * DIM)


def test_gradients_are_weighed() -> None:
    made, bag = pair(weight=0.25)
    for module in (made, bag):
        module(TWO_DIMS).sum().backward()
    assert torch.allclose(whole(made), bag.weight.grad / 4)
    made, _ = pair(weight=0.0)
    (made(TWO_DIMS) * torch.nan).sum().backward()
    assert made.gradient() == [], "used, with nothing"


def test_a_frozen_table_has_no_gradient() -> None:
    made, _ = pair()
    made.weight.requires_grad_(False)
    assert not made(TWO_DIMS).requires_grad and made.source.asked[0][1] is False


def test_a_handle_without_rows() -> None:
    """What optimizers and checkpoints see: a parameter of no values, and the seed, drawn as
    torch draws.
    """
    torch.manual_seed(5)
    made, other = SparseEmbedding(10**12, 4), SparseEmbedding(10**12, 4)
    torch.manual_seed(5)
    assert [p.shape for p in made.parameters()] == [(0, 4)] and list(made.state_dict()) == [
        "weight",
        "seed",
    ]
    assert (
        SparseEmbedding(3, 4).seed == made.seed != other.seed
        and SparseEmbedding(3, 4, seed=-2).seed == -2
    )
    assert repr(made) == "SparseEmbedding(1000000000000, 4, mode='mean')"


def test_a_copy_has_no_servers() -> None:
    made, _ = pair()
    made(TWO_DIMS).sum().backward()
    other = copy.deepcopy(made)
    with pytest.raises(UsageError, match="belongs to no run"):
        other(TWO_DIMS)


class TestMisuse:
    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ((torch.tensor([[1, ROWS]]),), f"id {ROWS} is not a row of a table of {ROWS}"),
            ((torch.tensor([[-1, 3]]),), "id -1 is not a row"),
            ((torch.tensor([[1.0]]),), "ids of torch.float32"),
            ((torch.tensor([1]),), r"ids of shape \[1\]"),
            ((TWO_DIMS, torch.tensor([0])), "with offsets"),
            ((TWO_DIMS, None, TWO_DIMS), "no per_sample_weights"),
        ],
    )
    def test_of_inputs(self, given: Any, text: str) -> None:
        made, _ = pair()
        with pytest.raises(UsageError, match=text):
            made(*given)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"mode": "max"}, "mode='max'"),
            ({"rows": 0}, "is not a table"),
            ({"padding_idx": ROWS}, "not a row of a table of 20 rows"),
            ({"std": -1.0}, "not a standard deviation"),
            ({"servers": 0}, "not a number of servers"),
        ],
    )
    def test_of_options(self, options: Any, text: str) -> None:
        with pytest.raises(UsageError, match=text):
            SparseEmbedding(**{"rows": ROWS, "dim": DIM, **options})

    def test_of_a_module_without_a_run(self) -> None:
        with pytest.raises(UsageError, match=r"give its model to run\.prepare first"):
            SparseEmbedding(3, 2)(TWO_DIMS)

    def test_a_gradient_that_is_clipped_or_set(self) -> None:
        for change in (
            lambda p: nn.utils.clip_grad_norm_([p], 1.0),
            lambda p: p.grad.zero_(),
            lambda p: setattr(p, "grad", torch.zeros_like(p)),
        ):
            made, _ = pair()
            made(TWO_DIMS).sum().backward()
            change(made.weight)
            with pytest.raises(UsageError, match=r"weight\.grad of a SparseEmbedding was changed"):
                made.gradient()

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
    def test_a_graph_of_the_gradient(self) -> None:
        made, _ = pair()
        with pytest.raises(UsageError, match="create_graph=True"):
            (made(TWO_DIMS) ** 2).sum().backward(create_graph=True)
