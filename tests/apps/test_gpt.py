"""The GPT: its sizes, that it looks back only, and that it learns."""

from __future__ import annotations

import pytest
import torch

from paceline.apps.gpt import GPT, MEDIUM, SMALL, GPTShape, next_token_loss

TINY = GPTShape(d=16, layers=2, heads=2, context=8, vocab=11)


def parameters(shape: GPTShape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(shape).parameters())


@pytest.mark.slow
def test_sizes() -> None:
    assert round(parameters(SMALL) / 1e6, 1) == 0.9
    assert round(parameters(MEDIUM) / 1e6) == 19


def test_a_token_sees_only_those_before_it() -> None:
    torch.manual_seed(0)
    model = GPT(TINY).double()
    x = torch.randint(0, 11, (2, 8))
    changed = x.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.slow
def test_it_learns() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x = torch.arange(9).repeat(4, 1)
    first = next_token_loss(model(x[:, :8]), x[:, 1:]).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = next_token_loss(model(x[:, :8]), x[:, 1:])
        loss.backward()
        optimizer.step()
    assert first > 2 and loss.item() < 0.1
    assert model.continued(x[:1, :3], 5)[0].tolist() == list(range(8))


def test_continued_is_drawn_from_the_generator_and_may_outgrow_the_context() -> None:
    model = GPT(TINY)
    start = torch.zeros(1, 1, dtype=torch.int64)
    one, two = (model.continued(start, 20, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert one.shape == (1, 21) and torch.equal(one, two)
    assert model.training


def test_tied() -> None:
    tied = GPT(GPTShape(d=16, layers=1, heads=2, context=8, vocab=11, tied=True))
    assert tied.head.weight is tied.tokens.weight
    assert "head.weight" not in dict(tied.named_parameters())


def test_dropout_acts_in_training_only() -> None:
    model = GPT(GPTShape(d=16, layers=1, heads=2, context=8, vocab=11, dropout=0.5))
    x = torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="can't be cut in 3 heads"):
        GPT(GPTShape(d=16, heads=3))
