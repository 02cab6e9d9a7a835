"""First values that follow from seed and row alone, and steps of single rows that are torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.servers.process import row_optimizers

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.3),
    "Adagrad": lambda p: torch.optim.Adagrad(
        p, 0.3, lr_decay=0.1, initial_accumulator_value=0.2, eps=1e-6
    ),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, 0.1, betas=(0.7, 0.9), eps=1e-6),
}


class TestFirstValues:
    def test_they_depend_on_seed_and_row_alone(self) -> None:
        ids = torch.tensor([0, 7, 1 << 60, 70_000])
        whole = row_optimizers.make_initial_values(
            torch.arange(70_001), 5, torch.float32, seed=3, std=0.5
        )
        found = row_optimizers.make_initial_values(ids, 5, torch.float32, seed=3, std=0.5)
        assert torch.equal(found[[0, 1, 3]], whole[[0, 7, 70_000]])
        assert not torch.equal(
            found, row_optimizers.make_initial_values(ids, 5, torch.float32, seed=4, std=0.5)
        )
        assert torch.equal(
            row_optimizers.make_initial_values(ids, 5, torch.float32, seed=-1, std=1.0),
            row_optimizers.make_initial_values(ids, 5, torch.float32, seed=-1, std=1.0),
        )

    def test_they_are_normal(self) -> None:
        x = (
            row_optimizers.make_initial_values(
                torch.arange(50_000), 8, torch.float64, seed=1, std=2.0
            )
            / 2
        )
        assert (
            abs(float(x.mean())) < 0.01
            and abs(float(x.std()) - 1) < 0.01
            and abs(float((x**4).mean()) - 3) < 0.05
        )
        assert float(torch.corrcoef(x.T).fill_diagonal_(0).abs().max()) < 0.02
        assert abs(float((x[:-1] * x[1:]).mean())) < 0.01
        assert x.unique().numel() > 0.999 * x.numel()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_of_rows_are_torchs(kind: str) -> None:
    """Rows that come and stay away; SparseAdam beside torch with sparse gradients, the others
    beside dense ones.
    """
    generator = torch.Generator().manual_seed(1)
    whole = nn.Parameter(torch.randn(9, 3, generator=generator, dtype=torch.float64))
    optimizer = OPTIMIZERS[kind]([whole])
    rule, settings = (
        row_optimizers.ROW_RULES[kind],
        row_optimizers.describe_row_optimizer("x", optimizer, 0)[1],
    )
    mine = [whole.detach().clone()] + [
        torch.full_like(whole, rule.make_initial_state(settings)) for _ in rule.state_names
    ]
    for count in range(1, 6):
        ids = torch.randperm(9, generator=generator)[:4].sort().values
        grad = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        sparse = torch.sparse_coo_tensor(ids[None], grad, (9, 3), check_invariants=True)
        whole.grad = sparse if kind == "SparseAdam" else sparse.to_dense()
        optimizer.step()
        found = [kept[ids] for kept in mine]
        rule.step(found, grad, settings, count)
        for kept, values in zip(mine, found, strict=True):
            kept[ids] = values
    assert float((mine[0] - whole.detach()).abs().max()) < 1e-12


class TestRefusals:
    @pytest.mark.parametrize(
        ("made", "text"),
        [
            (torch.optim.Adam, r"optimizer of their own, torch\.optim\.SparseAdam"),
            (torch.optim.RMSprop, "SGD, Adagrad or SparseAdam"),
            (
                lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
                r"momentum=0\.9.* in a group of its own with momentum=0",
            ),
            (lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1), "weight_decay"),
            (lambda p: torch.optim.SGD(p, 0.1, maximize=True), "maximize"),
            (lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.1), "weight_decay"),
            (lambda p: torch.optim.SparseAdam(p, 0.1, maximize=True), "maximize"),
        ],
    )
    def test_what_rows_cant_have(self, made: Any, text: str) -> None:
        with pytest.raises(UsageError, match=text):
            row_optimizers.describe_row_optimizer(
                "users", made([nn.Parameter(torch.zeros(0, 3))]), 0
            )

    def test_what_a_server_is_told(self) -> None:
        with pytest.raises(UsageError, match="no rows can be stepped by Adagrad"):
            row_optimizers.find_rule("Adagrad", {"lr": 0.1})


def test_sums_are_in_order_of_the_workers() -> None:
    one = torch.tensor([1, 4]), torch.tensor([[1e16], [1.0]], dtype=torch.float64)
    two = torch.tensor([1, 2]), torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    three = torch.tensor([1]), torch.tensor([[-1e16]], dtype=torch.float64)
    ids, total = row_optimizers.sum_row_gradients([one, two, three], 1, torch.float64)
    # (1e16 + 1) - 1e16
    assert ids.tolist() == [1, 2, 4] and total[:, 0].tolist() == [0.0, 2.0, 1.0]
    assert row_optimizers.sum_row_gradients([one, three, two], 1, torch.float64)[1][0].tolist() == [
        1.0
    ]
