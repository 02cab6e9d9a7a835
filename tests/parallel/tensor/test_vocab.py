"""Logits that are cut by words look whole: their cross entropy is that of the whole ones, and so
is whatever else is asked of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.tensor.exchanges import TensorAxis
from paceline.parallel.tensor.vocab import VocabLogits
from tests.harness.tensor_cuts import CountingGroup
from tests.harness.thread_groups import ThreadGroup, spawn

WORDS, TOKENS = 12, 5


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(2, TOKENS, WORDS, generator=generator, dtype=torch.float64) * 5).to(dtype)
    targets = torch.randint(WORDS, (2, TOKENS), generator=generator)
    return logits, targets


def cut(group: Any, logits: Tensor) -> tuple[VocabLogits, Tensor]:
    """My part of logits as the whole, and the leaf that gets the gradient of my part."""
    width = WORDS // group.size
    leaf = logits[..., group.rank * width : (group.rank + 1) * width].clone().requires_grad_()
    return VocabLogits.wrap_part(leaf * 1, TensorAxis(group), WORDS, "head"), leaf


def agree(
    size: int, use: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float64
) -> list[CountingGroup]:
    """Compare what `use(logits, targets)` gives, and its gradient, with that of whole logits;
    return the groups with what they called.
    """
    logits, targets = drawn(dtype)
    alone = logits.clone().requires_grad_()
    wanted = use(alone, targets)
    wanted.sum().backward()

    def body(group: ThreadGroup) -> tuple[Any, Any, CountingGroup]:
        counting = CountingGroup(group)
        mine, leaf = cut(counting, logits)
        found = use(mine, targets)
        found.sum().backward()
        return found.whole() if isinstance(found, VocabLogits) else found, leaf.grad, counting

    results = spawn(size, body)
    limit = (
        {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-2}
    )
    for found, _, _ in results:
        assert type(found) is Tensor
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, **limit)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in results], -1), alone.grad, **limit)  # type: ignore[arg-type]
    return [group for *_, group in results]


LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda z, y: F.cross_entropy(z.view(-1, WORDS), y.view(-1)),
    lambda z, y: F.cross_entropy(z.reshape(-1, z.size(-1)), y.reshape(-1), reduction="sum"),
    lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none"),
    lambda z, y: F.cross_entropy(
        z.to(torch.float64).contiguous().flatten(0, 1), y.flatten(), label_smoothing=0.1
    ),
    lambda z, y: F.cross_entropy(z[..., :-1, :].reshape(-1, z.shape[-1]), y[..., 1:].reshape(-1)),
    lambda z, y: F.cross_entropy(z[:, -1], y[:, -1]),
    lambda z, y: F.cross_entropy(z[y > 3], y[y > 3]),
    lambda z, y: F.cross_entropy(
        z.to(torch.ones(3, dtype=torch.float64))
        .type_as(torch.ones(2, 2, dtype=z.dtype))
        .view(-1, WORDS),
        y.view(-1),
    ),
    lambda z, y: F.cross_entropy(
        (30 * torch.tanh(z / 30)).view(-1, WORDS),
        y.masked_fill(y == 2, -1).view(-1),
        ignore_index=-1,
    ),
    lambda z, y: torch.nn.CrossEntropyLoss(label_smoothing=0.3, ignore_index=1)(
        z.flatten(0, 1), y.flatten()
    ),
]
GATHERED: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    lambda z, y: F.cross_entropy(z.flatten(0, 1), F.one_hot(y.flatten(), WORDS).to(z.dtype)),
    lambda z, y: F.cross_entropy(
        z.flatten(0, 1), y.flatten(), weight=torch.linspace(1, 2, WORDS, dtype=z.dtype)
    ),
    lambda z, y: z.log_softmax(-1).flatten(0, 1)[torch.arange(y.numel()), y.flatten()].mean(),
    lambda z, y: z[..., 3] + z.sum(-1),
    lambda z, y: (z * torch.arange(WORDS, dtype=z.dtype)).mean(),
    lambda z, y: z.view(-1).square(),
    lambda z, y: torch.stack([z, 2 * z]).amax(-1),
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_cross_entropy_is_that_of_whole_logits_and_gathers_nothing(size: int, number: int) -> None:
    for group in agree(size, LOSSES[number]):
        assert group.calls == {"all_reduce": 2}


@pytest.mark.parametrize("number", range(len(GATHERED)))
def test_anything_else_is_computed_of_the_whole_logits(number: int) -> None:
    for group in agree(2, GATHERED[number]):
        assert group.calls["all_gather"] > 0


def test_half_precision_is_summed_in_float32() -> None:
    agree(2, LOSSES[0], torch.bfloat16)


def test_a_factor_that_is_trained_gets_its_gradient_from_all_words() -> None:
    logits, targets = drawn()

    def slope(z: Tensor) -> Tensor:
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        F.cross_entropy((z * scale).flatten(0, 1), targets.flatten()).backward()
        assert scale.grad is not None
        return scale.grad

    wanted = slope(logits)
    for found in spawn(2, lambda group: slope(cut(group, logits)[0])):
        torch.testing.assert_close(found, wanted)


def test_they_look_whole() -> None:
    logits, _ = drawn()

    def body(group: ThreadGroup) -> list[Any]:
        mine, _ = cut(group, logits)
        assert isinstance(mine[:, :2], VocabLogits)
        assert "part 1 of 2 of logits (2, 5, 12)" in repr(mine) or group.rank == 0
        return [
            mine.shape,
            mine.size(2),
            mine.numel(),
            len(mine),
            mine.ndim,
            mine.dtype,
            mine.argmax(-1),
            mine.detach().tolist(),
        ]

    wanted = [
        logits.shape,
        WORDS,
        logits.numel(),
        2,
        3,
        logits.dtype,
        logits.argmax(-1),
        logits.tolist(),
    ]
    for found in spawn(2, body):
        assert found[:6] == wanted[:6]
        assert torch.equal(found[6], wanted[6])
        assert found[7] == wanted[7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z: z.mul_(2), "can't be changed by mul_; change logits.whole"),
        (lambda z: z.__setitem__((..., 0), 0.0), "can't be changed by __setitem__"),
        (lambda z: torch.add(z, z, out=z), "can't be written to by out="),
        (
            lambda z: F.cross_entropy(z.flatten(0, 1), torch.full((2 * TOKENS,), WORDS)),
            "head: target 12 is out of range; there are 12 words",
        ),
    ],
)
def test_what_would_be_lost_is_refused(change: Callable[[Tensor], object], message: str) -> None:
    logits, _ = drawn()

    def body(group: ThreadGroup) -> None:
        mine, _ = cut(group, logits)
        change(mine.detach())

    with pytest.raises(UsageError, match=message):
        spawn(2, body)
